"""The choice of the tree: by tokens a step over seconds a step, both as they are now."""
import random

import pytest

from checkpoint.calibration import TEMPERATURES, Calibration, Far
from engine.autotune import FIRST_REST, FRESH, REHEARSED, Times, Tuner
from engine.request import Request
from sampling.options import Sampling
from tree import TreeShape

SMALL, MIDDLE, LARGE = TreeShape(4, 1, 2), TreeShape(8, 2, 4), TreeShape(24, 5, 6)
TAUS = {SMALL: 1.6, MIDDLE: 2.2, LARGE: 2.8}
KNOWN = Calibration(dict.fromkeys(TEMPERATURES, TAUS), (0.6, 1.0, 1.4))


class Machine:
    """Decodes one simulated request: a step takes `seconds[shape]`, and `ease` scales what is accepted."""

    def __init__(
        self, seconds: dict, ease: float = 1.0, temperature: float = 0.0, tuner: Tuner | None = None
    ):
        self.seconds, self.ease = dict(seconds), ease
        self.tuner = tuner or Tuner(KNOWN, TAUS)
        self.request = Request([1] * 20, Sampling(temperature=temperature))
        self.noisy, self.draw = temperature > 0, random.Random(0)
        if not self.tuner.times.known:
            self.tuner.rehearse(1, self.noisy, self.rehearse)
        self.tuner.begin(self.request)
        self.taken = []

    def rehearse(self) -> None:
        shape = self.tuner.next([], 1)
        self.tuner.times.add(1, self.noisy, shape, 1, self.seconds[shape])

    def step(self) -> None:
        shape = self.tuner.next([self.request], 1)
        self.tuner.times.add(1, self.noisy, shape, self.request.length, self.seconds[shape])
        mean = 0.0 if shape is None else self.ease * (TAUS[shape] - 1)
        emitted = 1 + int(mean) + (self.draw.random() < mean % 1)
        self.tuner.record(self.request, shape, emitted)
        self.request.ids += [0] * emitted
        self.taken.append(shape)

    def run(self, steps: int) -> list:
        """The trees of some steps."""
        for _ in range(steps):
            self.step()
        return self.taken[-steps:]


FAST_TREES = {None: 10e-3, SMALL: 11e-3, MIDDLE: 13e-3, LARGE: 40e-3}
SLOW_TREES = {None: 10e-3, SMALL: 19e-3, MIDDLE: 26e-3, LARGE: 60e-3}


@pytest.mark.parametrize("seconds, best", [
    (FAST_TREES, MIDDLE), (SLOW_TREES, None), (FAST_TREES | {MIDDLE: 20e-3}, SMALL),
    (dict.fromkeys(FAST_TREES, 0.01), LARGE),
], ids=("middle", "plain", "small", "large"))
def test_the_fastest_kind_is_taken(seconds, best):
    for temperature in (0.0, 1.0):
        taken = Machine(seconds, temperature=temperature).run(200)
        assert taken.count(best) > 150, (temperature, [(kind, taken.count(kind)) for kind in seconds])


def test_a_hard_text_is_decoded_plainly_and_an_easy_one_with_large_trees():
    hard = Machine(FAST_TREES, ease=0.0).run(150)
    assert hard[:60].count(None) > 0 and hard[60:].count(None) > 75
    easy = Machine(FAST_TREES | {LARGE: 16e-3}, ease=1.6).run(150)
    assert easy[20:].count(LARGE) > 110


def test_plain_decoding_ends_when_drafts_are_accepted_again():
    machine = Machine(FAST_TREES, ease=0.0)
    machine.run(60)
    assert machine.taken[-1] is None
    machine.ease = 1.3
    later = machine.run(6 * FIRST_REST)
    assert later[-20:].count(MIDDLE) > 15


def test_drafts_that_are_never_accepted_are_tried_ever_less():
    machine = Machine(FAST_TREES, ease=0.0)
    machine.run(100)
    tried = [sum(shape is not None for shape in machine.run(500)) for _ in range(3)]
    assert tried[0] <= 12 and tried[-1] <= tried[0]


