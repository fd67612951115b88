"""A replay of the choice between a tree and plain decoding."""
import random

import ours
import pytest
import replay

from common.errors import InputError
from engine import autotune
from tree import TreeShape

SHAPE = TreeShape(3, 1, 2)  # that the fixture has calibrated


@pytest.fixture
def speedups(calibrated, monkeypatch):
    """speedups(emits, cost): of four equal texts on a machine of one mood."""
    monkeypatch.setattr(replay, "moods", lambda rng: iter(lambda: 1.0, None))

    def of(emits: list[int], cost: float) -> list[float]:
        texts = [{"temperature": 0.0, "emits": emits}] * 4
        return replay.replay(texts, ours.Choice(calibrated / "eagle3", SHAPE, cost), cost, 0)

    return of


def test_a_text_of_which_all_is_accepted(speedups):
    """It is drafted from its first step to its last."""
    assert speedups([3, 2, 1] * 40, 1.5) == [pytest.approx(3 / 1.5)] * 4


def test_a_text_of_which_nothing_is_accepted(speedups):
    """A few steps try, the others are plain: the loss is smaller the longer the text is."""
    short, long = speedups([1] * 100, 1.5)[0], speedups([1] * 1000, 1.5)[0]
    assert 1 / 1.5 < 0.9 < short < long < 1 / replay.PLAIN


def test_moods_are_the_same_each_time():
    first, again = (replay.moods(random.Random(3)) for _ in range(2))
    seen = [next(first) for _ in range(500)]
    assert seen == [next(again) for _ in range(500)]
    assert min(seen) >= 1 and sorted(seen)[250] < 1.05 and max(seen) > 1.5


def test_constants(monkeypatch):
    monkeypatch.setattr(autotune, "PROBE", 2)
    ours.set_constant("PROBE=5")
    assert autotune.PROBE == 5
    for wrong in ("PROBE", "PROBE=x", "probe=3", "NONE=3", "Tuner=1"):
        with pytest.raises(InputError, match=f"--set {wrong}: is no NAME=NUMBER"):
            ours.set_constant(wrong)


@pytest.mark.compile
def test_texts_are_recorded_once(calibrated, questions, record, tmp_path, monkeypatch, capsys):
    texts = tmp_path / "texts.json"
    argv = ["--checkpoint", calibrated, "--questions", questions.parent, "--texts", texts, "--repeat", 2]
    argv = [*map(str, argv), "--max-new-tokens", "12", "--threads", "1"]
    assert replay.main([*argv, "--cost", "1.2", "1.5"]) == 0
    low, high = record("replay")["costs"]
    assert low["mean"] > high["mean"] and low["cells"] == 2
    assert f"| {low['mean']:.3f} |" in capsys.readouterr().out
    monkeypatch.setattr(replay, "record_texts", None)
    assert replay.main([*argv, "--cost", "1.2"]) == 0 and record("replay")["costs"] == [low]
    assert replay.main([*argv, "--tree", "4,1,2"]) == 1
    assert "of the tree 3,1,2; delete it" in capsys.readouterr().err


def test_without_a_calibration(golden, tmp_path):
    (tmp_path / "eagle3").mkdir()
    with pytest.raises(InputError, match="no calibration of the tree 3/1/2"):
        ours.Choice(tmp_path / "eagle3", SHAPE, 1.5)
