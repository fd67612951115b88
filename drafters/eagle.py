"""Drafting with an EAGLE head, on the dynamic tree of EAGLE-2/3 or the static one of EAGLE-1.

EAGLE-1 arXiv 2401.15077, EAGLE-2 2406.16858, EAGLE-3 2503.01840; SafeAILab/EAGLE cnets.py and cnets1.py.

One catch-up pass reads the tokens committed by the last step with their true features and gives the first level; each
further level is one pass over the nodes that are expanded. The head's caches hold the committed rows in slots 0..N-1 and
the drafted rows behind them, level by level; the next catch-up overwrites those.
"""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Drafter, StaticTree
from model import Head
from tree import Growth, PathTree, Tree, TreeShape, pick, visible_slots


class Eagle(Drafter):
    """Any EAGLE head on the dynamic tree: with an EAGLE-1 head this is EAGLE-2, with an EAGLE-3 head EAGLE-3.

    `coupled`: rank candidates by draft logits + the very noise the target will be sampled with, so that the head guesses
    which sample the target takes (Daliri, Musco, Suresh, arXiv 2408.07978). It never changes what is emitted. Without
    noise (greedy) both are the plain EAGLE tree.
    Raises ValueError if the tree is wider than the head's vocabulary.
    """

    def __init__(self, head: Head, shape: TreeShape | PathTree, coupled: bool = True):
        super().__init__(shape)
        if shape.width > head.args.draft_vocab_size:
            raise ValueError(f"tree: width {shape.width} exceeds the head's vocabulary of {head.args.draft_vocab_size}")
        self.head, self.coupled = head, coupled
        self.aux_layers = head.args.aux_layers
        self.passes = shape.window - 1
        self.cached = (head.args,)

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.caches = self.head.caches(batch, slots, dtype, device)

    def read(self, next_tokens: Tensor, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        # Row i pairs feature i with token i+1 and stands at position i (only differences matter to RoPE).
        self.head(next_tokens, self.head.fuse(features), positions, positions, visible, self.caches)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        last = self._catch_up(state, slots)
        return self.grow(last, state, slots, self._draft_noise(noise), self.shape).prune(state.root())

    def grow(self, last: Tensor, state, slots: Tensor, noise: Tensor | None, shape: TreeShape) -> Growth:
        """All candidates below the root, from the catch-up's last output [B, 1, H]; draft noise [B, W, Vd] or None."""
        k = shape.width
        scores, tokens = self._best(last, noise, 0, k)
        grown = Growth(shape, scores[:, 0], tokens[:, 0])
        feature = last.expand(-1, k, -1)
        row_slots = state.length[:, None] + torch.arange(k, device=slots.device)
        for level in range(shape.depth):
            if level:
                feature = pick(feature, grown.advance())
            positions = (state.length + level)[:, None].expand(-1, k)
            visible = visible_slots(slots, state.length, grown.beam_sees)
            feature = self.head(grown.beam_tokens, feature, positions, row_slots + level * k, visible, self.caches)
            grown.extend(*self._best(feature, noise, level + 1, k))
        return grown

    def _draft_noise(self, noise: Tensor | None) -> Tensor | None:
        """The target's noise [B, W, V] at the ids the head knows [B, W, Vd]; None where it is not to be used."""
        return noise[..., self.head.draft_ids] if noise is not None and self.coupled else None

    def _catch_up(self, state, slots: Tensor) -> Tensor:
        """Read what the last step committed: W rows, of which the first n_new are real; what the others write is
        overwritten or never seen. Returns the last real row's output [B, 1, H]."""
        head, start = self.head, state.length - state.n_new
        positions = start[:, None] + torch.arange(self.shape.window, device=slots.device)
        next_tokens = state.tokens.gather(1, positions + 1)
        h = head(next_tokens, head.fuse(state.features), positions, positions, slots <= positions[..., None], self.caches)
        return pick(h, (state.n_new - 1).clamp(min=0)[:, None])

    def _best(self, h: Tensor, noise: Tensor | None, step: int, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest next tokens after rows h [B, R, H]: log-probabilities and target ids, both [B, R, k]."""
        logits = self.head.logits(h)
        if noise is not None:
            logits = logits + noise[:, step, None]
        top, index = logits.topk(k, dim=-1)
        return top - logits.logsumexp(-1, keepdim=True), self.head.draft_ids[index]


class StaticEagle(Eagle):
    """Any EAGLE head on a static tree (EAGLE-1, arXiv 2401.15077, section 4.1): which ranks are expanded is fixed, only the
    tokens are drafted. Every index is known beforehand and kept on the device."""

    def __init__(self, head: Head, shape: PathTree, coupled: bool = True):
        super().__init__(head, shape, coupled)
        self.static = StaticTree(shape)
        for i, level in enumerate(shape.levels):
            for name in ("nodes", "rows", "came_from", "sees"):
                self.register_buffer(f"{name}_{i}", torch.tensor(getattr(level, name)), persistent=False)

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().allocate(batch, slots, dtype, device)
        self.to(device)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        noise, B = self._draft_noise(noise), state.length.shape[0]
        h = self._catch_up(state, slots)
        tokens, given, used = [state.root()[:, None]], [], 0  # given: log-probability of each node given its parent
        for i, level in enumerate(self.shape.levels):
            if i:  # expand what the level above proposed
                rows = getattr(self, f"rows_{i}")
                count = len(level.rows)
                own = state.length[:, None] + used + torch.arange(count, device=slots.device)
                sees = getattr(self, f"sees_{i}").expand(B, -1, -1)
                positions = (state.length + i - 1)[:, None].expand(-1, count)
                visible = visible_slots(slots, state.length, sees)
                h = self.head(tokens[-1][:, rows], h[:, getattr(self, f"came_from_{i}")], positions, own, visible, self.caches)
                used += count
            scores, ranked = (x.flatten(1) for x in self._best(h, noise, i, self.shape.width))  # [B, rows * width]
            nodes = getattr(self, f"nodes_{i}")
            tokens.append(ranked[:, nodes])
            given.append(scores[:, nodes])
        given = torch.cat((torch.zeros_like(given[0][:, :1]), *given), dim=1)
        return self.static.of(torch.cat(tokens, dim=1), given)