def test_a_machine_that_changes_is_noticed():
    """Other work makes trees slower than plain steps, and later no longer."""
    machine = Machine(FAST_TREES)
    assert machine.run(60).count(MIDDLE) > 40
    machine.seconds = SLOW_TREES
    assert machine.run(100)[20:].count(None) > 70
    machine.seconds = FAST_TREES
    assert machine.run(8 * FIRST_REST)[-40:].count(MIDDLE) > 20


def test_what_a_request_taught_serves_the_next_one():
    """Of a checkpoint whose drafts are never accepted the next request tries few."""
    first = Machine(FAST_TREES, ease=0.0)
    first.run(300)
    second = Machine(FAST_TREES, ease=0.0, tuner=first.tuner)
    drafted = [sum(shape is not None for shape in machine.taken[:30]) for machine in (first, second)]
    second.run(30)
    assert sum(shape is not None for shape in second.taken) < drafted[0]


def test_large_trees_are_not_rehearsed_where_they_cannot_pay():
    huge = TreeShape(60, 7, 10)
    taus = TAUS | {huge: 3.0}
    tuner, ran = Tuner(Calibration(dict.fromkeys(TEMPERATURES, taus), (1.0,)), taus), []

    def run() -> None:
        ran.append(tuner.next([], 1))
        tuner.times.add(1, False, ran[-1], 1, (SLOW_TREES | {LARGE: 1.0, huge: 2.0})[ran[-1]])

    tuner.rehearse(1, False, run)
    assert set(ran) == {None, SMALL, MIDDLE, LARGE} and len(ran) == 4 * REHEARSED


def test_plain_decoding_where_no_tree_was_timed():
    """As after the rehearsal of sequences too short for a second step."""
    tuner, request = Tuner(KNOWN, TAUS), Request([1], Sampling())
    tuner.times.add(1, False, None, 1, 0.01)
    tuner.begin(request)
    assert {tuner.next([request], 1) for _ in range(3 * FIRST_REST)} == {None}


def test_old_times_follow_the_fresh_ones_and_unknown_ones_the_rows():
    times = Times()
    for shape, seconds in ((None, 1.0), (SMALL, 2.0)):
        times.add(1, False, shape, 10, seconds)
    assert times.of(1, False, (None, SMALL), 10) == {None: 1.0, SMALL: 2.0}
    times.steps += FRESH + 1
    times.add(1, False, None, 10, 3.0)
    assert times.of(1, False, (None, SMALL), 10) == {None: 3.0, SMALL: 6.0}
    times.add(1, False, SMALL, 4000, 9.0)  # at a much longer context, where no plain step has run
    assert times.of(1, False, (None, SMALL), 4000) == {None: 4.5, SMALL: 9.0}
    assert times.of(1, False, (None, SMALL), 10) == {None: 3.0, SMALL: 6.0}  # which it does not change
    alone = Times()
    for shape, seconds in ((None, 1.0), (SMALL, 2.0)):  # four rows for two: a row more is a third
        alone.add(2, False, shape, 10, seconds)
    guess = alone.of(4, True, (None, SMALL), 10)
    assert guess == {None: pytest.approx(4 / 3), SMALL: pytest.approx(10 / 3)}
    alone.add(6, False, None, 10, 5.0)
    assert alone.of(4, False, (None,), 10) == {None: 3.0}  # between two sequences and six


def test_tau_between_temperatures_and_contexts():
    known = Calibration({0.0: {SMALL: 2.0}, 1.0: {SMALL: 1.5}}, (1.0,), Far(1128, {0.0: 0.5, 1.0: 1.0}))
    assert known.tau(SMALL, 0.5) == pytest.approx(1.75)
    assert known.tau(SMALL, 0.0, 628) == pytest.approx(1.75) and known.tau(SMALL, 3.0, 9999) == 1.5
    assert known.tau(SMALL, 0.0, 99_999) == pytest.approx(1.5)
