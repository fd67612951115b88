"""Accepted tokens per step: running ratios of each request, and of all requests as the prior of new ones."""
from __future__ import annotations

import math
from collections.abc import Iterable

# Weight of a step relative to the next one: in the ratios of a request, and in those of all requests.
REQUEST_DECAY, GLOBAL_DECAY = 0.98, 0.998
PRIOR_STEPS = 12.0  # weight of the initial value of a ratio, in steps
INITIAL_SPEEDUP = 1.3  # `Acceptance.with_head` before the first measurement
# Maximum of `with_head` / `without_head` in the prior of a new request.
MAX_INITIAL_RATIO = 1.5
MIN_CONFIDENCE = 0.5  # of a new request
PRIOR_DECAY = 0.03  # weight of a step without drafts, which moves ratios to the prior: acceptance varies
# Drafts that a step with a tree of so many nodes typically accepts: our SmolLM2 head on the six sets, greedy
# (benchmarks/tau.py). Only ratios matter.
TYPICAL_DRAFTS = {1: 0.0, 8: 1.35, 16: 1.74, 32: 2.0, 60: 2.2}


def typical_drafts(nodes: int) -> float:
    """Return the drafts that a step with a tree of this size typically accepts, interpolated."""
    below = max(n for n in TYPICAL_DRAFTS if n <= nodes)
    above = min((n for n in TYPICAL_DRAFTS if n > nodes), default=below)
    if above == below:
        return TYPICAL_DRAFTS[below]
    fraction = math.log(nodes / below) / math.log(above / below)
    return TYPICAL_DRAFTS[below] + fraction * (TYPICAL_DRAFTS[above] - TYPICAL_DRAFTS[below])


class Ratio:
    """An exponentially weighted ratio of two sums over steps."""

    def __init__(self, value: float, decay: float):
        self.numerator, self.denominator, self.decay = PRIOR_STEPS * value, PRIOR_STEPS, decay

    def record(self, numerator: float, denominator: float) -> None:
        """Add one step."""
        self.numerator = self.decay * self.numerator + numerator
        self.denominator = self.decay * self.denominator + denominator

    @property
    def value(self) -> float:
        return self.numerator / self.denominator


def pooled(ratios: Iterable[Ratio]) -> float:
    """Return the ratio of several requests together."""
    ratios = [*ratios]
    return sum(r.numerator for r in ratios) / sum(r.denominator for r in ratios)


class Acceptance:
    """Tokens that the steps of one request emit, or those of all requests.

    with_head, without_head: tokens emitted in the time of a plain step, by steps with the head and by those
    without it. without_head is above 1 where prompt lookup drafts. confidence, headless_confidence: accepted
    drafts / drafts that their scores predict, with the head and without.
    """

    def __init__(
        self, with_head: float = INITIAL_SPEEDUP, without_head: float = 1.0, confidence: float = 1.0,
        headless_confidence: float = 1.0, decay: float = GLOBAL_DECAY,
    ):
        self.with_head, self.without_head = Ratio(with_head, decay), Ratio(without_head, decay)
        self.confidence = Ratio(confidence, decay)
        self.headless_confidence = Ratio(headless_confidence, decay)

    def prior(self) -> Acceptance:
        """Return the prior of a new request."""
        without_head = self.without_head.value
        with_head = min(max(self.with_head.value, without_head), MAX_INITIAL_RATIO * without_head)
        confidence = max(self.confidence.value, MIN_CONFIDENCE)
        headless_confidence = max(self.headless_confidence.value, MIN_CONFIDENCE)
        return Acceptance(with_head, without_head, confidence, headless_confidence, REQUEST_DECAY)

    def record(self, head: bool, emitted: int, relative_cost: float | None, expected: float | None) -> None:
        """Add a step, as in `Tuner.record`."""
        for ratio, drafted in (self.confidence, head), (self.headless_confidence, not head):
            if drafted and expected:
                ratio.record(emitted - 1, expected)
            else:
                ratio.record(PRIOR_DECAY, PRIOR_DECAY)
        if relative_cost is not None:
            (self.with_head if head else self.without_head).record(emitted, relative_cost)
            if not head:
                self.with_head.record(PRIOR_DECAY * self.with_head.value, PRIOR_DECAY)
