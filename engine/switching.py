"""Which tree the next step drafts, or none: by what trees cost and what was accepted of late.

The choice is the host's, between steps. What a step costs was measured once (`engine.costs`), on a machine
that has other work at other times: so the steps themselves are timed too. The choice never changes the text.
"""
from __future__ import annotations

import statistics
from collections import deque

from engine.tuning import Plan
from tree import TreeShape

MEMORY = 0.97  # what a step weighs less than the one after it
PRIOR = 8.0  # steps of average text that a text begins with
MARGIN = 1.03  # how much faster another tree must be to be taken instead
PROBE = 4  # steps with a tree, after a while of plain decoding, to see whether drafts are accepted again
FIRST_REST, LONGEST_REST = 64, 1024  # tokens of plain decoding before that; doubled each time in vain
TIMED = 7  # of the latest steps of a kind, whose median says how slow it is
CHECK_EVERY, CHECK = 64, 2  # after so many steps with trees, so many of plain decoding to see what they cost,
DOUBT = 1.25  # unless the trees are so many times as fast


class Switch:
    """Chooses for one batch of texts at a time. None stands for plain decoding.

    What it knows of the machine it keeps from text to text, what it knows of a text it forgets with it.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self._slowness: dict[tuple[bool, TreeShape | None], deque[float]] = {}
        self._rehearsal: deque[TreeShape | None] = deque()
        self.begin([0.0])

    def begin(self, temperatures: list[float]) -> None:
        """New texts, at these temperatures."""
        self.temperature = sum(temperatures) / len(temperatures)
        self._noisy = any(t > 0 for t in temperatures)
        self.trees = self.plan.trees[self._noisy]
        usual = self.plan.tau(self.trees[0], self.temperature) - 1 if self.trees else 1.0
        self._accepted = self._expected = PRIOR * usual
        self._current: TreeShape | None = self.trees[0] if self.trees else None
        self._probe = self._plain = self._drafted = self._check = 0
        self._rest = FIRST_REST

    @property
    def ease(self) -> float:
        """How many times as many drafted tokens were accepted of late as of an average text."""
        return self._accepted / self._expected

    def slowness(self, shape: TreeShape | None) -> float:
        """Seconds that a step takes of late over those expected of it. Unknown: 1, so that it is tried."""
        known = self._slowness.get((self._noisy, shape))
        return statistics.median(known) if known else 1.0

    def rehearse(self, times: int) -> None:
        """Take plain decoding and every tree in turn, so many times. 0: no longer."""
        self._rehearsal = deque((None, *self.trees) * times if self.trees else ())

    @property
    def rehearsing(self) -> bool:
        """Whether there are such turns to come."""
        return bool(self._rehearsal)

    def next(self, context: int) -> TreeShape | None:
        """The tree for the next step, at a context of so many tokens."""
        if self._rehearsal:
            return self._rehearsal.popleft()
        if not self.trees:
            return None
        speeds = {
            shape: self.plan.speed(shape, self.temperature, context, self.ease) / self.slowness(shape)
            for shape in (None, *self.trees)
        }
        if self._probe:
            self._probe -= 1
            return max(self.trees, key=speeds.__getitem__)
        if self._check:
            self._check -= 1
            return None
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] > MARGIN * speeds[self._current]:
            self._current = best
        if self._current is not None:
            self._plain, self._rest = 0, FIRST_REST
            self._drafted += 1
            if self._drafted >= CHECK_EVERY and speeds[self._current] < DOUBT * speeds[None]:
                self._drafted, self._check = 0, CHECK
            return self._current
        self._plain += 1
        if self._plain > self._rest:
            self._plain, self._rest, self._probe = 0, min(2 * self._rest, LONGEST_REST), PROBE
        return None

    def time(self, shape: TreeShape | None, context: int, seconds: float) -> None:
        """What the step with this tree took at this context."""
        ratios = self._slowness.setdefault((self._noisy, shape), deque(maxlen=TIMED))
        ratios.append(seconds / self.plan.seconds(shape, context))

    def record(self, shape: TreeShape | None, emitted: list[int]) -> None:
        """What a step with this tree emitted, per sequence that moved."""
        if shape is None or not emitted:
            return
        accepted = sum(n - 1 for n in emitted) / len(emitted)
        self._accepted = MEMORY * self._accepted + accepted
        self._expected = MEMORY * self._expected + self.plan.tau(shape, self.temperature) - 1
