"""Two drafters, one tree: their proposals are joined, and the nodes most likely to be accepted are kept.

`--speculate lookup+eagle3`: matches in the text beside a head's own guesses. A score is the logarithm of how
often a node is accepted: a head takes its softmax for that, lookup the length of a match.
"""
from __future__ import annotations

import math

import torch.nn as nn
from torch import Tensor

from engine.draft import Drafter
from tree import AnyTree, Tree, TreeShape

UNSCORED = math.log(0.4)  # of each level of a tree whose drafter has no scores


class Mixed(Drafter):
    """Two drafters on one tree of `nodes` nodes, the root included.

    If one of them grows its trees with a head, the joint ones are as large as its own would be, and the
    engine may choose among them as if the head were alone.
    """

    def __init__(self, one: Drafter, other: Drafter, nodes: int | None = None):
        parts = (one, other)
        grown = next((part for part in parts if part.grows), None)
        nodes = nodes or (grown or max(parts, key=lambda part: part.shape.nodes)).shape.nodes
        # A path of all nodes is the longest. But a network draws with noise at every level of its own tree.
        drawn = max((part.shape.window for part in parts if part.network is not None), default=0)
        levels = max(min(max(part.shape.window for part in parts), nodes), drawn) - 1
        super().__init__(AnyTree(nodes, levels), *parts)
        self.method = "+".join(part.method for part in parts)
        self.aux_layers = tuple(sorted({layer for part in parts for layer in part.aux_layers}))
        for part in parts:
            part.all_layers = self.aux_layers
        self.fingerprint = " ".join(part.fingerprint for part in parts)
        self.reads = any(part.reads for part in parts)
        self.may_pass = all(part.may_pass for part in parts)

    @property
    def headless(self) -> Drafter | None:
        return next((part for part in self.parts if part.may_pass), None) if self.grown else None

    def with_tree(self, shape: TreeShape) -> Mixed:
        """Return the same drafters, with another tree of the one that grows trees."""
        grown = self.grown
        return Mixed(*(part.with_tree(shape) if part is grown else part for part in self.parts), shape.nodes)

    @property
    def network(self) -> nn.Module | None:
        networks = [part.network for part in self.parts if part.network is not None]
        return nn.ModuleList(networks) if networks else None

    @property
    def extra_slots(self) -> int:
        # A head's own tokens stand behind the tokens of the longest commit.
        return max(self.shape.nodes, *(p.extra_slots_after(self.shape.window) for p in self.parts))

    def propose(self, step, state, slots: Tensor, noise: Tensor | None) -> Tree:
        prices, temperature = state.prices, state.temperature.clamp(0, 1)[:, None]
        trees, levels = [], 0
        for part in self.parts:
            if prices is not None:  # a compiled graph must change nothing but tensors
                state.prices = prices if part is self.grown else None
            tree = step.draft(part, state, slots, noise)
            scores = UNSCORED * tree.depth if tree.scores is None else tree.scores
            trees.append(tree._replace(scores=scores * (1 + (part.sampled - 1) * temperature)))
            levels = state.levels if part is self.grown else levels
        if prices is not None:
            state.prices, state.levels = prices, levels
        return step.join(*trees, self.shape.nodes, self.shape.levels, prices)
