"""The step of a sharded target (tensor parallel, `kernels.tp`).

Every rank runs the whole step. The lm_head is sharded by tokens: each rank samples from its tokens' logits,
and the ranks exchange the samples. The drafted tree is rank 0's.
"""
from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model import Transformer
from tree import Tree, gather_tokens

if TYPE_CHECKING:
    from engine.draft import Drafter
    from engine.state import State
    from engine.step import Step


@cache
def _rank_class(step_class: type) -> type:
    """Return the subclass of a device's `engine.step.Step` with the methods of `RankStep`."""
    return type(f"Rank{step_class.__name__}", (RankStep, step_class), {})


def sharded_step(step: Step, target: Transformer):
    """Return the step of a sharded target. step: the `engine.step.Step` of its device."""
    new = object.__new__(_rank_class(type(step)))
    vars(new).update(vars(step), ranks=target.ranks, head=target.lm_head)
    return new


class RankStep:
    """Mixin of the step of a sharded target; the other base class is the device's step.

    ranks: the `kernels.tp.Ranks`. head: the `kernels.tp.ShardedHead` of the target.
    """

    def draft(self, drafter: Drafter, state: State, slots: Tensor, noise: Tensor | None, costs=None) -> Tree:
        """Return rank 0's tree.

        A replicated head's results may differ in the last bit on another processor. Then ranks would verify
        different trees, and all-reduce values of different nodes.
        """
        tree = super().draft(drafter, state, slots, noise, costs)
        if tree.tokens.shape[1] == 1:
            return tree
        parts = tree.tokens, tree.parent, tree.depth, tree.ancestors.long()
        flat = self.ranks.broadcast(torch.cat([part.flatten() for part in parts]))
        # One split per tensor: GPU kernels would copy a strided one before reading it.
        received = [x.view_as(part) for x, part in zip(flat.split([part.numel() for part in parts]), parts)]
        return Tree(*received[:3], received[3].bool(), tree.scores, tree.levels)

    def logits(self, target: Transformer, x: Tensor) -> Tensor:
        """Return the logits of this rank's tokens."""
        return self.head.layer.logits(target.norm(x))

    def gather_logits(self, logits: Tensor) -> Tensor:
        return self.ranks.concatenate(logits, self.head.tokens)

    def draw(self, logits: Tensor, noise: Tensor | None, depth: Tensor | None = None) -> Tensor:
        """Sample from this rank's tokens, then return the best sample over all ranks."""
        if logits.shape[-1] == sum(self.head.tokens):
            return super().draw(logits, noise, depth)
        first = self.head.first
        noise = None if noise is None else noise[..., first : first + logits.shape[-1]].contiguous()
        drawn = super().draw(logits, noise, depth)
        index = drawn.clamp(min=0)
        value = logits.gather(-1, index[..., None])[..., 0]
        if noise is not None:
            shared = noise[:, :1].expand(-1, drawn.shape[1], -1)
            rows = shared if depth is None else gather_tokens(noise, depth)
            value = value + rows.gather(-1, index[..., None])[..., 0]
        # -1: not finite on one rank, so on all
        value = torch.where(drawn < 0, torch.inf, value)
        return self.ranks.argmax(value, torch.where(drawn < 0, drawn, drawn + first))
