"""Which trees are worth having, and which of them is fastest where: tau over seconds.

A tree of T nodes, depth D and width k emits tau(T, D, k) tokens in verify(T) + catch-up + D * level(k)
seconds. `engine.calibration` knows the former, `engine.costs` the latter. Plain decoding is a candidate too.
"""
from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from engine.calibration import LONG, SHORT, TEMPERATURES, Calibration
from engine.costs import Costs
from tree import TreeShape

MOST_TREES = 3  # that a decoder moves between: one more costs nothing but steps to see what it costs
WORTH = 1.005  # how much faster the mean of all situations must be for one tree more


@dataclass(frozen=True)
class Plan:
    """The trees that a decoder moves between, greedy and sampling, and how fast each is expected to be.

    trees: noisy or not: the trees, that of most use first; none where plain decoding is faster everywhere.
    """

    calibration: Calibration
    costs: Costs
    batch: int
    trees: dict[bool, tuple[TreeShape, ...]]

    def with_one_tree(self) -> Plan:
        """The same with the tree of most use only."""
        tree = self.shapes[:1]
        return replace(self, trees={noisy: tree if trees else () for noisy, trees in self.trees.items()})

    @cached_property
    def shapes(self) -> tuple[TreeShape, ...]:
        """All trees, each once, that of most use first."""
        return tuple(dict.fromkeys((*self.trees[False], *self.trees[True])))

    @cached_property
    def _window(self) -> int:
        """The widest window of all trees: as many rows the head's catch-up has."""
        return max((shape.window for shape in self.shapes), default=1)

    def tau(self, shape: TreeShape | None, temperature: float, context: int, ease: float = 1.0) -> float:
        """Tokens per step of a text whose drafts are accepted `ease` times as often as on average."""
        if shape is None:
            return 1.0
        return min(1 + ease * (self.calibration.tau(shape, temperature, context) - 1), shape.window)

    def speed(self, shape: TreeShape | None, temperature: float, context: int, ease: float = 1.0) -> float:
        """Steps' tokens per second, of each sequence, at this context. shape: None is plain decoding."""
        return self.tau(shape, temperature, context, ease) / self.seconds(shape, context)

    def seconds(self, shape: TreeShape | None, context: int) -> float:
        """What a step is expected to take."""
        return self._seconds(shape, context)

    @cached_property  # asked for at every choice
    def _seconds(self) -> Callable[[TreeShape | None, int], float]:
        return functools.cache(
            lambda shape, context: self.costs.step(shape, context, self.batch, self._window)
        )

    def __str__(self) -> str:
        """One line: which trees, and why."""
        return "; ".join(
            f"{name}: {self._reason(noisy)}" for noisy, name in ((False, "greedy"), (True, "sampling"))
        )

    def _reason(self, noisy: bool) -> str:
        temperature = TEMPERATURES[noisy]
        known, trees = self.calibration.taus[temperature], self.trees[noisy]
        shape = trees[0] if trees else max(known, key=lambda s: self.speed(s, temperature, SHORT))
        tau = self.tau(shape, temperature, SHORT)
        ratio = self.speed(shape, temperature, SHORT) / self.speed(None, temperature, SHORT)
        figures = f"{tau:.2f} tokens a step, {ratio:.2f} x plain expected"
        if not trees:
            return f"plain decoding (the best tree, {shape.name}: {figures})"
        others = "".join(f" or {other.name}" for other in trees[1:])
        return f"tree {shape.name}{others} ({figures})"


def make_plan(calibration: Calibration, costs: Costs, batch: int, longest: int, widest: int) -> Plan:
    """The trees for texts of up to `longest` tokens, `batch` at a time; none is wider than `widest`."""
    whole = Plan(calibration, costs, batch, {False: (), True: ()})
    contexts = [n for n in (SHORT, 1024, LONG) if n <= max(longest, SHORT)]
    ease = calibration.ease
    eases = statistics.quantiles(ease, n=4, method="inclusive") if len(ease) > 1 else ease
    # What texts have in common when they are decoded together is their mean, which differs less from text to
    # text than each does: by the square root of their number.
    usual = statistics.fmean(ease)
    situations = [(n, usual + (e - usual) / math.sqrt(batch)) for n in contexts for e in eases]

    @functools.cache  # asked for every temperature and ease
    def seconds(shape: TreeShape | None, context: int) -> float:
        return costs.step(shape, context, batch)

    def choose(temperature: float) -> tuple[TreeShape, ...]:
        def speed(shape: TreeShape | None, context: int, ease: float) -> float:
            return whole.tau(shape, temperature, context, ease) / seconds(shape, context)

        plain = [speed(None, n, e) for n, e in situations]
        gains = {
            shape: [
                math.log(max(speed(shape, n, e) / p, 1.0)) for (n, e), p in zip(situations, plain)
            ]
            for shape in calibration.taus[temperature] if shape.width <= widest
        }
        chosen: list[TreeShape] = []
        reached = [0.0] * len(situations)
        while len(chosen) < MOST_TREES:
            best = max(gains, key=lambda s: sum(map(max, gains[s], reached)))
            together = [*map(max, gains[best], reached)]
            if sum(together) - sum(reached) < math.log(WORTH) * len(situations):
                break
            chosen, reached = [*chosen, best], together
        return tuple(chosen)

    return Plan(calibration, costs, batch, {noisy: choose(TEMPERATURES[noisy]) for noisy in (False, True)})
