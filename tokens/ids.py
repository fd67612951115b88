"""Sequences of token ids."""
from __future__ import annotations


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the number of tokens that two sequences share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
