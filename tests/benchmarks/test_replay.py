"""A replay of the choice between a tree and plain decoding."""
import json
import random
import shutil

import pytest
import replay
from replay import Text, moods, set_constants

from common.errors import InputError
from engine import switching
from engine.calibration import CALIBRATION as CALIBRATION_FILE
from engine.calibration import TEMPERATURES, Calibration
from tree import TreeShape

SHAPE = TreeShape(3, 1, 2)
CALIBRATION = Calibration({t: {SHAPE: 1.8} for t in TEMPERATURES}, (1.0,))


@pytest.fixture
def quiet(monkeypatch):
    """A machine of one mood."""
    monkeypatch.setattr(replay, "moods", lambda rng: iter(lambda: 1.0, None))


def speedups(emits: list[int], cost: float, texts: int = 4) -> list[float]:
    return replay.replay([Text("a", 0.0, emits)] * texts, CALIBRATION, SHAPE, cost, 0)


def test_a_text_of_which_all_is_accepted(quiet):
    """It is drafted from its first step to its last."""
    assert speedups([3, 2, 1] * 40, 1.5) == [pytest.approx(3 / 1.5)] * 4


def test_a_text_of_which_nothing_is_accepted(quiet):
    """A few steps try, the others are plain: what is lost is less the longer the text is."""
    short, long = speedups([1] * 100, 1.5)[0], speedups([1] * 1000, 1.5)[0]
    assert 1 / 1.5 < 0.9 < short < long < 1 / replay.PLAIN


def test_moods_are_the_same_each_time():
    first, again = (moods(random.Random(3)) for _ in range(2))
    seen = [next(first) for _ in range(500)]
    assert seen == [next(again) for _ in range(500)]
    assert min(seen) >= 1 and sorted(seen)[250] < 1.05 and max(seen) > 1.5


def test_constants(monkeypatch):
    monkeypatch.setattr(switching, "PROBE", 2)
    set_constants(["PROBE=5"])
    assert switching.PROBE == 5
    for wrong in ("PROBE", "PROBE=x", "probe=3", "NONE=3", "Switch=1"):
        with pytest.raises(InputError, match=f"--set {wrong}: not NAME=NUMBER"):
            set_constants([wrong])


@pytest.fixture
def head(golden, tmp_path):
    """Where the head of a target lies that no test has calibrated."""
    target = shutil.copytree(golden, tmp_path / "target", ignore=shutil.ignore_patterns(CALIBRATION_FILE))
    return target / "eagle3"


def test_a_line_for_every_cost(head, questions, results, capsys):
    CALIBRATION.write(head)
    args = ["--checkpoint", head.parent, "--questions", questions.parent, "--max-new-tokens", 12]
    assert replay.main([str(arg) for arg in [*args, "--repeat", 2, "--cost", 1.2, 1.5]]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1.")]
    costs = json.loads((results / "replay.json").read_text())["costs"]
    assert len(table) == 2 and costs.keys() == {"1.2", "1.5"}
    for line, figures in zip(table, costs.values()):
        assert f"{figures['mean']:.3f}" in line and line.endswith(f"| {figures['missed']} of 2 |")
    assert costs["1.5"]["mean"] < costs["1.2"]["mean"]


def test_without_a_calibration(head, questions, refused):
    args = replay.main, "--checkpoint", head.parent, "--questions", questions.parent
    refused(*args, words="no calibration of the tree 3/1/2")
    refused(*args, "--cost", 1, words="--cost: must be above 1")
