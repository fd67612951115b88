"""Drafting with a DFlash head (arXiv 2602.06036): the target's features as keys and values, a block of masks.

Its levels do not depend on each other's tokens; the tree over them is DDTree's (arXiv 2604.12989), and
`--tree n+1,n-1,1` is the paper's chain. A causal head is JetSpec's (arXiv 2606.18394). A DSpark head (arXiv
2607.05147) drafts in the same pass, and the tree grows through its Markov head (`drafters.block`).
"""
from __future__ import annotations

from torch import Tensor

from drafters.base import Setup
from drafters.block import BlockDrafter, build_block
from networks.block import BlockHead


class DFlash(BlockDrafter):
    """A DFlash head. It drafts the whole block it was trained for, also for a smaller tree."""

    head: BlockHead

    @property
    def block_rows(self) -> int:
        return self.head.args.block

    @property
    def _sees_all(self) -> bool:
        return not self.head.args.causal

    def _read(self, state, features: Tensor, positions: Tensor, own: Tensor, visible: Tensor) -> None:
        self.head.read(self.head.fuse(features), positions, own, visible, self.caches)

    def _draft(
        self, state, context: Tensor, positions: Tensor, own: Tensor, visible: Tensor
    ) -> Tensor:
        return self.head(state.root(), context, positions, own, visible, self.caches)


def build(setup: Setup) -> DFlash:
    """Load the head; see `block.build_block`."""
    return build_block(setup, DFlash)
