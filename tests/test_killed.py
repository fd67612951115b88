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


def check_folder(parent: Path, name: str, action, least: int, most_missing: int = 0) -> None:
    """Kill an action that makes or replaces PARENT/NAME at each write, at least so many.

    most_missing: kills after which PARENT/NAME may be missing until the next run.
    """
    pristine, work, missing = parent.with_name("pristine"), parent / name, 0
    shutil.copytree(parent, pristine)
    old = contents(work)
    action()
    new, beside, calls = contents(work), sorted(p.name for p in parent.iterdir()), []
    assert new and new != old
    for call in kills(action, lambda: (shutil.rmtree(parent), shutil.copytree(pristine, parent))):
        calls.append(call)
        found = contents(work)
        assert found in (old, new, None), f"after {len(calls)} changes, before {call}"
        missing += found is None and old is not None
        action()
        assert contents(work) == new and sorted(p.name for p in parent.iterdir()) == beside, calls
    assert len(calls) >= least and {"write", "fsync"} <= set(calls), calls
    assert (missing > 0) == (most_missing > 0) and missing <= most_missing


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
    check_folder(place, "target", lambda: convert(
        place / "source", place / "target", dtype="bf16", force=True, quiet=True), 40, 2 * (steps == "two"))


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
