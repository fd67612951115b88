"""evaluate.py on the golden target: losslessness, the files it writes, going on."""
import json
import shutil

import pytest

import evaluate
from engine.api import Drafting, load_target
from engine.calibration import Calibration
from engine.runtime import Runtime
from evaluation import session
from evaluation.answers import Answer
from evaluation.methods import load_contenders
from tree import TreeShape

# In one group, the run that most tests begin with is made once.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(golden, tmp_path_factory):
    """A complete run on the golden target: two small sets, both temperatures."""
    folder = tmp_path_factory.mktemp("evaluate")
    questions = folder / "questions"
    questions.mkdir()
    (questions / "one.jsonl").write_text(
        '{"question_id": 81, "category": "c", "turns": ["what is 3?", "and 4?"]}\n{"turns": ["say 5"]}\n'
    )
    (questions / "two.jsonl").write_text('{"question_id": "x", "turns": ["count to 7"]}\n')

    def go(*extra: str, out="out") -> int:
        return evaluate.main([
            "--checkpoint", str(golden), "--out", str(folder / out), "--questions", str(questions),
            "--no-compile", "--threads", "1", "--max-new-tokens", "24", "--temperature", "0,1",
            "--speculate", "eagle3,eagle2", "--dtype", "fp32", *extra,
        ])

    assert go("--show-tree", "--observe", "2") == 0
    return folder, go


def answers_in(folder) -> list[Answer]:
    lines = (folder / "answers.jsonl").read_bytes().splitlines()
    return [Answer.read(line, "here") for line in lines]


def rows_in(folder) -> list[dict]:
    return json.loads((folder / "table.json").read_text())


def stop_after(calls: int, monkeypatch) -> None:
    """Press Ctrl-C when a run has asked so many questions, the ones it warms up with included."""
    ask, numbers = session.ask, iter(range(1000))

    def stops(*args):
        if next(numbers) == calls:
            raise KeyboardInterrupt
        return ask(*args)

    monkeypatch.setattr(session, "ask", stops)


