"""The choice of the tree: by tokens a step over seconds a step, both as they are now."""
import random

import pytest

from checkpoint.calibration import TEMPERATURES, Calibration
from engine.autotune import FIRST_REST, FRESH, REHEARSED, Times, Tuner
from engine.request import Request
from sampling.options import Sampling
from tree import TreeShape

SMALL, MIDDLE, LARGE, HUGE = TreeShape(4, 1, 2), TreeShape(8, 2, 4), TreeShape(24, 5, 6), TreeShape(60, 7, 10)
TAUS = {SMALL: 1.6, MIDDLE: 2.2, LARGE: 2.8}
FAST = {None: 10e-3, SMALL: 11e-3, MIDDLE: 13e-3, LARGE: 40e-3}
SLOW = {None: 10e-3, SMALL: 19e-3, MIDDLE: 26e-3, LARGE: 60e-3}


def rehearsed(seconds: dict, noisy: bool, taus: dict = TAUS) -> tuple[Tuner, list]:
    """A tuner that has timed the trees, and which it ran."""
    tuner, ran = Tuner(Calibration(dict.fromkeys(TEMPERATURES, taus), (0.6, 1.0, 1.4)), taus), []

    def run() -> None:
        ran.append(tuner.next([], 1))
        tuner.times.add(1, noisy, ran[-1], 1, seconds[ran[-1]])

    tuner.rehearse(1, noisy, run)
    return tuner, ran


class Machine:
    """Decodes one simulated request: a step takes `seconds[shape]`, and `ease` scales what is accepted."""

    def __init__(self, tuner: Tuner, temperature: float = 0.0):
        self.tuner, self.draw, self.noisy = tuner, random.Random(0), temperature > 0
        self.request = Request([1] * 20, Sampling(temperature=temperature))
        tuner.begin(self.request)

    def run(self, seconds: dict, ease: float, steps: int) -> list:
        """The trees of some steps."""
        taken = []
        for _ in range(steps):
            shape = self.tuner.next([self.request], 1)
            self.tuner.times.add(1, self.noisy, shape, self.request.length, seconds[shape])
            mean = 0.0 if shape is None else ease * (TAUS[shape] - 1)
            emitted = 1 + int(mean) + (self.draw.random() < mean % 1)
            self.tuner.record(self.request, shape, emitted)
            self.request.ids += [0] * emitted
            taken.append(shape)
        return taken


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("phases", [
    # Seconds of steps, ease of the text, steps; of how many at the end most are of which kind.
    [(FAST, 1.0, 200, 190, MIDDLE)], [(SLOW, 1.0, 200, 190, None)],
    [(FAST | {MIDDLE: 20e-3}, 1.0, 200, 190, SMALL)], [(dict.fromkeys(FAST, 0.01), 1.0, 200, 190, LARGE)],
    [(FAST | {LARGE: 16e-3}, 1.6, 150, 130, LARGE)],  # an easy text
    [(FAST, 0.0, 60, 10, None), (FAST, 1.3, 6 * FIRST_REST, 20, MIDDLE)],  # a hard one that becomes easy
    # Other work makes trees slower than plain steps, and later no longer.
    [(FAST, 1.0, 60, 50, MIDDLE), (SLOW, 1.0, 100, 80, None), (FAST, 1.0, 8 * FIRST_REST, 40, MIDDLE)],
], ids=("middle", "plain", "small", "large", "easy", "hard", "slower"))
def test_the_fastest_kind_is_taken(phases, temperature):
    machine = Machine(rehearsed(phases[0][0], temperature > 0)[0], temperature)
    for seconds, ease, steps, last, best in phases:
        taken = machine.run(seconds, ease, steps)[-last:]
        assert taken.count(best) > 0.75 * last, {kind: taken.count(kind) for kind in seconds}


def test_drafts_that_are_never_accepted_are_tried_ever_less():
    """In a text, and in the next one."""
    first = Machine(rehearsed(FAST, False)[0])
    tried = [steps - first.run(FAST, 0.0, steps).count(None) for steps in (30, 70, 500, 500, 500)]
    assert 12 >= tried[2] >= tried[-1]
    second = Machine(first.tuner)
    assert 30 - second.run(FAST, 0.0, 30).count(None) < tried[0]


def test_large_trees_are_not_rehearsed_where_they_cannot_pay():
    _, ran = rehearsed(SLOW | {LARGE: 1.0, HUGE: 2.0}, False, TAUS | {HUGE: 3.0})
    assert set(ran) == {None, SMALL, MIDDLE, LARGE} and len(ran) == 4 * REHEARSED


def test_times_that_are_old_or_of_other_contexts_and_batches():
    times = Times()
    for shape, seconds in ((None, 1.0), (SMALL, 2.0)):  # four rows for two: a row more is a third
        times.add(2, False, shape, 10, seconds)
    guess = times.of(4, True, (None, SMALL), 10)
    assert guess == {None: pytest.approx(4 / 3), SMALL: pytest.approx(10 / 3)}
    times.steps += FRESH + 1
    times.add(2, False, None, 10, 3.0)
    assert times.of(2, False, (None, SMALL), 10) == {None: 3.0, SMALL: 6.0}
    times.add(2, False, SMALL, 4000, 9.0)  # at a much longer context, where no plain step has run
    assert times.of(2, False, (None, SMALL), 4000) == {None: 4.5, SMALL: 9.0}
    assert times.of(2, False, (None, SMALL), 10) == {None: 3.0, SMALL: 6.0}  # which it does not change
