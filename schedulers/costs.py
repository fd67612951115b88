"""Predicted seconds of a step by tree size (`Costs`), and pruning of trees by cost (`MarginalCosts`)."""
from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engine.step import Step
from tree import Tree, TreeShape

MAX_FLAT_NODES = 5  # nodes of the largest tree with one level that is timed
MAX_SLOWDOWN = 3.0  # seconds of a step / of a plain step; above it no larger tree is timed
MAX_MEASURED_RATIO = 1.5  # measured / predicted seconds, clamped: other programs delay single steps
PRIOR_FIT_STEPS = 5.0  # weight of the prior `node_load_factor == load_factor`, in steps
MIN_COST_RATIO = 0.002  # seconds of a level or a node / seconds of a plain step: nothing is free
FIT_DECAY = 0.96  # weight of a step relative to the next one in the fit of the load factors
PLAIN_STEP_WEIGHT = 0.3  # weight of a new plain step in the moving average of `Costs.plain`
MAX_LOAD_DRIFT = 1.1  # change of the load factor, either way, after which plain steps are timed again
PLAIN_VALID_STEPS = 16  # drafted steps after a plain step during which `Costs.plain` stays as measured
ESTIMATED_STEP_WEIGHT = 0.25  # in the fit, weight of the drafted step that is estimated from a plain step


class Size(NamedTuple):
    """Size of a drafted tree: nodes, root included, and levels grown after the first."""

    nodes: int
    levels: int


class Trial(NamedTuple):
    """A tree to time: nodes, root included, and whether all levels are grown, or only the first.

    0 nodes: plain decoding. 1 node: the head runs, but drafts nothing.
    """

    nodes: int
    deep: bool = False


PLAIN_TRIAL = Trial(0)
TRIALS = (
    PLAIN_TRIAL, Trial(1), Trial(MAX_FLAT_NODES),
    *(Trial(n, True) for n in (MAX_FLAT_NODES, 8, 12, 16, 24, 32)),
)
REQUIRED_TRIALS = {*TRIALS[:3]}
Trials = dict[Trial, list[tuple[Size, float]]]  # size and seconds of each step


def fastest(steps: list[tuple[Size, float]]) -> float:
    """Return the minimum seconds of the steps: other processes only add delay."""
    return min(seconds for _, seconds in steps)


def trial_seconds(trials: Trials) -> float:
    """Return the seconds of all trials, each step at its trial's fastest, as the first may compile."""
    return sum(len(steps) * fastest(steps) for steps in trials.values())


