"""Which tree the next step drafts, or none: by what trees cost and what was accepted of late.

The choice is the host's, between steps. What a step costs was measured once (`engine.costs`), on a machine
that has other work at other times: so the steps themselves are timed too. The choice never changes the text.
"""
from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from engine.calibration import SHORT
from engine.tuning import Plan
from tree import TreeShape

# benchmarks/replay.py shows what others would do.
MEMORY = 0.98  # what a step weighs less than the one after it
PRIOR = 6.0  # steps of average text that a text begins with
MARGIN = 1.03  # how much faster another tree must be to be taken instead
LOOK, LOOK_PLAIN = 2, 8  # steps that a choice of a tree, of plain decoding holds: choosing takes 0.1 ms
SPAN = 64  # tokens of context that are one to the choice
PROBE = 2  # steps with a tree, after a while of plain decoding, to see whether drafts are accepted again
FIRST_REST, LONGEST_REST = 48, 1024  # tokens of plain decoding before that; doubled each time in vain
TIMED = 5  # of the latest steps of a kind, whose median says how slow it is now
FRESH = 24  # steps after which they are forgotten
CHECK = 2  # steps with a kind that was forgotten, unless the one at hand is expected to be
DOUBT = 1.15  # times as fast


def _span(context: int) -> int:
    """The context that stands for all of its span."""
    return context // SPAN * SPAN


class Timed(NamedTuple):
    """A step that was timed: which it was, at which context, and its seconds over those expected of it."""

    when: int
    context: int
    ratio: float


class Ease:
    """How many times as many drafted tokens are accepted of a text as of an average one: `of` several.

    usual: how many are accepted of an average text, a step.
    """

    def __init__(self, usual: float):
        self.accepted = self.expected = PRIOR * usual

    def record(self, accepted: float, usual: float) -> None:
        """So many were accepted in a step, as against so many of an average text."""
        self.accepted = MEMORY * self.accepted + accepted
        self.expected = MEMORY * self.expected + usual

    @staticmethod
    def of(texts: list[Ease]) -> float:
        return sum(text.accepted for text in texts) / sum(text.expected for text in texts)


