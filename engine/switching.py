"""Which tree the next step drafts, or none: by what trees cost and what was accepted of late.

The choice is the host's, between steps. It depends on the plan and on what was accepted, not on a clock: the
same text takes the same steps. It never changes the text.
"""
from __future__ import annotations

from engine.tuning import Plan
from tree import TreeShape

MEMORY = 0.95  # what a step weighs less than the one after it
PRIOR = 8.0  # steps of average text that a text begins with
MARGIN = 1.03  # how much faster another tree must be to be taken instead
PROBE = 4  # steps with a tree, after a while of plain decoding, to see whether drafts are accepted again
FIRST_REST, LONGEST_REST = 64, 1024  # tokens of plain decoding before that; doubled each time in vain


class Switch:
    """Chooses for one batch of texts at a time. None stands for plain decoding."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.begin([0.0])

    def begin(self, temperatures: list[float]) -> None:
        """New texts, at these temperatures."""
        self.temperature = sum(temperatures) / len(temperatures)
        self.trees = self.plan.trees[any(t > 0 for t in temperatures)]
        usual = self.plan.tau(self.trees[0], self.temperature) - 1 if self.trees else 1.0
        self._accepted = self._expected = PRIOR * usual
        self._current: TreeShape | None = self.trees[0] if self.trees else None
        self._probe = self._plain = 0
        self._rest = FIRST_REST

    @property
    def ease(self) -> float:
        """How many times as many drafted tokens were accepted of late as of an average text."""
        return self._accepted / self._expected

    def next(self, context: int) -> TreeShape | None:
        """The tree for the next step, at a context of so many tokens."""
        if not self.trees:
            return None
        speeds = {
            shape: self.plan.speed(shape, self.temperature, context, self.ease)
            for shape in (None, *self.trees)
        }
        if self._probe:
            self._probe -= 1
            return max(self.trees, key=speeds.__getitem__)
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] > MARGIN * speeds[self._current]:
            self._current = best
        if self._current is not None:
            self._plain, self._rest = 0, FIRST_REST
            return self._current
        self._plain += 1
        if self._plain > self._rest:
            self._plain, self._rest, self._probe = 0, min(2 * self._rest, LONGEST_REST), PROBE
        return None

    def record(self, shape: TreeShape | None, emitted: list[int]) -> None:
        """What a step with this tree emitted, per sequence that moved."""
        if shape is None or not emitted:
            return
        accepted = sum(n - 1 for n in emitted) / len(emitted)
        self._accepted = MEMORY * self._accepted + accepted
        self._expected = MEMORY * self._expected + self.plan.tau(shape, self.temperature) - 1