class Costs:
    """Seconds of steps at one batch size: plain steps, and drafted ones by tree size.

    A drafted step takes `base` seconds, plus more for each level and each node. Two load factors, measured /
    predicted seconds, are fitted to real steps by least squares: `load_factor` of all but the nodes, and
    `node_load_factor` of the nodes, whose attention grows with the context. The prior is that both are equal,
    as steps with small trees of similar size do not separate them. Steps that do not run are assumed to
    change by the same factor as those that do.
    """

    def __init__(self, plain: float, base: float, level: float = 0.0, node_seconds: Iterable[float] = (0.0,)):
        """node_seconds: of the first drafted node, of the second, and so on."""
        self.plain, self.measured_plain = plain, plain  # now, and in the trials
        self.base, self.level, self.node_seconds = base, level, [*node_seconds]
        self.cumulative = [0.0, *accumulate(self.node_seconds)]
        self.prior_weight = PRIOR_FIT_STEPS * self._node_seconds(MAX_FLAT_NODES) ** 2
        self.sums = [0.0] * 5
        nodes = self._node_seconds(MAX_FLAT_NODES)
        self._fit(base + level, nodes, base + level + nodes)
        self.load_drift, self.steps_since_plain = 1.0, 0  # since the last plain step

    @property
    def stale(self) -> bool:
        """True if the load has changed and no plain step has been timed since."""
        return not 1 / MAX_LOAD_DRIFT < self.load_drift < MAX_LOAD_DRIFT

    @classmethod
    def from_trials(cls, trials: Trials) -> Costs:
        """Build costs from trials, which include REQUIRED_TRIALS.

        The cost of a node does not decrease with the size of the tree. Where measurements decrease, that is
        noise: they are averaged (isotonic regression).
        """
        seconds = {trial: fastest(steps) for trial, steps in trials.items()}
        plain, base, flat = (seconds[trial] for trial in TRIALS[:3])
        deep = [t for t in TRIALS if t.deep and t in trials]
        pools: list[tuple[float, int]] = []  # seconds of nodes, and their number
        for s, t in (TRIALS[1:3], *pairwise(deep)):
            more, nodes = seconds[t] - seconds[s], t.nodes - s.nodes
            while pools and pools[-1][0] / pools[-1][1] > more / nodes:
                previous = pools.pop()
                more, nodes = more + previous[0], nodes + previous[1]
            pools.append((more, nodes))
        min_cost = MIN_COST_RATIO * plain
        node_seconds = [max(more / nodes, min_cost) for more, nodes in pools for _ in range(nodes)]
        levels = trials[deep[0]][0][0].levels if deep else 0
        level = (seconds[deep[0]] - flat) / levels if levels else base - plain
        return cls(plain, max(base, plain), max(level, min_cost), node_seconds)

    @classmethod
    def of_trees(cls, trials: Trials) -> Costs:
        """Build costs of a few trees of fixed sizes from trials of a plain step and each tree.

        Trees are not timed if a smaller one was too slow: they get a cost that no gain exceeds.
        """
        (_, plain), (smallest, base), *_ = timed = [(t.nodes, fastest(trials[t])) for t in sorted(trials)]
        node_seconds = [0.0] * max(smallest - 1, 1)
        for (nodes, seconds), (next_nodes, next_seconds) in pairwise(timed[1:]):
            added = next_nodes - nodes
            node_seconds += [max(next_seconds - seconds, 0.0) / added] * added
        return cls(plain, base, 0.0, [*node_seconds, MAX_SLOWDOWN * plain])

    def interpolate(self, other: Costs, fraction: float, scale: float) -> Costs:
        """Return costs between these and `other`, for another batch size. scale: factor of `node_seconds`."""
        def current(c: Costs) -> list[float]:
            return [c.plain, c.load_factor * c.base, c.load_factor * c.level] + [
                c.node_load_factor * x * scale for x in c.node_seconds
            ]

        plain, base, level, *node_seconds = (
            a + (b - a) * fraction for a, b in zip(current(self), current(other))
        )
        return Costs(plain, base, level, node_seconds)

    def _node_seconds(self, count: int) -> float:
        """Return the seconds of a tree's drafted nodes in the trials. count: nodes, root included."""
        measured = len(self.node_seconds)
        return (
            self.cumulative[count - 1] if count <= measured
            else self.cumulative[-1] + (count - 1 - measured) * self.node_seconds[-1]
        )

    def seconds(self, size: Size, head: bool) -> float:
        """Predict the seconds of a step under the current load. head: the draft head runs."""
        without_nodes = self.load_factor * (self.base + self.level * size.levels) if head else self.plain
        return without_nodes + self.node_load_factor * self._node_seconds(size.nodes)

    def overhead(self, size: Size) -> tuple[float, float]:
        """Return the costs of drafting and of verifying a tree, relative to a plain step."""
        nodes = self.node_load_factor * self._node_seconds(size.nodes) / self.plain
        return self.relative_cost_of(size) - 1 - nodes, nodes

    def relative_cost_of(self, size: Size, head: bool = True) -> float:
        """Predict the seconds of a step / the seconds of a plain step."""
        return self.seconds(size, head) / self.plain

    def marginal(self, speed: float, shape: TreeShape, confidence: list[float]) -> MarginalCosts:
        """Return costs in tokens. speed: tokens emitted in the time of a plain step. confidence: by slot."""
        rate = speed / self.plain
        nodes = [rate * self.node_load_factor * node for node in self.node_seconds[: shape.nodes - 1]]
        nodes += [math.inf] * (shape.nodes - 1 - len(nodes))
        level = rate * self.load_factor * self.level
        return MarginalCosts(level, torch.tensor(nodes), torch.tensor(confidence))

    def add(self, size: Size, head: bool, seconds: float) -> None:
        """Update the load factors, or `plain`, from a measured step."""
        seconds = min(seconds, MAX_MEASURED_RATIO * self.seconds(size, head))
        nodes = self._node_seconds(size.nodes)
        previous = self.load_factor
        if head:
            self._fit(self.base + self.level * size.levels, nodes, seconds)
            self.steps_since_plain += 1
            self.plain *= self.load_factor / previous if self.steps_since_plain > PLAIN_VALID_STEPS else 1.0
            self.load_drift *= self.load_factor / previous
        else:
            self.steps_since_plain = 0
            measured = max(seconds - self.node_load_factor * nodes, self.plain / 2)
            self.plain += PLAIN_STEP_WEIGHT * (measured - self.plain)
            self.load_drift += PLAIN_STEP_WEIGHT * (1 - self.load_drift)
            self._fit(
                ESTIMATED_STEP_WEIGHT * self.base, 0.0,
                ESTIMATED_STEP_WEIGHT * self.base * self.plain / self.measured_plain,
            )

    def _fit(self, without_nodes: float, nodes: float, seconds: float) -> None:
        """Fit load_factor * without_nodes + node_load_factor * nodes to the seconds of recent steps.

        without_nodes: seconds of all but the nodes in the trials.
        """
        u = without_nodes
        new = u * u, u * nodes, nodes * nodes, u * seconds, nodes * seconds
        self.sums = [FIT_DECAY * old + x for old, x in zip(self.sums, new)]
        a, b, c, x, y = self.sums
        a, b, c = a + self.prior_weight, b - self.prior_weight, c + self.prior_weight
        self.load_factor = self.node_load_factor = x / self.sums[0]
        if (determinant := a * c - b * b) > 1e-9 * a * c:
            self.load_factor = max((c * x - b * y) / determinant, self.load_factor / 2)
            self.node_load_factor = max((a * y - b * x) / determinant, self.load_factor / 2)


class MarginalCosts(NamedTuple):
    """Costs of drafted levels and nodes, in tokens that decoding without them would emit in the same time.

    A level or a node is drafted only if its expected gain is at least its cost. The expected gain of a node
    is its acceptance probability: min(1, confidence * exp(score)). The n-th best nodes of all sequences are
    verified together: their summed gain is compared with one cost. Values are read by the host: for CPUs.

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
