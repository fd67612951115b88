"""evaluate.py on the golden target: losslessness, its files, resuming."""
import json
import shutil
from argparse import Namespace

import pytest

import evaluate
from evaluation import session
from evaluation.answers import Answer

pytestmark = pytest.mark.slow
ONE = ({"question_id": 81, "category": "c", "turns": ["what is 3?", "and 4?"]}, {"turns": ["say 5"]})
EAGLE = ("--speculate", "eagle3,eagle2", "--tree", "eagle3=8,2,3", "--tree", "eagle2=8,2,3")


@pytest.fixture(scope="module")
def run(golden, tmp_path_factory):
    """A complete run of two small sets in the folder `out`, next to `questions`; `go` runs it with options.
    """
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "questions").mkdir()
    (folder / "questions" / "one.jsonl").write_text("\n".join(map(json.dumps, ONE)))
    two = {"question_id": "x", "turns": ["count to 7"]}, {"turns": ["x" * 1100]}  # longer than the context
    (folder / "questions" / "two.jsonl").write_text("\n".join(map(json.dumps, two)))

    def go(*more, out="out", plan=EAGLE) -> int:
        return evaluate.main([str(word) for word in (
            "--checkpoint", golden, "--out", folder / out, "--questions", folder / "questions",
            "--no-compile", "--dtype", "fp32", "--threads", 1, "--max-new-tokens", 24, "--temperature", "0,1",
            *plan, *more,
        )])

    assert go() == 0
    return Namespace(folder=folder, go=go)


def ids_in(folder) -> dict[tuple, list]:
    answers = (Answer.read(line, "here") for line in (folder / "answers.jsonl").read_bytes().splitlines())
    return {answer.key: [turn.ids for turn in answer.turns] for answer in answers}


def test_complete_run_is_lossless(run):
    out = run.folder / "out"
    rows = json.loads((out / "table.json").read_text())
    assert {(r["temperature"], r["method"], r["set"]) for r in rows} == {
        (t, m, s) for t in (0.0, 1.0) for m in ("none", "eagle3", "eagle2") for s in ("one", "two", "mean")
    }
    questions = {"one": 2, "two": 1, "mean": 3}
    assert all(r["errors"] == r["ties"] == 0 and r["equal"] == questions[r["set"]] for r in rows)
    assert all(r["tau"] == 1 if r["method"] == "none" else r["tau"] > 1 for r in rows if r["set"] == "mean")
    assert json.loads((out / "differences.json").read_text()) == []
    assert "Temperature 1" in (out / "table.md").read_text()


def test_interrupted_run_resumes(run, monkeypatch, capsys):
    stopped, ask, calls = run.folder / "stopped", session.ask, iter(range(1000))

    def stops(*args):
        if next(calls) == 12:  # including warm-up
            raise KeyboardInterrupt
        return ask(*args)

    with monkeypatch.context() as patch:
        patch.setattr(session, "ask", stops)
        assert run.go(out="stopped") == 130
    printed = capsys.readouterr()
    assert "\n| eagle3 " in printed.out and "without an answer" in printed.out
    assert "run the same command to resume" in printed.err and "results so far:" in printed.err
    before = (stopped / "answers.jsonl").read_text()
    (stopped / "answers.jsonl").write_text(before + '{"set": "one", "ques')  # as a kill may leave it
    assert run.go(out="stopped") == 0
    assert (stopped / "answers.jsonl").read_text().startswith(before[: before.rindex('{"set": ')])
    assert ids_in(stopped) == ids_in(run.folder / "out")


def test_different_output_fails_the_run(run, capsys):
    broken = run.folder / "broken"
    shutil.copytree(run.folder / "out", broken)
    answers = [json.loads(line) for line in (broken / "answers.jsonl").read_text().splitlines()]
    ids = next(a for a in answers if a["method"] == "eagle3" and a["temperature"] == 0)["turns"][0]["ids"]
    ids[2] = (ids[2] + 1) % 256
    (broken / "answers.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    assert run.go(out="broken") == 1
    printed = capsys.readouterr()
    assert "eagle3 differs from plain decoding" in printed.err and "token 2" in printed.err
    (difference,) = json.loads((broken / "differences.json").read_text())
    assert difference["tie"] is False and difference["gap"] > difference["bound"]
