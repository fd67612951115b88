"""Drafting with Hydra heads (Ankner et al., arXiv 2402.05109): a static tree whose nodes are guessed from those above them.

The published code fills short paths up with their last token, and greedily chooses a path before it cuts that off, so that one may
win by its filling. Here a path is as long as it is.
"""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Request
from drafters.medusa import Guessing, build_guessing
from guessers import HydraHeads
from tree import PathTree, Tree, pick


class Hydra(Guessing):
    """Level after level, each guess reading the tokens above it; Hydra++'s layer reads all committed tokens."""

    def __init__(self, head: HydraHeads, shape: PathTree, coupled: bool = True):
        super().__init__(head, shape, coupled)
        self.cached = (head.args,) if head.args.prefix else ()
        for i, level in enumerate(shape.levels):
            for name in ("nodes", "rows", "came_from"):
                self.register_buffer(f"{name}_{i}", torch.tensor(getattr(level, name), dtype=torch.int64), persistent=False)

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().allocate(batch, slots, dtype, device)
        self.caches = self.head.caches(batch, slots, dtype, device) if self.head.args.prefix else None

    def read(self, state, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        self.head(self.head.fuse(features), positions, positions, visible, self.caches)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        head, start = self.head, state.length - state.n_new
        positions = start[:, None] + torch.arange(self.shape.window, device=slots.device)
        p = head(head.fuse(state.features), positions, positions, slots <= positions[..., None], self.caches)
        p = pick(p, (state.n_new - 1).clamp(min=0)[:, None])  # [B, 1, H]
        k, root = self.shape.width, state.root()[:, None]
        paths, tokens, given = root[..., None], [root], [torch.zeros_like(p[..., 0])]
        for i in range(len(self.shape.levels)):
            if i:  # expand what the level above proposed
                above = paths[:, getattr(self, f"came_from_{i}")]
                paths = torch.cat((above, tokens[-1][:, getattr(self, f"rows_{i}"), None]), -1)
            logits = head.guess_logits(head.output(p.expand(-1, paths.shape[1], -1), paths), i)
            if noise is not None and self.coupled:
                logits = logits + noise[:, i, None, head.draft_ids]
            top, index = logits.topk(k, dim=-1)
            nodes = getattr(self, f"nodes_{i}")
            tokens.append(head.draft_ids[index].flatten(1)[:, nodes])
            given.append((top - logits.logsumexp(-1, keepdim=True)).flatten(1)[:, nodes])
        return self.static.of(torch.cat(tokens, 1), torch.cat(given, 1))


def build(request: Request) -> Hydra:
    """The heads in CHECKPOINT/hydra; see `medusa.build_guessing`."""
    return build_guessing(request, "hydra", Hydra)
