"""Statistics of drafted trees: how often nodes are accepted, by depth, by rank and by confidence."""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from tree import Tree

BINS = 10  # of the drafter's confidence


@dataclass
class DraftedTree:
    """The tree of one step and what was accepted of it. Node 0 is the root."""

    tokens: list[int]
    parent: list[int]
    depth: list[int]
    probability: list[float]  # of each node given its parent; all 0 if the drafter gives none
    accepted: set[int]  # the root included

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The children of every node that has some, the likeliest first."""
        children: dict[int, list[int]] = {}
        for node in range(1, len(self.tokens)):
            children.setdefault(self.parent[node], []).append(node)
        return {
            node: sorted(siblings, key=lambda child: -self.probability[child])
            for node, siblings in children.items()
        }

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
    best: DraftedTree | None = None  # the one with most accepted nodes

    def add(self, tree: Tree, path: Tensor) -> None:
        """Count a step's first sequence. tree: of [B, T] nodes; path [B, W]: the accepted ones, 0 after them.

        This is an observer for `Decoder.observe`.
        """
        tokens, parent, depth = (t[0].tolist() for t in tree[:3])
        accepted = {0, *path[0].tolist()}
        probability = [0.0] * len(tokens)
        if tree.scores is not None:
            # A node that only fills the tree has none, nor have those below it.
            given_parent = (tree.scores[0] - tree.scores[0][tree.parent[0]]).exp().nan_to_num(0.0)
            probability = given_parent.tolist()
        drafted = DraftedTree(tokens, parent, depth, probability, accepted)
        for node in accepted:
            children = drafted.children.get(node, [])
            if children:
                _count(self.depth, depth[node] + 1, any(child in accepted for child in children))
            for rank, child in enumerate(children, 1):
                _count(self.rank, rank, child in accepted)
                if tree.scores is not None:
                    cell = self.confidence[min(BINS - 1, int(probability[child] * BINS))]
                    cell[:] = cell[0] + 1, cell[1] + (child in accepted), cell[2] + probability[child]
        if self.best is None or len(accepted) > len(self.best.accepted):
            self.best = drafted


def _count(table: dict[int, list[int]], key: int, accepted: bool) -> None:
    cell = table.setdefault(key, [0, 0])
    cell[:] = cell[0] + 1, cell[1] + accepted
