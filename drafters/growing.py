"""Drafting with a network, level by level, on the dynamic tree of EAGLE-2.

One catch-up pass reads the tokens committed by the last step and gives the first level; each further level is one pass over
the nodes that are expanded. The network's caches hold the committed rows first and the drafted rows behind them, level by
level; the next catch-up overwrites those.
"""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Drafter
from tree import Growth, PathTree, Tree, TreeShape, pick, visible_slots


class Growing(Drafter):
    """What such drafters share. `coupled`: rank candidates by draft logits + the very noise the target will be sampled with, so
    that the drafter guesses which sample the target takes (Daliri, Musco, Suresh, arXiv 2408.07978). It never changes what is
    emitted. Without noise (greedy) both are the plain tree.

    ahead: how many rows its cache holds beyond those of the target's, 1 where it has read the root. vocabulary: how many ids it
    knows. Raises ValueError if the tree is wider than that.
    """

    ahead = 0

    def __init__(self, shape: TreeShape | PathTree, vocabulary: int, coupled: bool = True):
        super().__init__(shape)
        if shape.width > vocabulary:
            raise ValueError(f"tree: width {shape.width} exceeds the head's vocabulary of {vocabulary}")
        self.coupled, self.passes = coupled, shape.window - 1

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        last = self._catch_up(state, slots)
        return self.grow(last, state, slots, self._draft_noise(noise), self.shape).prune(state.root())

    def grow(
        self, last: Tensor, state, slots: Tensor, noise: Tensor | None, shape: TreeShape, said: list[Tensor] | None = None
    ) -> Growth:
        """All candidates below the root, from the catch-up's last output [B, 1, H]; draft noise [B, W, Vd] or None.

        said: takes the logits [B, R, Vd] of every level.
        """
        k, base = shape.width, state.length + self.ahead
        scores, tokens = self._best(last, noise, 0, k, said)
        grown = Growth(shape, scores[:, 0], tokens[:, 0])
        feature = last.expand(-1, k, -1)
        row_slots = base[:, None] + torch.arange(k, device=slots.device)
        for level in range(shape.depth):
            if level:
                feature = pick(feature, grown.advance())
            positions = (base + level)[:, None].expand(-1, k)
            visible = visible_slots(slots, base, grown.beam_sees)
            feature = self._rows(grown.beam_tokens, feature, positions, row_slots + level * k, visible)
            grown.extend(*self._best(feature, noise, level + 1, k, said))
        return grown

    def _best(self, h: Tensor, noise: Tensor | None, step: int, k: int, said: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The k likeliest next tokens after rows h [B, R, H]: log-probabilities and target ids, both [B, R, k]."""
        logits = self._logits(h)
        if said is not None:
            said.append(logits)
        if noise is not None:
            logits = logits + noise[:, step, None]
        top, index = logits.topk(k, dim=-1)
        return top - logits.logsumexp(-1, keepdim=True), self._ids(index)

    def _draft_noise(self, noise: Tensor | None) -> Tensor | None:
        """The target's noise [B, W, V] at the ids the drafter knows [B, W, Vd]; None where it is not to be used."""
        return noise if self.coupled else None

    def _ids(self, index: Tensor) -> Tensor:
        """Target ids of ids of its own."""
        return index

    def _catch_up(self, state, slots: Tensor) -> Tensor:
        """Read what the last step committed. Returns the output [B, 1, H] that the first level is drafted from."""
        raise NotImplementedError

    def _rows(self, tokens: Tensor, feature: Tensor, positions: Tensor, own: Tensor, visible: Tensor) -> Tensor:
        """One pass over drafted tokens [B, k], each with the output [B, k, H] it was drafted from -> outputs [B, k, H]."""
        raise NotImplementedError

    def _logits(self, h: Tensor) -> Tensor:
        """Outputs [B, R, H] -> float32 logits [B, R, Vd]."""
        raise NotImplementedError
