"""EAGLE-3 drafting with the dynamic tree of EAGLE-2 (arXiv 2503.01840 and 2406.16858; SafeAILab/EAGLE cnets.py).

One catch-up pass reads the tokens committed by the last step with their true features and gives the first level; then D
passes of k rows each expand the best k nodes. The head's cache holds the committed rows in slots 0..N-1 and the drafted
rows behind them, level by level; the next catch-up overwrites those.
"""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Drafter
from model import Eagle3Head, KVCache
from tree import Growth, Tree, TreeShape, pick, visible_slots


class Eagle3(Drafter):
    """Drafts with an EAGLE-3 head.

    `coupled`: rank candidates by draft logits + the very noise the target will be sampled with, so that the head guesses
    which sample the target takes (Daliri, Musco, Suresh, arXiv 2408.07978). It never changes what is emitted. Without
    noise (greedy) both are the plain EAGLE tree.
    """

    def __init__(self, head: Eagle3Head, shape: TreeShape, coupled: bool = True):
        super().__init__(shape)
        if shape.width > head.args.draft_vocab_size:
            raise ValueError(f"tree: width {shape.width} exceeds the head's vocabulary of {head.args.draft_vocab_size}")
        self.head, self.coupled = head, coupled
        self.aux_layers = head.args.aux_layers
        self.passes = shape.depth + 1
        self.cached = (head.args,)

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.cache = KVCache(batch, slots, self.head.args, dtype, device)

    def read(self, next_tokens: Tensor, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        # Row i pairs feature i with token i+1 and stands at position i (only differences matter to RoPE).
        self.head(next_tokens, self.head.fuse(features), positions, positions, visible, self.cache)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        head, k = self.head, self.shape.width
        if noise is not None:
            noise = noise[..., head.draft_ids] if self.coupled else None

        # Catch-up: W rows, of which the first n_new are real; what the others write is overwritten or never seen.
        start = state.length - state.n_new
        positions = start[:, None] + torch.arange(self.shape.window, device=slots.device)
        visible = slots <= positions[..., None]
        next_tokens = state.tokens.gather(1, positions + 1)
        h = head(next_tokens, head.fuse(state.features), positions, positions, visible, self.cache)
        last = pick(h, (state.n_new - 1).clamp(min=0)[:, None])  # [B, 1, H]
        scores, tokens = self._best(last, noise, 0)
        grown = Growth(self.shape, scores[:, 0], tokens[:, 0])
        feature = last.expand(-1, k, -1)

        row_slots = state.length[:, None] + torch.arange(k, device=slots.device)
        for level in range(self.shape.depth):
            if level:
                feature = pick(feature, grown.advance())
            positions = (state.length + level)[:, None].expand(-1, k)
            visible = visible_slots(slots, state.length, grown.beam_sees)
            feature = head(grown.beam_tokens, feature, positions, row_slots + level * k, visible, self.cache)
            grown.extend(*self._best(feature, noise, level + 1))
        return grown.prune(state.root())

    def _best(self, h: Tensor, noise: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
        """The k likeliest next tokens after rows h [B, R, H]: log-probabilities and target ids, both [B, R, k]."""
        logits = self.head.logits(h)
        if noise is not None:
            logits = logits + noise[:, step, None]
        top, index = logits.topk(self.shape.width, dim=-1)
        return top - logits.logsumexp(-1, keepdim=True), self.head.draft_ids[index]