def test_a_run_is_lossless_and_complete(run):
    folder, _ = run
    rows = rows_in(folder / "out")
    assert {(r["temperature"], r["method"], r["set"]) for r in rows} == {
        (t, m, s) for t in (0.0, 1.0) for m in ("none", "eagle3", "eagle2") for s in ("one", "two", "mean")
    }
    assert all(r["errors"] == r["ties"] == 0 and r["equal"] == r["questions"] for r in rows)
    assert all(r["tau"] == 1 for r in rows if r["method"] == "none") and all(r["tau"] >= 1 for r in rows)
    assert json.loads((folder / "out" / "differences.json").read_text()) == []
    for name in ("sets", "lengths", "acceptance", "calibration", "tree"):
        assert (folder / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert "Temperature 1" in (folder / "out" / "table.md").read_text()
    assert (folder / "out" / "table.csv").stat().st_size > 200


def test_its_answers_are_fastchats(run):
    """Read as EAGLE's and Spec-Bench's scripts do: every line has choices[0] with the lists they divide."""
    folder, _ = run
    files = sorted((folder / "out" / "answers").glob("*/*.jsonl"))
    assert [f"{f.parent.name}/{f.name}" for f in files] == [
        f"{s}/{m}-t{t}.jsonl" for s in ("one", "two") for m in ("eagle2", "eagle3", "none") for t in (0, 1)
    ]
    speeds, lengths = [], []
    for line in (folder / "out" / "answers" / "one" / "eagle3-t0.jsonl").read_text().splitlines():
        choice = json.loads(line)["choices"][0]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths += choice["accept_lengths"]
        counts = {len(choice[name]) for name in ("turns", "new_tokens", "wall_time", "idxs")}
        assert len(counts) == 1
        assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
        assert choice["new_tokens"][0] - 1 == sum(choice["accept_lengths"][: choice["idxs"][0]])
    assert len(speeds) == 2 and min(speeds) > 0 and sum(lengths) / len(lengths) >= 1
    first = json.loads((folder / "out" / "answers" / "one" / "none-t0.jsonl").read_text().splitlines()[0])
    assert first["question_id"] == 81 and len(first["choices"][0]["turns"]) == 2
    assert first["model_id"] == "none-t0"


def test_a_stopped_run_prints_what_it_has_and_goes_on(run, monkeypatch, capsys):
    folder, go = run
    with monkeypatch.context() as patch:
        stop_after(12, patch)
        assert go("--observe", "0", out="stopped") == 130
    printed = capsys.readouterr()
    assert "| eagle3 |" in printed.out and "the same command goes on" in printed.err
    assert "the table so far:" in printed.err
    with open(folder / "stopped" / "answers.jsonl", "a") as file:
        file.write('{"set": "one", "ques')  # as a kill may leave it
    before = (folder / "stopped" / "answers.jsonl").read_text().splitlines()[:3]
    assert go("--observe", "0", out="stopped") == 0
    lines = (folder / "stopped" / "answers.jsonl").read_text().splitlines()
    assert lines[:3] == before and len(lines) == 3 * 3 * 2
    complete, resumed = (
        {a.key: [t.ids for t in a.turns] for a in answers_in(folder / name)} for name in ("out", "stopped")
    )
    assert complete == resumed
    assert go("--max-new-tokens", "9", out="stopped") == 1
    assert "other options (max_new_tokens)" in capsys.readouterr().err


def test_a_run_that_fails_prints_what_it_has(run, monkeypatch, capsys):
    """Stopped before the first question there is no table, not even the title of one."""
    _, go = run

    def fails(*args):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(session, "ask", fails)
    assert go("--observe", "0", out="failed") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert lines[-3:] == ["error: out of memory", "the table so far:", "no answers yet"]

    def stops(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "load", stops)
    assert go(out="failed") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped (the same command goes on)"


def test_a_text_that_differs_fails_the_run(run, capsys):
    folder, go = run
    shutil.copytree(folder / "out", folder / "broken")
    path = folder / "broken" / "answers.jsonl"
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = next(a for a in answers if a["method"] == "eagle3" and a["temperature"] == 0)
    wrong["turns"][0]["ids"][2] = (wrong["turns"][0]["ids"][2] + 1) % 256
    path.write_text("".join(json.dumps(a) + "\n" for a in answers))
    assert go("--observe", "0", out="broken") == 1
    printed = capsys.readouterr()
    assert "eagle3 leaves the plain text" in printed.err and "token 2" in printed.err
    (difference,) = json.loads((folder / "broken" / "differences.json").read_text())
    assert difference["tie"] is False and difference["gap"] > difference["bound"]


def test_what_is_compared_is_answered_in_one_round(run, capsys):
    """Another method, another question under the same id: everything about that question is asked again."""
    folder, go = run
    more = folder / "more"
    shutil.copytree(folder / "out", more)
    times = {a.key: a.seconds for a in answers_in(more)}
    assert go("--observe", "0", "--speculate", "eagle3,eagle2,eagle", out="more") == 0
    answers = answers_in(more)
    assert len(answers) == 4 * 3 * 2 and all(times.get(a.key) != a.seconds for a in answers)
    file = folder / "questions" / "two.jsonl"
    text = file.read_text()
    file.write_text('{"question_id": "x", "turns": ["something else"]}\n')
    try:
        assert go("--observe", "0", "--speculate", "eagle3,eagle2,eagle", out="more") == 0
    finally:
        file.write_text(text)
    times = {a.key: a.seconds for a in answers}
    assert {a.set for a in answers_in(more) if a.seconds != times.get(a.key)} == {"two"}


def test_no_stale_answer_is_reported(run, monkeypatch, capsys):
    """If the questions have changed and the run is stopped, the table holds only answers to the new ones."""
    folder, go = run
    shutil.copytree(folder / "out", folder / "stale")
    file = folder / "questions" / "one.jsonl"
    text = file.read_text()
    file.write_text(text.replace("what is 3?", "what is 9?").replace("say 5", "say 6"))
    stop_after(7, monkeypatch)
    try:
        assert go("--observe", "0", "--temperature", "0", out="stale") == 130
    finally:
        file.write_text(text)
    assert "1 questions have no answer" in capsys.readouterr().out
    rows = rows_in(folder / "stale")
    for name in ("one", "two"):
        assert {r["questions"] for r in rows if r["set"] == name} == {1}


def test_a_question_that_does_not_fit_is_left_out(golden, tmp_path, capsys):
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"turns": ["x" * 300]}) + '\n{"turns": ["short"]}\n')
    argv = ["--checkpoint", str(golden), "--out", str(tmp_path / "o"), "--questions", str(questions)]
    argv += ["--no-compile", "--threads", "1"]
    assert evaluate.main([*argv, "--max-seq-len", "100", "--max-new-tokens", "9", "--observe", "0"]) == 0
    words = "question 0: turn 1 does not fit in 100 tokens; the question is left out"
    assert words in capsys.readouterr().err
    assert all(row["questions"] == 1 for row in rows_in(tmp_path / "o"))
    questions.write_text('{"question_id": 1, "turns": ["a"]}\n{"turns": ["b"]}\n')
    assert evaluate.main(argv) == 1
    assert "question_id 1 is there twice" in capsys.readouterr().err


