"""evaluate.py: the figures it prints, what it calls an error, that it goes on, and that others can read what
it writes.
"""
import dataclasses
import json
import shutil

import pytest
import torch

import evaluate
from checkpoint.loading import load_model
from common.errors import InputError
from evaluation import pictures, session
from evaluation.lossless import TIE, Judge, first_difference
from evaluation.runs import Answer, Turn, read_sets, rounds
from evaluation.table import as_csv, markdown, summarise
from tree import Tree, chain


def turn(ids, lengths=(), seconds=1.0, prompt=(1, 2)) -> Turn:
    return Turn(list(prompt), list(ids), "text", "length", 0.5, seconds, list(lengths))


def answer(question, method, turns, temperature=0.0, name="set") -> Answer:
    return Answer(name, question, "", method, temperature, 0, "", turns)


def test_the_table_is_the_arithmetic_of_the_answers():
    answers = [
        answer(1, "none", [turn(range(11), [1] * 10, 2.0)]),
        answer(2, "none", [turn(range(21), [1] * 20, 2.0)]),
        answer(1, "eagle3", [turn(range(11), [5, 5], 1.0)]),
        answer(2, "eagle3", [turn(range(21), [2] * 10, 0.5)]),
        answer(1, "none", [turn(range(5), [1] * 4, 1.0)], name="other"),
        answer(1, "eagle3", [turn(range(5), [4], 0.5)], name="other"),
        answer(9, "eagle3", [turn(range(5), [4], 0.5)]),  # whose plain answer is not there yet
    ]
    rows = {(r["method"], r["set"]): r for r in summarise(answers, ["set", "other"], ["none", "eagle3"], [])}
    mine = rows["eagle3", "set"]
    assert mine["questions"] == mine["equal"] == 2 and mine["tau"] == pytest.approx(30 / 12)
    assert mine["speedup"] == pytest.approx((2 + 4) / 2) and mine["speedup_total"] == pytest.approx(
        (30 / 1.5) / (30 / 4)
    )
    assert rows[
        "eagle3", "mean"
    ]["tau"] == pytest.approx((2.5 + 4) / 2) and rows["none", "set"]["speedup"] == 1
    assert mine["seconds"] == 1.5 and mine["prefill_seconds"] == 1.0
    text = markdown([*rows.values()], ["set", "other"])
    assert "| eagle3 | 3.00× | 2.50 | 2.00× | 4.00 |" in text and "3/3 | 0 | 0 |" in text
    assert as_csv([*rows.values()]).splitlines()[0].startswith("temperature,method,set,questions")


def test_where_answers_part():
    plain = answer(1, "none", [turn([1, 2, 3]), turn([4, 5])])
    assert first_difference(plain, answer(1, "x", [turn([1, 2, 3]), turn([4, 5])])) is None
    assert first_difference(plain, answer(1, "x", [turn([1, 9, 3]), turn([7])])) == (0, 1)
    assert first_difference(plain, answer(1, "x", [turn([1, 2, 3]), turn([4])])) == (1, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_and_errors(golden, temperature):
    """A token that is within rounding of the best is a tie, one that is not an error, an early end always."""
    from engine.decoder import Decoder
    from sampling.options import Sampling

    target, _ = load_model(golden)
    prompt = list(b"u:question 3\na:")
    ids = Decoder(target, compile=False, max_seq_len=64).generate(
        [prompt], Sampling(6, temperature, seed=4)
    )[0].ids
    plain = dataclasses.replace(answer(1, "none", [turn(ids, prompt=prompt)], temperature), seed=4)

    def judged(judge: Judge, other_ids: list[int]):
        return judge.difference(
            plain, dataclasses.replace(plain, method="eagle3", turns=[turn(other_ids, prompt=prompt)])
        )

    judge = Judge(str(golden), torch.bfloat16, "cpu")
    assert judged(judge, ids) is None
    found = [judged(judge, [*ids[:3], token, *ids[4:]]) for token in range(256) if token != ids[3]]
    assert len(found) > 200 and all((d.turn, d.token, d.plain) == (0, 3, ids[3]) for d in found)
    assert all(d.gap > 0 for d in found)  # the plain token is the best in float32
    assert any(not d.tie for d in found) and all(d.tie == (d.gap <= d.bound) for d in found)
    judge.share = 100.0
    assert judged(judge, [*ids[:3], ids[3] + 1, *ids[4:]]).tie
    exact = Judge(str(golden), torch.bfloat16, "cpu", exact=True)
    assert not judged(exact, [*ids[:3], ids[3] + 1, *ids[4:]]).tie  # on our kernels nothing is excused
    assert not judged(judge, ids[:3]).tie and set(TIE) == {torch.bfloat16, torch.float16, torch.float32}


def test_our_questions_are_whole():
    sets = read_sets(None, None)
    assert set(sets) == {
        "writing", "code", "math", "summary", "translation", "qa"
    } and all(len(q) == 8 for q in sets.values())
    ids = [q["question_id"] for questions in sets.values() for q in questions]
    assert len(set(ids)) == 48 and any(len(q["turns"]) > 1 for questions in sets.values() for q in questions)
    order = list(rounds({k: v[:3] for k, v in sets.items()}, [0.0, 1.0], ["none", "a", "b"]))
    assert len(order) == 36 and {name for name, *_ in order[:12]} == set(sets)
    # In each cell of the table every method begins once.
    for cell in {(name, temperature) for name, _, temperature, _ in order}:
        assert sorted(
            methods[0] for name, _, temperature, methods in order if (name, temperature) == cell
        ) == ["a", "b", "none"]


@pytest.fixture(scope="module")
def run(golden, tmp_path_factory):
    """A whole run on the golden target: two small sets, both temperatures."""
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
            "--no-compile", "--threads", "1",
            "--max-new-tokens", "24", "--temperature", "0,1", "--speculate", "eagle3,eagle2", "--dtype",
            "fp32", *extra,
        ])

    assert go("--show-tree", "--observe", "2") == 0
    return folder, go


