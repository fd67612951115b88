"""56-bit hashes: for seeds that depend on names, and for comparing texts across ranks."""
from __future__ import annotations

import hashlib


def hash56(text: str) -> int:
    """Return a 56-bit hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def seed_of(*values) -> int:
    """Return a 56-bit seed: a hash of the values."""
    return hash56(repr(values))