def test_one_target_for_all_methods_and_one_report_for_what_is_asked(run, golden, capsys):
    folder, go = run
    target = load_target(golden, Runtime(dtype="fp32", compile=False))
    draftings = {name: Drafting(name) for name in ("none", "eagle3", "eagle", "lookup")}
    contenders = load_contenders(target, draftings, None)
    assert len({id(c.model.decoder.target) for c in contenders.values()}) == 1 and len(contenders) == 4
    assert len({c.identity for c in contenders.values()}) == 4
    assert go("--limit", "1", "--observe", "0") == 0  # of the answers in the folder, only those asked for now
    assert "| eagle3 |" in capsys.readouterr().out
    assert {r["questions"] for r in rows_in(folder / "out") if r["set"] != "mean"} == {1}
    assert go("--observe", "0") == 0
    assert {r["questions"] for r in rows_in(folder / "out") if r["set"] == "one"} == {2}


def test_texts_of_joint_trees_are_judged_too(run):
    folder, go = run
    assert go("--speculate", "lookup+eagle3", "--observe", "0", out="joint") == 0
    joint = [row for row in rows_in(folder / "joint") if row["method"] == "lookup+eagle3"]
    assert {row["temperature"] for row in joint} == {0.0, 1.0}
    assert all(row["equal"] == row["questions"] and row["errors"] == 0 for row in joint)


def test_other_rules_are_named_and_not_judged(run, golden, capsys):
    folder, go = run
    draft = [
        "--speculate", "eagle3,draft-model", "--draft", f"draft-model={golden}",
        "--tree", "draft-model=5,3,1", "--observe", "0",
    ]
    assert go(*draft, "--accept", "draft-model=residual", out="rules") == 0
    greedy, warm = (folder / "rules" / "table.md").read_text().split("Temperature 1")
    assert "other draws" not in greedy and "| draft-model+residual |" in greedy and "3/3" in greedy
    assert "other draws" in warm
    rows = rows_in(folder / "rules")
    assert {r["equal"] for r in rows if r["temperature"] and "+" in r["method"]} == {None}
    for wrong, message in {
        "--accept eagle3=never": "choose from", "--accept residual": "of which method",
        "--tree lookup=4,1,2": "none of",
    }.items():
        assert go(*draft, *wrong.split(), out="no") == 1 and message in capsys.readouterr().err


def test_calibrating_a_head(golden, tmp_path, capsys):
    """On the questions' own answers; what is written is what `--tree auto` goes by."""
    shutil.copytree(golden, tmp_path / "t")
    (tmp_path / "one.jsonl").write_text('{"turns": ["what is 3?"]}\n{"turns": ["count to 7"]}\n')
    assert evaluate.main([
        "--checkpoint", str(tmp_path / "t"), "--out", str(tmp_path / "out"), "--questions", str(tmp_path),
        "--no-compile", "--threads", "1", "--max-new-tokens", "40", "--observe", "0", "--calibrate",
        "--speculate", "eagle3,lookup",
    ]) == 0
    head = tmp_path / "t" / "eagle3"
    assert f"wrote {head / 'calibration.json'}" in capsys.readouterr().err
    known = Calibration.read(head)
    taus = known.taus[0.0]
    assert len(known.ease) <= 2 and taus[TreeShape(60, 7, 10)] > taus[TreeShape(2, 0, 1)]
