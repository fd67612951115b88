"""Drafting with Hydra heads (Ankner et al., arXiv 2402.05109).

The tree is static. Each node is guessed from those above it.
The published code fills short paths up with their last token, and greedily chooses a path before it cuts that
off, so that one may win by its filling. Here nothing is filled up.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from drafters.base import Proposal, Setup, StaticLevel, newest, unread_rows
from drafters.medusa import MultiTokenDrafter, build_multi_token
from networks.hydra import HydraHeads
from tree import PathTree, pick


class Hydra(MultiTokenDrafter):
    """Level after level, each guess reads the tokens above it. Hydra++'s layer reads all committed tokens."""

    def __init__(self, head: HydraHeads, shape: PathTree, coupled: bool = True):
        super().__init__(head, shape, coupled)
        self.cached = (head.args,) if head.args.prefix else ()
        self.levels = nn.ModuleList(StaticLevel(level) for level in shape.levels)

    def allocate(
        self, batch: int, slots: int, room: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().allocate(batch, slots, room, dtype, device)
        self.caches = self.head.caches(batch, slots, dtype, device) if self.head.args.prefix else None

    def read(self, state, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        self.head(self.head.fuse(features), positions, positions, visible, self.caches)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        head, noise = self.head, self.draft_noise(noise)
        positions, visible = unread_rows(state, slots)
        features = head.fuse(state.features[:, : positions.shape[1]])
        p = head(features, positions, positions, visible, self.caches)
        p = pick(p, newest(state, p.shape[1]))  # [B, 1, H]
        k, root = self.shape.width, state.root()[:, None]
        paths, tokens, scores = root[..., None], [root], [torch.zeros_like(p[..., 0], dtype=torch.float32)]
        for i, level in enumerate(self.levels):
            if i:  # expand what the level above proposed
                paths = torch.cat((paths[:, level.came_from], tokens[-1][:, level.rows, None]), -1)
            logits = head.guess_logits(head.output(p.expand(-1, paths.shape[1], -1), paths), i)
            shift = None if noise is None else noise[:, i, None]
            level_scores, ids = state.backend.rank(logits, shift, k)
            tokens.append(head.draft_ids[ids].flatten(1)[:, level.nodes])
            scores.append(level_scores.flatten(1)[:, level.nodes])
        return Proposal(self.static.of(torch.cat(tokens, 1), torch.cat(scores, 1)))


def build(setup: Setup) -> Hydra:
    """Load the heads; see `medusa.build_multi_token`."""
    return build_multi_token(setup, Hydra)
