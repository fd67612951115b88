"""evaluate.py on the golden target: losslessness, its files, going on, two ranks, refusals."""
import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.blocks import published
from helpers.heads import write_head

import evaluate
from checkpoint.convert import convert
from checkpoint.loading import load_model
from drafters import rest
from engine.autotune import Calibration
from evaluation import session
from evaluation.answers import Answer
from tree import TreeShape

pytestmark = pytest.mark.slow
TREES = ["--tree", "eagle3=8,2,3", "--tree", "eagle2=8,2,3"]  # else their acceptance is measured first


@pytest.fixture(scope="module")
def run(golden, tmp_path_factory):
    """A complete run of two small sets at both temperatures: its folder, and a function that runs again."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "questions").mkdir()
    (folder / "questions" / "one.jsonl").write_text(
        '{"question_id": 81, "category": "c", "turns": ["what is 3?", "and 4?"]}\n{"turns": ["say 5"]}\n'
    )
    (folder / "questions" / "two.jsonl").write_text('{"question_id": "x", "turns": ["count to 7"]}\n')

    def go(*more: str, out="out", plan=("--speculate", "eagle3,eagle2", *TREES)) -> int:
        argv = [
            "--checkpoint", golden, "--out", folder / out, "--questions", folder / "questions",
            "--threads", 1, "--max-new-tokens", 24, "--temperature", "0,1", "--dtype", "fp32", "--observe", 0,
            *plan, *more,
        ]
        return evaluate.main(["--no-compile", *map(str, argv)])

    assert go("--show-tree", "--observe", "2") == 0
    return folder, go


def answers_in(folder) -> dict[tuple, Answer]:
    lines = (folder / "answers.jsonl").read_bytes().splitlines()
    return {answer.key: answer for answer in (Answer.read(line, "here") for line in lines)}


def ids_in(folder) -> dict[tuple, list]:
    return {key: [turn.ids for turn in a.turns] for key, a in answers_in(folder).items()}


def rows_in(folder) -> list[dict]:
    return json.loads((folder / "table.json").read_text())


def stop_after(calls: int, monkeypatch, error: BaseException = KeyboardInterrupt()) -> None:
    """Raise an error, Ctrl-C by default, after so many questions, those of the warm-up included."""
    ask, numbers = session.ask, iter(range(1000))

    def stops(*args):
        if next(numbers) == calls:
            raise error
        return ask(*args)

    monkeypatch.setattr(session, "ask", stops)


def test_a_run_is_lossless_and_complete(run):
    out = run[0] / "out"
    rows = rows_in(out)
    assert {(r["temperature"], r["method"], r["set"]) for r in rows} == {
        (t, m, s) for t in (0.0, 1.0) for m in ("none", "eagle3", "eagle2") for s in ("one", "two", "mean")
    }
    assert all(r["errors"] == r["ties"] == 0 and r["equal"] == r["questions"] for r in rows)
    assert all(r["tau"] == 1 for r in rows if r["method"] == "none")
    assert all(r["tau"] > 1 for r in rows if r["method"] == "eagle3" and r["set"] == "mean")
    assert json.loads((out / "differences.json").read_text()) == []
    for name in ("sets", "lengths", "acceptance", "calibration", "tree"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert "Temperature 1" in (out / "table.md").read_text()
    assert len((out / "table.csv").read_text().splitlines()) == 1 + len(rows)


def test_its_answers_are_fastchats(run):
    """Read as EAGLE's and Spec-Bench's scripts do: every line has choices[0] with the lists they divide."""
    answers = run[0] / "out" / "answers"
    assert sorted(f"{f.parent.name}/{f.name}" for f in answers.glob("*/*.jsonl")) == [
        f"{s}/{m}-t{t}.jsonl" for s in ("one", "two") for m in ("eagle2", "eagle3", "none") for t in (0, 1)
    ]
    rows = [json.loads(line) for line in (answers / "one" / "eagle3-t0.jsonl").read_text().splitlines()]
    assert [(row["question_id"], row["model_id"]) for row in rows] == [(81, "eagle3-t0"), (1, "eagle3-t0")]
    for row, turns in zip(rows, (2, 1)):
        choice = row["choices"][0]
        assert all(len(choice[n]) == turns for n in ("turns", "new_tokens", "wall_time", "idxs"))
        assert min(choice["wall_time"]) > 0
        assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
        assert choice["new_tokens"][0] - 1 == sum(choice["accept_lengths"][: choice["idxs"][0]])


def test_a_stopped_run_prints_what_it_has_and_goes_on(run, monkeypatch, capsys):
    folder, go = run
    with monkeypatch.context() as patch:
        stop_after(12, patch)
        assert go(out="stopped") == 130
    printed = capsys.readouterr()
    assert "\neagle3  " in printed.out and "have no answer" in printed.out
    assert "the same command goes on" in printed.err and "the table so far:" in printed.err
    with open(folder / "stopped" / "answers.jsonl", "a") as file:
        file.write('{"set": "one", "ques')  # as a kill may leave it
    before = (folder / "stopped" / "answers.jsonl").read_text().splitlines()[:3]
    assert go(out="stopped") == 0
    assert (folder / "stopped" / "answers.jsonl").read_text().splitlines()[:3] == before
    assert ids_in(folder / "stopped") == ids_in(folder / "out")
    assert go("--max-new-tokens", "9", out="stopped") == 1
    assert "other options (max_new_tokens)" in capsys.readouterr().err


def test_a_run_that_fails_at_once_has_no_table(run, monkeypatch, capsys):
    _, go = run
    stop_after(0, monkeypatch, RuntimeError("broken\nhere"))
    assert go(out="failed") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert lines[-3:] == ["error: broken here", "the table so far:", "no answers yet"]


def test_a_text_that_differs_fails_the_run(run, capsys):
    folder, go = run
    shutil.copytree(folder / "out", folder / "broken")
    path = folder / "broken" / "answers.jsonl"
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = next(a for a in answers if a["method"] == "eagle3" and a["temperature"] == 0)
    wrong["turns"][0]["ids"][2] = (wrong["turns"][0]["ids"][2] + 1) % 256
    path.write_text("".join(json.dumps(a) + "\n" for a in answers))
    assert go(out="broken") == 1
    printed = capsys.readouterr()
    assert "eagle3 leaves the plain text" in printed.err and "token 2" in printed.err
    (difference,) = json.loads((folder / "broken" / "differences.json").read_text())
    assert difference["tie"] is False and difference["gap"] > difference["bound"]


def test_only_answers_of_one_round_are_compared(run, monkeypatch, capsys):
    """A new question under an old id, or fewer methods: what is old is neither asked again nor reported."""
    folder, go = run
    shutil.copytree(folder / "out", folder / "changed")
    old, file = answers_in(folder / "changed"), folder / "questions" / "one.jsonl"
    text = file.read_text()
    file.write_text(text.replace("say 5", "say 6"))
    try:
        with monkeypatch.context() as patch:
            stop_after(3 * 2, patch)  # only warmed up
            assert go(out="changed") == 130
        assert "1 questions have no answer" in capsys.readouterr().out
        assert {r["questions"] for r in rows_in(folder / "changed") if r["set"] == "one"} == {1}
        assert go(out="changed") == 0
    finally:
        file.write_text(text)
    new = answers_in(folder / "changed")
    assert new.keys() == old.keys()
    assert {key[:2] for key in new if new[key].seconds != old[key].seconds} == {("one", 1)}
    assert go("--limit", "1", out="changed") == 0  # the folder holds more
    assert {r["questions"] for r in rows_in(folder / "changed") if r["set"] != "mean"} == {1}


def test_a_question_that_does_not_fit_is_left_out(run, tmp_path, capsys):
    _, go = run
    (tmp_path / "q.jsonl").write_text(json.dumps({"turns": ["x" * 300]}) + '\n{"turns": ["short"]}\n')
    few = "--max-seq-len", "100", "--max-new-tokens", "9"
    assert go("--questions", tmp_path, *few, out=tmp_path / "o") == 0
    words = "question 0: turn 1 does not fit in 100 tokens; the question is left out"
    assert words in capsys.readouterr().err
    assert all(row["questions"] == 1 for row in rows_in(tmp_path / "o"))


def test_every_method(run, golden, tmp_path):
    """Heads that draft blocks are random. The drafts of `residual` are drawn: its texts may differ."""
    target = tmp_path / "target"
    shutil.copytree(golden, target)
    for kind in ("p-eagle", "dflash", "dspark"):
        head = write_head(tmp_path / kind, *published(kind, load_model(golden)[0]))
        convert(head, target=target, quiet=True)
    (tmp_path / "text").write_text("the tide comes in and the tide goes out")
    assert rest.main(["build", "--checkpoint", str(target), "--out", str(tmp_path / "store"),
                      str(tmp_path / "text")]) == 0
    grown = ["eagle3", "eagle2", "p-eagle", "dflash", "dspark", "lookup+eagle3"]
    methods = [*grown, "eagle", "draft-model", "lookahead", "lookup", "rest"]
    trees = [f"--tree={name}=5,3,2" for name in grown]
    plan = [
        "--checkpoint", target, "--speculate", ",".join(methods), "--datastore", tmp_path / "store",
        "--draft", f"draft-model={golden}", "--accept", "draft-model=residual", "--tree", "draft-model=5,3,1",
        *trees, "--limit", "1", "--max-new-tokens", "8", "--observe", "1",
    ]
    assert run[1](plan=plan, out=tmp_path / "out") == 0
    rows = rows_in(tmp_path / "out")
    labels = {name if name != "draft-model" else "draft-model+residual" for name in methods}
    assert {r["method"] for r in rows} == labels | {"none"}
    for row in rows:
        drawn = row["temperature"] and row["method"] == "draft-model+residual"
        assert row["equal"] == (None if drawn else row["questions"]), row
    assert "other draws" in (tmp_path / "out" / "table.md").read_text()


def test_calibrating_a_head(golden, tmp_path, capsys):
    """On the questions' own answers; --tree auto reads what is written."""
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


