"""Drafting with a P-EAGLE head (arXiv 2602.01469; vllm-project/vllm#32887): all levels in one pass."""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Setup, newest
from drafters.block import BlockDrafter, build_block
from drafters.eagle import Eagle
from networks.eagle import PEagleHead
from tree import pick


class PEagle(BlockDrafter):
    """A P-EAGLE head: the catch-up's last row drafts the first level, rows that read a mask the others."""

    head: PEagleHead
    _read = Eagle._read
    _sees_all = False

    @property
    def block_rows(self) -> int:
        return self.shape.window - 2

    def _draft(
        self, state, context: Tensor, positions: Tensor, own: Tensor, visible: Tensor
    ) -> Tensor:
        # Row i pairs feature i with token i+1, and stands at position i.
        head, W = self.head, context.shape[1]
        known = state.tokens.gather(1, positions[:, :W] + 1)
        masks = known.new_full((len(known), self.block_rows), head.args.mask_id)
        hidden = head.fuse(head.mask_hidden.to(context.dtype)[None, None])
        features = torch.cat((context, hidden.expand(*masks.shape, -1)), 1)
        h = head(torch.cat((known, masks), 1), features, positions, own, visible, self.caches)
        return head.rows(torch.cat((pick(h, newest(state, W)), h[:, W:]), 1))


def build(setup: Setup) -> PEagle:
    """Load the head; see `block.build_block`."""
    return build_block(setup, PEagle)
