"""Statistics of drafted trees: how often nodes are accepted, by depth, by rank and by confidence."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from engine.request import Draft

BINS = 10  # of the drafter's confidence


@dataclass
class DraftedTree:
    """The tree of one step and its accepted nodes. Node 0 is the root."""

    tokens: list[int]
    parent: list[int]
    depth: list[int]
    probability: list[float]  # of each node given its parent; all 0 if the drafter gives none
    accepted: set[int]  # the root included

    @classmethod
    def of(cls, draft: Draft) -> DraftedTree:
        """Read a step's `Draft`. A parent stands before its children there."""
        depth, probability = [0], [0.0] * len(draft.tokens)
        for node, parent in enumerate(draft.parent[1:], 1):
            depth.append(depth[parent] + 1)
            # A node that only fills the tree scores -inf.
            if draft.scores and draft.scores[node] > -math.inf:
                probability[node] = math.exp(draft.scores[node] - draft.scores[parent])
        return cls(draft.tokens, draft.parent, depth, probability, {0, *draft.path})

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The children of each node that has some, likeliest first."""
        children: dict[int, list[int]] = {}
        for node in sorted(range(1, len(self.tokens)), key=lambda node: -self.probability[node]):
            children.setdefault(self.parent[node], []).append(node)
        return children

    def probability_label(self, node: int) -> str:
        """A node's probability as text; empty for the root and if the drafter gives none."""
        return f" {self.probability[node]:.2f}" if node and any(self.probability[1:]) else ""


@dataclass
class TreeStatistics:
    """Counts over the steps of one method: [tried, accepted] by depth, by rank among siblings, by confidence.

    Only children of accepted nodes are tried: nodes below a rejected one had no chance. An accepted node
    without children tries nothing either, so deep levels count only the steps whose trees reached them.
    """

    depth: dict[int, list[int]] = field(default_factory=dict)
    rank: dict[int, list[int]] = field(default_factory=dict)
    # For each tenth of the drafter's probability: tried, accepted, sum of the probabilities.
    confidence: list[list[float]] = field(default_factory=lambda: [[0, 0, 0.0] for _ in range(BINS)])
    best: DraftedTree | None = None  # with most accepted nodes; None: nothing was drafted

    def add(self, draft: Draft) -> None:
        """Count the tree of one step."""
        if len(draft.tokens) == 1:
            return
        tree = DraftedTree.of(draft)
        for node in tree.accepted & tree.children.keys():
            children = tree.children[node]
            hit = any(child in tree.accepted for child in children)
            _count(self.depth, tree.depth[node] + 1, hit)
            for rank, child in enumerate(children, 1):
                accepted, probability = child in tree.accepted, tree.probability[child]
                _count(self.rank, rank, accepted)
                if draft.scores:
                    cell = self.confidence[min(BINS - 1, int(probability * BINS))]
                    cell[:] = cell[0] + 1, cell[1] + accepted, cell[2] + probability
        if self.best is None or len(tree.accepted) > len(self.best.accepted):
            self.best = tree


def _count(table: dict[int, list[int]], key: int, accepted: bool) -> None:
    cell = table.setdefault(key, [0, 0])
    cell[:] = cell[0] + 1, cell[1] + accepted
