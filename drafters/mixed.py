"""Two drafters, one tree: their proposals are joined, and the nodes most likely to be accepted are kept.

`--speculate lookup+eagle3`: matches in the text beside a head's own guesses. A score is the logarithm of how
often a node is accepted: a head takes its softmax for that, lookup the length of a match.
"""
from __future__ import annotations

import math

import torch
import torch.nn as nn
from torch import Tensor

from drafters.base import Drafter, ExtraRows, Proposal
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
        self.extra_rows = max(part.extra_rows for part in parts)
        self.made_of = " ".join(part.made_of for part in parts)
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
        # Extra rows stand behind the joint tree; a head's own rows behind the widest window.
        extra = max(part.extra_slots - part.shape.nodes for part in self.parts)
        own = (part.extra_slots_after(self.shape.window) for part in self.parts)
        return max(self.shape.nodes + max(extra, 0), *own)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        prices, temperature = state.prices, state.temperature.clamp(0, 1)[:, None]
        trees, extra, levels = [], None, 0
        for part in self.parts:
            if prices is not None:  # a graph must change nothing but tensors
                state.prices = prices if part is self.grown else None
            tree, _, more = part.propose(state, slots, noise)
            scores = UNSCORED * tree.depth if tree.scores is None else tree.scores
            trees.append(tree._replace(scores=scores * (1 + (part.sampled - 1) * temperature)))
            extra, levels = extra or more, state.levels if part is self.grown else levels
        if prices is not None:
            state.prices, state.levels = prices, levels
        tree = state.backend.join(*trees, self.shape.nodes, self.shape.levels, prices)
        return Proposal(tree, extra=None if extra is None else self._behind(extra, tree))

    def _behind(self, extra: ExtraRows, tree: Tree) -> ExtraRows:
        """Put extra rows behind another tree. They see its root only."""
        own = extra.sees[..., -extra.tokens.shape[1] :]
        drafted = own.new_zeros(*own.shape[:2], tree.tokens.shape[1] - 1)
        return extra._replace(sees=torch.cat((extra.sees[..., :1], drafted, own), -1))
