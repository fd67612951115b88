"""A kill -9 at any write leaves the old or the new, complete, and the next run goes on and leaves nothing."""
import shutil
from pathlib import Path

import pytest
import torch
from helpers.killing import contents, kills
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_source

from checkpoint.convert import convert
from checkpoint.layouts import Answers
from common import files
from training.trainer import save_state

pytestmark = pytest.mark.slow


def check_folder(parent: Path, name: str, action, least: int) -> None:
    """Kill an action that makes or replaces PARENT/NAME at each write, at least so many."""
    pristine, work = parent.with_name("pristine"), parent / name
    shutil.copytree(parent, pristine)

    def prepare() -> None:
        shutil.rmtree(parent)
        shutil.copytree(pristine, parent)

    old = contents(work)
    action()
    new, beside = contents(work), sorted(p.name for p in parent.iterdir())
    assert new and new != old
    calls = []
    for call in kills(action, prepare):
        calls.append(call)
        assert contents(work) in (old, new), f"after {len(calls)} changes, before {call}"
        action()
        assert contents(work) == new and sorted(p.name for p in parent.iterdir()) == beside, calls
    assert len(calls) >= least and {"write", "fsync"} <= set(calls), calls


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with a converted target, its head inside, and the source of another conversion."""
    place = tmp_path / "place"
    config = {**CONFIG, "num_hidden_layers": 2}
    write_source(place / "source", target_state(config), config)
    convert(place / "source", place / "target", quiet=True)
    write_source(place / "head", head_state(), HEAD_CONFIG)
    convert(place / "head", target=place / "target", answers=Answers(aux_layers=(0, 1, 2)), quiet=True)
    return place


@pytest.mark.dear
def test_converting_anew(place):
    check_folder(place, "new", lambda: convert(
        place / "source", place / "new", force=True, quiet=True), least=30)


@pytest.mark.parametrize("steps", ("two", pytest.param("one", marks=pytest.mark.dear)))
def test_converting_over_what_is_there(place, monkeypatch, steps):
    """In two steps: where the system has no exchange of folders. Then the next run brings back the old."""
    if steps == "two":
        monkeypatch.setattr(files.ctypes, "CDLL", lambda name: None)

    def action() -> None:
        convert(place / "source", place / "target", dtype="bf16", force=True, quiet=True)

    if steps == "one":
        return check_folder(place, "target", action, least=40)
    pristine = place.with_name("pristine")
    shutil.copytree(place, pristine)
    old, missing = contents(place / "target"), 0
    action()
    new = contents(place / "target")
    for _ in kills(action, lambda: (shutil.rmtree(place), shutil.copytree(pristine, place))):
        found = contents(place / "target")
        assert found in (old, new, None)
        missing += found is None
        action()
        assert contents(place / "target") == new
        assert sorted(p.name for p in place.iterdir()) == ["head", "source", "target"]
    assert 1 <= missing <= 2
    return None


def test_the_state_of_a_training(tmp_path):
    work = tmp_path / "work"

    def save(step: int) -> None:
        save_state(work, {"options": {"a": 1}, "step": step, "weights": torch.full((1000,), float(step))})

    def prepare() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        save(1)

    calls = []
    for call in kills(lambda: save(2), prepare):
        calls.append(call)
        state = torch.load(work / "state.pt", weights_only=True)
        assert state["step"] in (1, 2) and bool((state["weights"] == state["step"]).all())
        save(3)
        assert torch.load(work / "state.pt", weights_only=True)["step"] == 3
        assert [p.name for p in work.iterdir()] == ["state.pt"]
    assert {"write_record", "fsync", "replace"} <= set(calls), calls
