"""Drafting with Medusa (Cai et al., arXiv 2401.10774) and Hydra heads (Ankner et al., arXiv 2402.05109).

All levels of a static tree are drafted from one state of the target. With Medusa every node of a level
chooses from one list of that level's likeliest tokens, whatever its parent is; with Hydra each node is
guessed from those above it. `--tree paper` is the tree of the published figures; the default on a CPU is
smaller. Hydra's published code fills short paths up with their last token, and greedily chooses a path before
it cuts that off, so that one may win by its filling. Here nothing is filled up.
"""
from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from common.errors import InputError
from drafters.base import Setup, constants, newest
from drafters.network import HeadDrafter
from networks.medusa import HydraHeads, MedusaHeads
from tree import PAPER_TREE, PathTree, Tree, likely_tree, pick

PUBLISHED_LEVELS = 4  # of `published_tree`


class Medusa(HeadDrafter):
    """All levels of a static tree from the state of the last committed token."""

    grows = False

    def __init__(self, head: MedusaHeads, shape: PathTree, coupled: bool = True):
        super().__init__(head, shape, coupled)
        constants(self, level=[len(p) - 1 for p in shape.paths], rank=[p[-1] for p in shape.paths])

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        last = pick(state.features, newest(state, state.features.shape[1]))[:, 0]
        logits = self.head.logits(self.head.fuse(self.own_features(last)))
        logits = logits[:, : self.shape.window - 1]  # [B, levels, Vd]
        found = state.backend.rank(logits, self.draft_noise(noise), self.shape.width, self._names)
        scores, tokens = (x[:, self.level, self.rank] for x in found)
        root = state.root
        scores = torch.cat((torch.zeros_like(scores[:, :1]), scores), 1)
        return self.static.of(torch.cat((root, tokens), 1), scores)


class Hydra(HeadDrafter):
    """Level after level of a static tree, each guess reads those above it. Hydra++'s layer reads the text."""

    grows = False

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        head, noise, p = self.head, self.draft_noise(noise), self.catch_up(state, slots)  # [B, 1, H]
        k, root = self.shape.width, state.root
        paths, tokens, scores = root[..., None], [root], [torch.zeros_like(p[..., 0], dtype=torch.float32)]
        for i, level in enumerate(self.static.levels):
            if i:  # expand what the level above proposed
                paths = torch.cat((paths[:, level.came_from], tokens[-1][:, level.rows, None]), -1)
            logits = head.guess_logits(head.output(p.expand(-1, paths.shape[1], -1), paths), i)
            shift = None if noise is None else noise[:, i, None]
            level_scores, ranked = state.backend.rank(logits, shift, k, self._names)
            tokens.append(ranked.flatten(1)[:, level.nodes])
            scores.append(level_scores.flatten(1)[:, level.nodes])
        return self.static.of(torch.cat(tokens, 1), torch.cat(scores, 1))


def published_tree() -> PathTree:
    """Return the tree named mc_sim_7b_63 in FasterDecoding/Medusa: 64 nodes on four levels.

    The published Medusa and Hydra figures were measured on it.
    """
    paths = json.loads((Path(__file__).parent / "medusa_tree.json").read_text())
    return PathTree(tuple(map(tuple, paths)))


def build(setup: Setup) -> HeadDrafter:
    """Load the heads for a static tree: that of --tree FILE, the published one, or one of the default's size.

    Raises InputError if the heads do not fit, ValueError if the tree does not.
    """
    tree, usual = setup.drafting.tree, setup.default_tree
    if not (tree in (None, "paper") or isinstance(tree, PathTree)):
        raise InputError(f"--speculate {setup.method}: takes a static tree: --tree FILE, a JSON list of paths"
                         " of ranks, or --tree paper")
    head = setup.load_head()
    if tree == "paper" or (tree is None and usual == PAPER_TREE and head.args.guesses >= PUBLISHED_LEVELS):
        tree = published_tree()
    drafter = Hydra if isinstance(head, HydraHeads) else Medusa
    return drafter(head, tree or likely_tree(usual.nodes, head.args.guesses), setup.drafting.coupled)
