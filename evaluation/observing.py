"""Statistics of drafted trees: how often nodes are accepted, by depth, by rank and by confidence."""
from __future__ import annotations

import math

from engine.request import Draft

BINS = 10  # of the drafter's confidence


def probabilities(draft: Draft) -> list[float]:
    """Return the probability of each node given its parent: 0 if the drafter gives none, and for fillers."""
    scores = draft.scores or [-math.inf] * len(draft.tokens)
    given_parent = [s - scores[p] if s > -math.inf else s for s, p in zip(scores, draft.parent)]
    return [math.exp(score) for score in given_parent]


def children_of(draft: Draft) -> dict[int, list[int]]:
    """Return the children of each node that has some, likeliest first."""
    children, likely = {}, probabilities(draft)
    for node in sorted(range(1, len(draft.tokens)), key=lambda node: -likely[node]):
        children.setdefault(draft.parent[node], []).append(node)
    return children


def depths(draft: Draft) -> list[int]:
    """Return the depth of each node, the root's is 0. A parent stands before its children."""
    depth = [0]
    for parent in draft.parent[1:]:
        depth.append(depth[parent] + 1)
    return depth


class TreeStatistics:
    """Counts over the steps of one method by depth, by rank among siblings, by tenth of the confidence.

    A count is [tried, accepted, sum of the depths, ranks or confidences]. Only children of accepted nodes are
    tried: nodes below a rejected one had no chance. An accepted node without children tries nothing either.
    So deep levels count only the steps whose trees reached them.
    """

    def __init__(self):
        self.depth: dict[int, list] = {}
        self.rank: dict[int, list] = {}
        self.confidence: dict[int, list] = {}
        self.best: Draft | None = None  # with most accepted nodes; None: nothing was drafted

    def add(self, draft: Draft) -> None:
        """Count the tree of one step."""
        accepted, depth, likely = {0, *draft.path}, depths(draft), probabilities(draft)
        for node, children in children_of(draft).items():
            if node not in accepted:
                continue
            _count(self.depth, depth[node] + 1, depth[node] + 1, not accepted.isdisjoint(children))
            for rank, child in enumerate(children, 1):
                _count(self.rank, rank, rank, child in accepted)
                if draft.scores:
                    tenth = min(BINS - 1, int(likely[child] * BINS))
                    _count(self.confidence, tenth, likely[child], child in accepted)
        if len(depth) > 1 and (self.best is None or len(accepted) > len({0, *self.best.path})):
            self.best = draft


def _count(table: dict[int, list], key: int, value: float, accepted: bool) -> None:
    tried, hits, total = table.get(key, (0, 0, 0))
    table[key] = [tried + 1, hits + accepted, total + value]