def test_two_ranks_answer_as_one_process_does(run, golden):
    folder, _ = run
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [
        "--checkpoint", str(golden), "--out", str(folder / "two"), "--questions", str(folder / "questions"),
        "--no-compile", "--threads", "1", "--max-new-tokens", "24", "--temperature", "0,1", "--dtype", "fp32",
        "--speculate", "eagle3", "--tree", "8,2,3", "--observe", "1",
    ]

    def together() -> subprocess.CompletedProcess:
        return subprocess.run([*launch, "evaluate.py", *options], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)

    first = together()
    assert first.returncode == 0, first.stderr[-3000:]
    alone = {key: ids for key, ids in ids_in(folder / "out").items() if key[2] != "eagle2"}
    assert ids_in(folder / "two") == alone and first.stdout.count("Temperature 1") == 1
    assert (folder / "two" / "acceptance.png").exists()
    before = (folder / "two" / "answers.jsonl").read_text()
    assert together().returncode == 0  # nothing is left to ask
    assert (folder / "two" / "answers.jsonl").read_text() == before


REFUSED = {  # id: what the error says, and the option that is changed
    "unknown method": ("unknown; choose from", "--speculate", "eagle9"),
    "checkpoint that is not there": ("not a folder", "--checkpoint", "{folder}/nothing"),
    "temperature in words": ("--temperature hot: could not", "--temperature", "hot"),
    "temperature below 0": ("temperature must be", "--temperature", "0,-1"),
    "limit 0": ("--limit 0: must be", "--limit", "0"),
    "observe -1": ("--observe -1: must be", "--observe", "-1"),
    "no new tokens": ("--max-new-tokens 0: must be", "--max-new-tokens", "0"),
    "too long": ("--max-seq-len 1000000: must be 2 to 1024", "--max-seq-len", "1000000"),
    "questions that are not there": ("--questions {folder}/none.jsonl: no such file", "--questions",
                                     "{folder}/none.jsonl"),
    "folder without questions": ("holds no question files", "--questions", "{folder}/empty"),
    "question twice": ("question_id 1 is there twice", "--questions", "{folder}/twice.jsonl"),
    "unknown tree": ("none of auto, paper", "--tree", "bush"),
    "flag of another method": ("--window belongs to --speculate lookahead", "--window", "3"),
    "another run": ("other options (figures, seed)", "--out", "{folder}/older"),
    "head that is not there": ("{folder}/no: n", "--draft", "{folder}/no"),
    "calibrating a head that is none": ("no head that grows trees", "--speculate", "lookup --calibrate"),
    "no chat template": ("need a tokenizer and a chat template", "--checkpoint", "{folder}/mute"),
}


@pytest.fixture(scope="module")
def folder(run, golden, tmp_path_factory):
    """Mistakes of all kinds."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").mkdir()
    (folder / "twice.jsonl").write_text('{"question_id": 1, "turns": ["a"]}\n{"turns": ["b"]}\n')
    shutil.copytree(golden, folder / "mute", ignore=shutil.ignore_patterns("*token*"))
    (folder / "older").mkdir()
    options = json.loads((run[0] / "out" / "options.json").read_text())
    del options["figures"]
    (folder / "older" / "options.json").write_text(json.dumps(options | {"seed": 1}))
    return folder


@pytest.mark.parametrize("words, flag, value", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_line_and_writes_nothing(run, folder, tmp_path, capsys, words, flag, value):
    words, value = (text.format(folder=folder) for text in (words, value))
    assert run[1](flag, *value.split(), plan=(), out=tmp_path / "out") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and words in lines[0], lines
    assert not (tmp_path / "out").exists()
