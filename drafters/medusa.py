"""Drafting with Medusa heads (Cai et al., arXiv 2401.10774): all levels of a static tree from one state of the target.

Every node of a level chooses from one list of that level's likeliest tokens, whatever its parent is. `--tree paper` is the tree of
the published figures; the default on a CPU is smaller.
"""
from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import load_head
from drafters.base import Drafter, Request, StaticTree
from errors import CheckpointError
from guessers import Guesser, MedusaHeads
from tree import PAPER_TREE, PathTree, Tree, likely_tree, pick


class Guessing(Drafter):
    """What Medusa and Hydra share: heads that each guess one level of a static tree. coupled: rank the candidates with the
    target's own noise (see `growing.Growing`). Raises ValueError on a tree that is deeper than there are heads, or wider than
    their vocabulary."""

    passes = 1

    def __init__(self, head: Guesser, shape: PathTree, coupled: bool = True):
        super().__init__(shape)
        levels = shape.window - 1
        if levels > head.args.guesses:
            raise ValueError(f"tree: {levels} levels, and heads for {head.args.guesses}")
        if shape.width > head.args.draft_vocab_size:
            raise ValueError(f"tree: width {shape.width} exceeds the heads' vocabulary of {head.args.draft_vocab_size}")
        self.head, self.coupled, self.aux_layers = head, coupled, head.args.aux_layers
        self.static = StaticTree(shape)

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.to(device)


class Medusa(Guessing):
    """All levels from the state of the last committed token."""

    def __init__(self, head: MedusaHeads, shape: PathTree, coupled: bool = True):
        super().__init__(head, shape, coupled)
        self.register_buffer("level", torch.tensor([len(path) - 1 for path in shape.paths]), persistent=False)
        self.register_buffer("rank", torch.tensor([path[-1] for path in shape.paths]), persistent=False)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        levels = self.shape.window - 1
        z = self.head.fuse(pick(state.features, (state.n_new - 1).clamp(min=0)[:, None])[:, 0])
        logits = self.head.logits(z)[:, :levels]  # [B, levels, Vd]
        if noise is not None and self.coupled:
            logits = logits + noise[:, :levels, self.head.draft_ids]
        top, index = logits.topk(self.shape.width, dim=-1)
        given = (top - logits.logsumexp(-1, keepdim=True))[:, self.level, self.rank]
        tokens = self.head.draft_ids[index][:, self.level, self.rank]
        root = state.root()[:, None]
        return self.static.of(torch.cat((root, tokens), 1), torch.cat((torch.zeros_like(given[:, :1]), given), 1))


def build(request: Request) -> Medusa:
    """The heads in CHECKPOINT/medusa; see `build_guessing`."""
    return build_guessing(request, "medusa", Medusa)


def published_tree() -> PathTree:
    """mc_sim_7b_63, 64 nodes on four levels: the tree of the published Medusa and Hydra figures (FasterDecoding/Medusa)."""
    return PathTree(tuple(map(tuple, json.loads((Path(__file__).parent / "mc_sim_7b_63.json").read_text()))))


def build_guessing(request: Request, kind: str, made: type[Guessing]) -> Guessing:
    """Heads of this kind, in CHECKPOINT/KIND or where --draft says, on the static tree of --tree FILE, the published one for
    --tree paper, or one of the default's size.

    Raises CheckpointError if there are none, or they or the tree do not fit.
    """
    folder = request.draft or request.checkpoint / kind
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no {kind} heads there; convert some into it, or name them with --draft")
    tree = published_tree() if request.tree == PAPER_TREE else request.tree
    if tree is not None and not isinstance(tree, PathTree):
        raise CheckpointError(f"--speculate {kind}: takes a static tree: --tree FILE, a JSON list of paths of ranks, or --tree paper")
    head = load_head(folder, request.target, kind)
    request.prepare(head)
    try:
        if tree is None:
            published = request.default_tree == PAPER_TREE and head.args.guesses >= 4
            tree = published_tree() if published else likely_tree(request.default_tree.nodes, head.args.guesses)
        return made(head, tree, request.coupled)
    except ValueError as e:
        raise CheckpointError(str(e)) from None