class Switch:
    """Chooses for one batch of texts at a time. None stands for a step without the head.

    That is plain decoding, or a step with drafts that need no head: how many tokens it emits is counted.

    What it knows of the machine it keeps from text to text, what it knows of a text it forgets with it.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self._timed: dict[tuple[bool, TreeShape | None], deque[Timed]] = {}
        self._steps = 0
        self._ahead: deque[TreeShape | None] = deque()  # kinds of the next steps, whatever is faster
        self.begin([0.0])

    def begin(self, temperatures: list[float], goes_on: bool = False) -> None:
        """New texts, at these temperatures.

        goes_on: they begin with the last ones, as a chat's next turn does.
        """
        noisy = any(t > 0 for t in temperatures)
        self.temperature = sum(temperatures) / len(temperatures)
        self._plain, self._rest, self._held = 0, FIRST_REST, 0
        self._ahead.clear()
        if goes_on and noisy == self._noisy:
            return
        self._noisy = noisy
        self.trees = self.plan.trees[self._noisy]
        self._texts, self._alone = [self.new_text()], Ease(1.0)
        self._current: TreeShape | None = self.trees[0] if self.trees else None

    def new_text(self) -> Ease:
        """What is known of a text at its beginning."""
        return Ease(self.plan.tau(self.trees[0], self.temperature, SHORT) - 1 if self.trees else 1.0)

    def turn_to(self, temperatures: list[float], texts: list[Ease]) -> None:
        """Other texts, at these temperatures, of which more is known; whoever knows records it."""
        noisy = any(t > 0 for t in temperatures)
        self.temperature = sum(temperatures) / len(temperatures)
        self._held, self._texts = 0, texts
        if noisy != self._noisy:
            self._noisy, self.trees = noisy, self.plan.trees[noisy]
            self._ahead.clear()
        if self._current not in self.trees:
            self._current = self.trees[0] if self.trees else None

    @property
    def ease(self) -> float:
        """How many times as many drafted tokens were accepted of late as of average texts."""
        return Ease.of(self._texts)

    def usual(self, shape: TreeShape, context: int) -> float:
        """How many tokens of this tree are accepted of an average text, a step."""
        return self.plan.tau(shape, self.temperature, _span(context)) - 1

    def _known(self, shape: TreeShape | None, context: int) -> list[float]:
        """Seconds of the latest steps of a kind over those expected of them, lately and at a like context."""
        def alike(step: Timed) -> bool:
            short, long = sorted((context, step.context))
            return self._steps - step.when <= FRESH and long <= 2 * short + 256

        return [step.ratio for step in self._timed.get((self._noisy, shape), ()) if alike(step)]

    def slowness(self, context: int) -> tuple[dict[TreeShape | None, float], set[TreeShape | None]]:
        """How many times what is expected of it a step of each kind takes now; the kinds it is unknown of.

        Those are taken to be as slow as the others.
        """
        known = {shape: self._known(shape, context) for shape in (None, *self.trees)}
        others = [ratio for ratios in known.values() for ratio in ratios] or [1.0]
        slow = {shape: statistics.median(ratios or others) for shape, ratios in known.items()}
        return slow, {shape for shape, ratios in known.items() if not ratios}

    def rehearse(self, times: int) -> None:
        """Take plain decoding and every tree in turn, so many times. 0: no longer."""
        self._ahead = deque((None, *self.trees) * times if self.trees else ())

    @property
    def rehearsing(self) -> bool:
        """Whether there are such turns to come."""
        return bool(self._ahead)

    def next(self, context: int) -> TreeShape | None:
        """The tree for the next step, at a context of so many tokens."""
        self._steps += 1
        if self._ahead:
            return self._ahead.popleft()
        if not self.trees:
            return None
        self._plain += self._current is None
        if self._held:
            self._held -= 1
            return self._current
        context = _span(context)
        slow, unknown = self.slowness(context)
        speeds = {
            shape: self.plan.speed(shape, self.temperature, context, self.ease) / times
            for shape, times in slow.items()
        }
        speeds[None] *= Ease.of([self._alone])
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] > MARGIN * speeds[self._current]:
            self._current = best
        self._held = (LOOK_PLAIN if self._current is None else LOOK) - 1
        if self._current is None:
            if self._plain > self._rest:
                self._plain, self._rest = 0, min(2 * self._rest, LONGEST_REST)
                self._try(max(self.trees, key=speeds.__getitem__), PROBE)
            return None
        self._plain, self._rest = 0, FIRST_REST
        doubted = [shape for shape in unknown if speeds[shape] * DOUBT > speeds[self._current]]
        if doubted and self._current not in doubted:
            self._try(max(doubted, key=speeds.__getitem__), CHECK)
        return self._current

    def _try(self, shape: TreeShape | None, steps: int) -> None:
        """Take this kind next, then choose anew."""
        self._ahead, self._held = deque([shape] * steps), 0

    def time(self, shape: TreeShape | None, context: int, seconds: float) -> None:
        """What the step with this tree took at this context. Of plain steps one in LOOK_PLAIN is enough."""
        if shape is None and self._held:
            return
        steps = self._timed.setdefault((self._noisy, shape), deque(maxlen=TIMED))
        expected = self.plan.seconds(shape, _span(context))
        steps.append(Timed(self._steps, context, seconds / expected))

    def record(self, shape: TreeShape | None, context: int, emitted: list[int]) -> None:
        """What a step with this tree emitted at this context, per sequence that moved."""
        if not emitted:
            return
        mean = sum(emitted) / len(emitted)
        if shape is None:
            self._alone.record(mean, 1.0)
        else:
            self._texts[0].record(mean - 1, self.usual(shape, context))
