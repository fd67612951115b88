"""A kill -9 at any write leaves the old or the new, complete, and the next run goes on and leaves nothing."""
import shutil

import pytest
import torch
from helpers.killing import contents, kills
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_source

from checkpoint.convert import convert
from checkpoint.layouts import Answers
from common import files
from training.trainer import save_state

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("steps", ("two", pytest.param("one", marks=pytest.mark.dear)))
def test_converting_over_what_is_there(tmp_path, monkeypatch, steps):
    """A target with a head inside. In two steps, where the system has no exchange of folders, the old one may
    be missing after two of the kills; the next run brings it back.
    """
    place, config = tmp_path / "place", CONFIG | {"num_hidden_layers": 2}
    source = write_source(place / "source", target_state(config), config)
    convert(source, place / "target", quiet=True)
    head = write_source(place / "head", head_state(), HEAD_CONFIG)
    convert(head, target=place / "target", answers=Answers(aux_layers=(0, 1, 2)), quiet=True)
    if steps == "two":
        monkeypatch.setattr(files.ctypes, "CDLL", lambda name: None)

    def action() -> None:
        convert(source, place / "target", dtype="bf16", force=True, quiet=True)

    shutil.copytree(place, tmp_path / "pristine")
    old, missing, calls = contents(place / "target"), 0, []
    action()
    new, beside = contents(place / "target"), sorted(p.name for p in place.iterdir())
    assert new and new != old
    for call in kills(action, lambda: (shutil.rmtree(place), shutil.copytree(tmp_path / "pristine", place))):
        calls.append(call)
        found = contents(place / "target")
        assert found in (old, new, None), f"after {len(calls)} changes, before {call}"
        missing += found is None
        action()
        assert contents(place / "target") == new and sorted(p.name for p in place.iterdir()) == beside, calls
    assert len(calls) >= 40 and {"write", "fsync"} <= set(calls), calls
    assert missing <= 2 and (missing > 0) == (steps == "two")


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
