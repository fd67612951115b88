"""The attention mask of the Triton kernels: not a tensor [B, T, n], but what it is computed from."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

import tree
from engine.graphs import materialize
from model import apply_sliding_window


class TreeMask(NamedTuple):
    """The arguments of `tree.tree_attention_mask`, and sliding windows.

    local [B, T, M]: which of the M slots after the first `length` each token attends to; the pass's own
    tokens are the last T of them. first [B, T]: the first committed slot that each token attends to; None:
    all of them.
    """

    slots: Tensor
    length: Tensor
    local: Tensor
    first: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the mask [B, T, n] bool."""
        visible = tree.tree_attention_mask(self.slots, self.length, self.local)
        return visible if self.first is None else visible & (self.slots >= self.first[..., None])

    def within(self, window: int) -> TreeMask:
        """Return the mask of layers with a sliding window, see `model.apply_sliding_window`."""
        first = self.length[:, None] + self.local.sum(-1) - window
        local = materialize(apply_sliding_window(self.local, window))
        return self._replace(local=local, first=materialize(first))
