"""Hashes of 56 bits: seeds that depend on names, and texts that ranks compare."""
from __future__ import annotations

import hashlib


def hash56(text: str) -> int:
    """Return a 56-bit hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def seed_of(*what) -> int:
    """Return a seed of 56 bits, from a hash of the arguments."""
    return hash56(repr(what))
