"""step_model.py: what a step is made of."""
import random

import pytest
from step import TREES
from step_model import TERMS, StepModel, counts


def test_counts_of_a_step():
    """Three texts of 100 tokens, a tree of 8 nodes grown in three passes of a head with one of ten layers."""
    assert counts(TREES[1], 1, 100, 10) == [1, 1, 100, 100, 0, 0]
    head_rows = TREES[8].window + 2 * 4
    assert counts(TREES[8], 3, 100, 10) == [
        1, 24, 300 * 1.3, 300 * (8 + head_rows / 10), 3, 3 * head_rows
    ]


def test_the_model_finds_what_steps_are_made_of():
    """Steps that are such a sum, each off by up to two percent: the sum is found, and is off by no more."""
    draw = random.Random(0).uniform
    true = StepModel((9.0, 0.4, 1e-3, 5e-5, 0.5, 0.02), 30)
    steps = [(TREES[t], b, n) for t in (1, 8, 12, 60) for b in (1, 4, 16) for n in (128, 1024, 4096)]
    measured = [(*step, true(*step) * draw(0.98, 1.02)) for step in steps]
    model = StepModel.fitted(measured, 30)
    assert model.errors(measured)[-1] < 0.04
    assert model(TREES[16], 8, 2048) == pytest.approx(true(TREES[16], 8, 2048), rel=0.03)


def test_no_time_is_below_zero():
    """Plain steps say nothing of a head; where steps get shorter with the context, keys cost nothing."""
    measured = [(TREES[1], b, n, 9 + b - n / 1000) for b in (1, 2, 4) for n in (100, 200, 400)]
    model = StepModel.fitted(measured, 30)
    assert min(model.milliseconds) >= 0 and len(model.milliseconds) == len(TERMS)
    assert model.milliseconds[TERMS.index("keys")] == 0
    with pytest.raises(ValueError, match="5 steps do not tell 6 times"):
        StepModel.fitted(measured[:5], 30)
