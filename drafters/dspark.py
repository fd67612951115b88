"""Drafting with a DSpark head (arXiv 2607.05147): DFlash's pass, and a tree through the Markov head."""
from __future__ import annotations

from drafters.block import build_block
from drafters.dflash import DFlash
from drafters.request import Request


def build(request: Request) -> DFlash:
    """The drafter with the head in CHECKPOINT/dspark; see `block.build_block`."""
    return build_block(request, DFlash)
