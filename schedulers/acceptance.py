"""Acceptance statistics: moving averages per request, and over all requests as the prior of new requests."""
from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

# Decay per step of the moving averages of one request, and of all requests.
REQUEST_DECAY, GLOBAL_DECAY = 0.98, 0.998
PRIOR_STEPS = 12.0  # weight of the initial value of a ratio, in steps
INITIAL_SPEEDUP = 1.3  # prior of `Acceptance.with_head`
MAX_INITIAL_RATIO = 1.5  # maximum with_head / without_head in the prior of a new request
MIN_CONFIDENCE = 0.5  # minimum confidence in the prior of a new request
# Weight, in steps, of a step that does not measure a ratio. It pulls confidences toward 1 and reduces the
# weight of old values of `with_head`, since acceptance changes over the output.
PRIOR_DECAY = 0.03
# Nodes of a tree: mean number of accepted draft tokens per step, of our SmolLM2 head on the six sets, greedy
# (benchmarks/tau.py). Only ratios matter.
MEAN_ACCEPTED = {1: 0.0, 8: 1.35, 16: 1.74, 32: 2.0, 60: 2.2}


def mean_accepted(nodes: int) -> float:
    """Interpolate MEAN_ACCEPTED logarithmically in the number of nodes."""
    sizes = [*map(math.log, MEAN_ACCEPTED)]
    return float(np.interp(math.log(nodes), sizes, [*MEAN_ACCEPTED.values()]))


class Ratio:
    """The ratio of two exponentially weighted sums over steps."""

    def __init__(self, value: float, decay: float):
        self.numerator, self.denominator, self.decay = PRIOR_STEPS * value, PRIOR_STEPS, decay

    def record(self, numerator: float, denominator: float) -> None:
        """Add one step."""
        self.numerator = self.decay * self.numerator + numerator
        self.denominator = self.decay * self.denominator + denominator

    @property
    def value(self) -> float:
        return self.numerator / self.denominator


def pooled_ratio(ratios: Iterable[Ratio]) -> float:
    """Return sum of numerators / sum of denominators."""
    ratios = [*ratios]
    return sum(r.numerator for r in ratios) / sum(r.denominator for r in ratios)


class Acceptance:
    """Acceptance statistics of one request, or of all requests.

    with_head, without_head: speedup, in tokens per plain-step time, of steps with and without the draft head.
    without_head exceeds 1 if prompt lookup drafts. confidence, headless_confidence: accepted draft tokens /
    accepted draft tokens that the scores predict, in steps with and without the head.
    """

    def __init__(
        self, with_head: float = INITIAL_SPEEDUP, without_head: float = 1.0, confidence: float = 1.0,
        headless_confidence: float = 1.0, decay: float = GLOBAL_DECAY,
    ):
        self.with_head, self.without_head = Ratio(with_head, decay), Ratio(without_head, decay)
        self.confidence = Ratio(confidence, decay)
        self.headless_confidence = Ratio(headless_confidence, decay)

    def prior(self) -> Acceptance:
        """Return the initial statistics of a new request."""
        without_head = self.without_head.value
        with_head = min(max(self.with_head.value, without_head), MAX_INITIAL_RATIO * without_head)
        confidence = max(self.confidence.value, MIN_CONFIDENCE)
        headless_confidence = max(self.headless_confidence.value, MIN_CONFIDENCE)
        return Acceptance(with_head, without_head, confidence, headless_confidence, REQUEST_DECAY)

    def record(self, head: bool, emitted: int, relative_cost: float | None, expected: float | None) -> None:
        """Update with one step; see `Tuner.record`."""
        for ratio, drafted in (self.confidence, head), (self.headless_confidence, not head):
            if drafted and expected:
                ratio.record(emitted - 1, expected)
            else:
                ratio.record(PRIOR_DECAY, PRIOR_DECAY)
        if relative_cost is not None:
            (self.with_head if head else self.without_head).record(emitted, relative_cost)
            if not head:
                self.with_head.record(PRIOR_DECAY * self.with_head.value, PRIOR_DECAY)
