"""Drafting with Hydra heads (Ankner et al., arXiv 2402.05109): a static tree whose nodes are guessed from those above them."""
from __future__ import annotations

import torch
from torch import Tensor

from checkpoint import load_head
from drafters.base import Drafter, Request, StaticTree
from drafters.medusa import static_tree
from errors import CheckpointError
from guessers import HydraHeads
from tree import PathTree, Tree, pick


class Hydra(Drafter):
    """Arguments and errors are those of `Medusa`."""

    def __init__(self, head: HydraHeads, shape: PathTree, coupled: bool = True):
        super().__init__(shape)
        levels = shape.window - 1
        if levels > head.args.guesses:
            raise ValueError(f"tree: {levels} levels, and {head.args.guesses} Hydra heads")
        if shape.width > head.args.draft_vocab_size:
            raise ValueError(f"tree: width {shape.width} exceeds the heads' vocabulary of {head.args.draft_vocab_size}")
        self.head, self.coupled, self.aux_layers, self.passes = head, coupled, head.args.aux_layers, 1
        self.cached = (head.args,) if head.args.prefix else ()
        self.static = StaticTree(shape)
        for i, level in enumerate(shape.levels):
            for name in ("nodes", "rows", "came_from"):
                self.register_buffer(f"{name}_{i}", torch.tensor(getattr(level, name), dtype=torch.int64), persistent=False)

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.caches = self.head.caches(batch, slots, dtype, device) if self.head.args.prefix else None
        self.to(device)

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
    """The heads in CHECKPOINT/hydra, or where --draft says, on a static tree as for Medusa. Raises CheckpointError likewise."""
    folder = request.draft or request.checkpoint / "hydra"
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no Hydra heads there; convert some into it, or name them with --draft")
    head = load_head(folder, request.target, "hydra")
    request.prepare(head)
    try:
        return Hydra(head, static_tree(request, head.args.guesses), request.coupled)
    except ValueError as e:
        raise CheckpointError(str(e)) from None
