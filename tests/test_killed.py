"""A kill -9 at any write leaves the old or the new, complete, and the next run goes on and leaves nothing."""
import shutil
from pathlib import Path

import pytest
import torch
from helpers.killing import contents, kills
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_source
from helpers.training import options, write_prompts

import evaluate
import train
from checkpoint.convert import convert
from checkpoint.layouts import Answers
from common import files
from engine.autotune import Calibration
from evaluation.answers import Answer
from training.trainer import save_state
from tree import TreeShape

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


def whole_runs(action, prepare, check, each: int = 1) -> int:
    """Kill a whole command at its changes, look at what is there, and run it again; how often."""
    count = 0
    for call in kills(action, prepare, each):
        count += 1
        check(f"after {count} changes, before {call}")
        action()
        check("")
    return count


def draw(*arguments) -> None:
    """In place of a picture, whose drawing takes seconds."""
    *_, path = arguments
    with files.atomic_path(path) as part:
        part.write_bytes(b"a picture")


@pytest.fixture
def training(golden, tmp_path, monkeypatch):
    """A whole run of train.py that takes a moment, and the folder that it writes to."""
    monkeypatch.setattr("training.trainer.draw_curves", draw)
    monkeypatch.setattr("training.trainer.SAVE_SECONDS", 0)
    monkeypatch.setattr("training.validate.TOKENS", 2)
    monkeypatch.setattr("training.validate.SHAPE", TreeShape(2, 1, 1))
    monkeypatch.setattr("training.validate.Validator.calibration", lambda *_: Calibration(
        {t: {TreeShape(8, 2, 4): 1.5} for t in (0.0, 1.0)}, (1.0,)))
    prompts, folder = write_prompts(tmp_path / "prompts", 3), tmp_path / "place"
    argv = options(golden, prompts, folder, **{
        "epochs": 1, "steps": 1, "synthesize": 0, "validate-prompts": 1, "max-new-tokens": 3,
        "draft-vocab": 16,
    })

    def action() -> None:
        assert train.main(argv) == 0

    return folder, action


def head_in(folder: Path) -> dict[str, bytes] | None:
    """What a written head is, but for the times in its card."""
    found = contents(folder)
    return found and {name: b"" if name.endswith("README.md") else data for name, data in found.items()}


@pytest.mark.dear
def test_a_whole_training(training):
    """Text, training, export: the head is there whole or not at all, and the next run goes on."""
    folder, action = training
    action()
    new = head_in(folder / "head")
    assert len(new) == 5, new.keys()
    kept = {str(p.relative_to(folder)) for p in folder.rglob("*")}

    def check(when: str) -> None:
        assert head_in(folder / "head") in ((None, new) if when else (new,)), when
        assert when or {str(p.relative_to(folder)) for p in folder.rglob("*")} == kept

    assert whole_runs(action, lambda: shutil.rmtree(folder), check) >= 30


@pytest.mark.dear
def test_a_whole_evaluation(golden, tmp_path):
    """What was answered is kept, and the next run ends with the same answers and all files."""
    questions, folder = tmp_path / "questions.jsonl", tmp_path / "out"
    questions.write_text('{"question_id": 1, "turns": ["a?"]}\n{"question_id": 2, "turns": ["b?"]}\n')
    argv = [
        "--checkpoint", str(golden), "--out", str(folder), "--questions", str(questions), "--no-compile",
        "--max-new-tokens", "2", "--max-seq-len", "64", "--speculate", "lookup", "--dtype", "fp32",
        "--observe", "0",
    ]

    def action() -> None:
        assert evaluate.main(argv) == 0

    def ids() -> dict:
        lines = (folder / "answers.jsonl").read_bytes().splitlines(keepends=True)
        found = [Answer.read(line, "here") for line in lines if line.endswith(b"\n")]
        return {a.key: [t.ids for t in a.turns] for a in found}

    action()
    answers, names = ids(), sorted(contents(folder))

    def check(when: str) -> None:
        if (folder / "answers.jsonl").exists():
            assert ids().items() <= answers.items(), when
        assert when or (ids() == answers and sorted(contents(folder)) == names)

    assert len(answers) == 4
    assert whole_runs(action, lambda: shutil.rmtree(folder, ignore_errors=True), check) >= 6
