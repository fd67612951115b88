"""The marginal cost of drafted levels and nodes, which limits a tree to those that reduce latency."""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.step import Step
from tree import Tree


class MarginalCosts(NamedTuple):
    """Costs of drafts, in tokens that decoding without them would emit in the same time.

    A level or a node whose expected gain is less than its cost is not drafted. A node's expected gain is its
    probability to be accepted: confidence * exp(score), at most 1. The n-th best nodes of all sequences share
    a cost. Values are read back to the host, so this is for CPUs.

    level: cost of one more level. nodes [T-1]: cost of the first drafted node, of the second, and so on.
    confidence [B]: accepted drafts / sum of exp(score) over the drafts; 0 for an idle slot.
    """

    level: float
    nodes: Tensor
    confidence: Tensor

    def _gains(self, scores: Tensor) -> Tensor:
        """Return the expected gain of the best nodes of all sequences, of the second best, and so on [n].

        scores [B, n].
        """
        ranked = scores.sort(descending=True).values.exp()
        return (self.confidence[:, None] * ranked).clamp(max=1).sum(0)

    def expand(self, scores: Tensor, limit: int, child_gain: float = 0.5, above: int = 0) -> int:
        """Return how many of the newest nodes [B, n] to expand, at most `limit`; 0: grow no further level.

        child_gain: expected gain of a node's children / that of the node. above: number of ancestors of a
        child, which are kept with it. If given, the gain of the level must exceed the cost of its nodes too.
        """
        cost = float(self.nodes[min(above, len(self.nodes) - 1)])
        gains = child_gain * self._gains(scores)[:limit]
        gains = gains[gains >= cost]
        net = float(gains.sum()) - (cost * len(gains) if above else 0)
        return len(gains) if net >= self.level else 0

    def keep(self, scores: Tensor) -> int:
        """Return how many of the best candidates [B, C] to keep: those that maximize gain minus cost."""
        gains = self._gains(scores)[: len(self.nodes)]
        surplus = (gains - self.nodes[: len(gains)]).cumsum(0).tolist()
        return max(range(len(surplus) + 1), key=lambda n: surplus[n - 1] if n else 0.0)

    def limit(self, step: Step, tree: Tree) -> Tree:
        """Remove the nodes of a proposed tree whose gain is below their cost. step: an `engine.step.Step`."""
        scores, tokens, parents = (x[:, 1:] for x in (tree.scores.float(), tree.tokens, tree.parent - 1))
        nodes = tree.tokens.shape[1]
        below = tree.tokens[:, 0], scores, tokens, parents
        return step.prune(*below, nodes, nodes - 1, self)