def test_a_run_is_lossless_and_complete(run):
    folder, _ = run
    rows = json.loads((folder / "out" / "table.json").read_text())
    assert {(r["temperature"], r["method"], r["set"]) for r in rows} == {
        (t, m, s) for t in (0.0, 1.0) for m in ("none", "eagle3", "eagle2") for s in ("one", "two", "mean")
    }
    assert all(r["errors"] == r["ties"] == 0 and r["equal"] == r["questions"] for r in rows)
    assert all(r["tau"] == 1 for r in rows if r["method"] == "none") and all(r["tau"] >= 1 for r in rows)
    assert json.loads((folder / "out" / "differences.json").read_text()) == []
    for name in ("sets", "lengths", "acceptance", "calibration", "tree"):
        assert (folder / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert "Temperature 1" in (folder / "out" / "table.md").read_text() and (
        folder / "out" / "table.csv"
    ).stat().st_size > 200


def test_its_answers_are_fastchats(run):
    """Read as EAGLE's and Spec-Bench's scripts do: every line has choices[0] with the lists they divide."""
    folder, _ = run
    files = sorted((folder / "out" / "answers").glob("*/*.jsonl"))
    assert [f"{f.parent.name}/{f.name}" for f in files] == [
        f"{s}/{m}-t{t}.jsonl" for s in ("one", "two") for m in ("eagle2", "eagle3", "none") for t in (0, 1)
    ]
    speeds, lengths = [], []
    for line in (folder / "out" / "answers" / "one" / "eagle3-t0.jsonl").read_text().splitlines():
        data = json.loads(line)
        choice = data["choices"][0]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths += choice["accept_lengths"]
        assert len(choice["turns"]) == len(
            choice["new_tokens"]
        ) == len(choice["wall_time"]) == len(choice["idxs"])
        assert sum(choice["decoding_steps"]) == len(choice["accept_lengths"])
        assert all(
            n - 1 == sum(part) for n,
            part in [(choice["new_tokens"][0], choice["accept_lengths"][: choice["idxs"][0]])]
        )
    assert len(speeds) == 2 and min(speeds) > 0 and sum(lengths) / len(lengths) >= 1
    first = json.loads((folder / "out" / "answers" / "one" / "none-t0.jsonl").read_text().splitlines()[0])
    assert first["question_id"] == 81 and len(
        first["choices"][0]["turns"]
    ) == 2 and first["model_id"] == "none-t0"


def test_a_stopped_run_prints_what_it_has_and_goes_on(run, monkeypatch, capsys):
    folder, go = run
    original, calls = session.ask, iter(range(1000))

    def stops(*args):
        if next(calls) == 12:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(session, "ask", stops)
    assert go("--observe", "0", out="stopped") == 130
    said = capsys.readouterr()
    assert "| eagle3 |" in said.out and "the same command goes on" in said.err
    with open(folder / "stopped" / "answers.jsonl", "a") as file:
        file.write('{"set": "one", "ques')  # as a kill may leave it
    kept = (folder / "stopped" / "answers.jsonl").read_text().splitlines()[:3]
    assert go("--observe", "0", out="stopped") == 0
    lines = (folder / "stopped" / "answers.jsonl").read_text().splitlines()
    assert lines[:3] == kept and len(lines) == 3 * 3 * 2
    whole = {
        Answer.read(x).key: [t.ids for t in Answer.read(x).turns]
        for x in (folder / "out" / "answers.jsonl").read_text().splitlines()
    }
    assert whole == {Answer.read(x).key: [t.ids for t in Answer.read(x).turns] for x in lines}
    assert go("--max-new-tokens", "9", out="stopped") == 1
    assert "other options (max_new_tokens)" in capsys.readouterr().err


def test_a_text_that_differs_fails_the_run(run, capsys):
    folder, go = run
    shutil.copytree(folder / "out", folder / "broken")
    path = folder / "broken" / "answers.jsonl"
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = next(a for a in answers if a["method"] == "eagle3" and a["temperature"] == 0)
    wrong["turns"][0]["ids"][2] = (wrong["turns"][0]["ids"][2] + 1) % 256
    path.write_text("".join(json.dumps(a) + "\n" for a in answers))
    assert go("--observe", "0", out="broken") == 1
    said = capsys.readouterr()
    assert "eagle3 leaves the plain text" in said.err and "token 2" in said.err
    (found,) = json.loads((folder / "broken" / "differences.json").read_text())
    assert found["tie"] is False and found["gap"] > found["bound"]


def test_bad_input_is_one_line(golden, tmp_path, capsys):
    def refused(words: str, **changes) -> None:
        given = {"checkpoint": golden, "out": tmp_path / "out", "limit": 1, **changes}
        assert evaluate.main(
            ["--no-compile", *(str(x) for k, v in given.items() for x in (f"--{k.replace('_', '-')}", v))]
        ) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and words in lines[0], lines

    refused("unknown; choose from", speculate="eagle9")
    refused("not a folder", checkpoint=tmp_path / "nothing")
    refused("--temperature", temperature="hot")
    refused("temperature must be", temperature="0,-1")
    refused("--limit", limit=0)
    refused("--threads", threads=0)
    refused("max_new_tokens", max_new_tokens=0)
    refused("cannot be read", questions=tmp_path / "none.jsonl")
    (tmp_path / "empty").mkdir()
    refused("holds no question files", questions=tmp_path / "empty")
    refused("none of auto, paper", tree="bush")
    refused("no draft head", draft=tmp_path / "no")


def test_steps_are_counted_where_a_node_had_a_chance():
    parent = torch.tensor([[0, 0, 0, 1, 1, 2]])
    tree = Tree(torch.arange(6)[None], parent, torch.tensor([[0, 1, 1, 2, 2, 2]]), torch.eye(6)[None].bool(),
                torch.log(torch.tensor([[1.0, 0.65, 0.25, 0.65 * 0.55, 0.65 * 0.15, 0.25 * 0.85]])))
    seen = pictures.Observed()
    seen.see(tree, torch.tensor([[0, 1, 0]]))
    assert seen.depth == {1: [1, 1], 2: [1, 0]} and seen.rank == {1: [2, 1], 2: [2, 0]}
    tried = {i: cell[:2] for i, cell in enumerate(seen.confidence) if cell[0]}
    assert tried == {6: [1, 1], 2: [1, 0], 5: [1, 0], 1: [1, 0]}
    shown = pictures.text_tree(seen.best, lambda token: f"w{token}")
    assert shown.splitlines()[:3] == ["● 'w0'", "├─● 'w1' 0.65", "│  ├─○ 'w3' 0.55"]
    seen.see(chain(torch.tensor([[5]])), torch.tensor([[0]]))  # a bare root has nothing to count
    assert seen.depth == {1: [1, 1], 2: [1, 0]}


def test_what_is_compared_is_answered_in_one_round(run, capsys):
    """Another method, another question under the same id: everything about that question is asked again."""
    folder, go = run
    shutil.copytree(folder / "out", folder / "more")
    times = {
        Answer.read(x).key: Answer.read(x).seconds
        for x in (folder / "more" / "answers.jsonl").read_text().splitlines()
    }
    assert go("--observe", "0", "--speculate", "eagle3,eagle2,eagle", out="more") == 0
    lines = [Answer.read(x) for x in (folder / "more" / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 3 * 2 and all(times.get(a.key) != a.seconds for a in lines)
    file = folder / "questions" / "two.jsonl"
    kept = file.read_text()
    file.write_text('{"question_id": "x", "turns": ["something else"]}\n')
    try:
        assert go("--observe", "0", "--speculate", "eagle3,eagle2,eagle", out="more") == 0
    finally:
        file.write_text(kept)
    again = {a.key: a for a in map(Answer.read, (folder / "more" / "answers.jsonl").read_text().splitlines())}
    changed = {
        key[0] for key, a in again.items() if a.seconds not in [b.seconds for b in lines if b.key == key]
    }
    assert changed == {"two"}


def test_no_stale_answer_is_reported(run, monkeypatch, capsys):
    """Stopped after the questions or the template have changed, the table holds only answers to what is asked
    now.
    """
    folder, go = run
    shutil.copytree(folder / "out", folder / "stale")
    file = folder / "questions" / "one.jsonl"
    kept, original, calls = file.read_text(), session.ask, iter(range(100))

    def stops(*args):
        if next(calls) == 7:
            raise KeyboardInterrupt
        return original(*args)

    file.write_text(kept.replace("what is 3?", "what is 9?").replace("say 5", "say 6"))
    monkeypatch.setattr(session, "ask", stops)
    try:
        assert go("--observe", "0", "--temperature", "0", out="stale") == 130
    finally:
        file.write_text(kept)
    assert "1 questions have no answer" in capsys.readouterr().out
    rows = json.loads((folder / "stale" / "table.json").read_text())
    assert {
        r["questions"] for r in rows if r["set"] == "one"
    } == {1} and {r["questions"] for r in rows if r["set"] == "two"} == {1}


def test_a_question_that_does_not_fit_is_left_out(golden, tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text(json.dumps({"turns": ["x" * 300]}) + '\n{"turns": ["short"]}\n')
    argv = [
        "--checkpoint", str(golden), "--out", str(tmp_path / "o"), "--questions", str(tmp_path / "q.jsonl"),
        "--no-compile"
    ]
    assert evaluate.main(
        [*argv, "--max-seq-len", "100", "--max-new-tokens", "9", "--observe", "0", "--threads", "1"]
    ) == 0
    assert "question 0: turn 1 does not fit in 100 tokens; the question is left out" in capsys.readouterr().err
    rows = json.loads((tmp_path / "o" / "table.json").read_text())
    assert all(row["questions"] == 1 for row in rows)
    (tmp_path / "q.jsonl").write_text('{"question_id": 1, "turns": ["a"]}\n{"turns": ["b"]}\n')
    assert evaluate.main([*argv, "--threads", "1"]) == 1
    assert "question_id 1 is there twice" in capsys.readouterr().err


def test_data_laid_out_in_folders(tmp_path):
    """SET/question.jsonl, as EAGLE and Spec-Bench have it; a file of that name alone is named by its folder
    too.
    """
    for name in ("gsm8k", "qa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "question.jsonl").write_text('{"turns": ["what is 3?"]}\n')
    assert [*read_sets(tmp_path, None)] == ["gsm8k", "qa"]
    assert [*read_sets(tmp_path / "qa" / "question.jsonl", None)] == ["qa"]
    (tmp_path / "qa.jsonl").write_text('{"turns": ["what is 4?"]}\n')
    with pytest.raises(InputError, match="qa"):
        read_sets(tmp_path, None)


def test_one_target_for_all_methods_and_one_report_for_what_is_asked(run, capsys):
    folder, go = run
    o = evaluate.parser().parse_args(["--checkpoint", str(folder.parent / "x"), "--out", "x"])
    o.checkpoint, o.dtype, o.compile = next(
        iter(json.loads((folder / "out" / "options.json").read_text()).items())
    )[1], "fp32", False
    models = evaluate.load_methods(o, ["eagle3", "eagle", "lookup"])
    assert len({id(m.decoder.target) for m in models.values()}) == 1 and len(models) == 4
    assert go("--limit", "1", "--observe", "0") == 0  # of what the folder holds, only what is asked now
    assert "| eagle3 |" in capsys.readouterr().out
    rows = json.loads((folder / "out" / "table.json").read_text())
    assert {r["questions"] for r in rows if r["set"] != "mean"} == {1}
    assert go("--observe", "0") == 0
    rows = json.loads((folder / "out" / "table.json").read_text())
    assert {r["questions"] for r in rows if r["set"] == "one"} == {2}


def test_other_rules_are_named_and_not_judged(run, golden, tmp_path, capsys):
    folder, go = run
    draft = [
        "--speculate", "eagle3,draft-model", "--draft", f"draft-model={golden}", "--tree",
        "draft-model=5,3,1", "--observe", "0"
    ]
    assert go(*draft, "--accept", "draft-model=residual", "--accept", "eagle3=typical", out="rules") == 0
    text = (folder / "rules" / "table.md").read_text()
    greedy, warm = text.split("Temperature 1")
    assert "LOSSY" not in greedy and "| eagle3+typical-lossy |" in greedy and "3/3" in greedy
    assert "LOSSY" in warm and "other draws" in warm
    rows = json.loads((folder / "rules" / "table.json").read_text())
    assert {r["equal"] for r in rows if r["temperature"] and "+" in r["method"]} == {None}
    wrongs = {
        "--accept eagle3=never": "choose from", "--accept typical": "of which method",
        "--tree lookup=4,1,2": "none of"
    }
    for wrong, message in wrongs.items():
        assert go(*draft, *wrong.split(), out="no") == 1 and message in capsys.readouterr().err
