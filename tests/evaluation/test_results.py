"""The results table of evaluate.py, and its classification of differences as ties or errors."""
import dataclasses

import pytest
import torch
from helpers import refused

from checkpoint.load import load_model
from common.writing import digest
from engine.drafting import DraftOptions
from engine.engine import Engine
from engine.sampling import Sampling
from evaluate import parser
from evaluation.answers import Answer, AnswerStore, Turn, read_sets
from evaluation.lossless import QUANTIZED_TOLERANCE, TOLERANCE, Judge, first_difference
from evaluation.methods import read_draftings
from evaluation.table import format_table, summarize
from tree import TreeShape


def turn(ids, lengths=(), seconds=1.0, prompt=(1, 2)) -> Turn:
    return Turn(list(prompt), list(ids), "text", "length", 0.5, seconds, list(lengths))


def answer(question, method, turns, temperature=0.0, name="set") -> Answer:
    return Answer(name, question, "", method, temperature, 0, "", turns)


def test_the_table_is_the_arithmetic_of_the_answers():
    answers = [
        answer(question, method, [turn(range(sum(lengths) + 1), lengths, seconds)], name=name)
        for name, question, method, lengths, seconds in (
            ("set", 1, "none", [1] * 10, 2.0), ("set", 1, "eagle3", [5, 5], 1.0),
            ("set", 2, "none", [1] * 20, 2.0), ("set", 2, "eagle3", [2] * 10, 0.5),
            ("set", 3, "none", [1] * 10, 2.0), ("set", 3, "eagle3", [5, 5], 0.25),
            ("other", 1, "none", [1] * 4, 1.0), ("other", 1, "eagle3", [4], 0.5),
            ("set", 9, "eagle3", [4], 0.5),  # the plain answer is missing
        )
    ]
    rows = {(r["method"], r["set"]): r for r in summarize(answers, ["set", "other"], ["none", "eagle3"], [])}
    row, mean = rows["eagle3", "set"], rows["eagle3", "mean"]
    assert row["questions"] == row["equal"] == 3 and row["tau"] == pytest.approx(40 / 14)
    assert row["speedup"] == pytest.approx(4)  # the median of 2, 4 and 8
    assert row["tokens_per_second"] == pytest.approx(40 / 1.75) and rows["none", "set"]["speedup"] == 1
    assert row["speedup_total"] == pytest.approx((40 / 1.75) / (40 / 6))
    assert mean["tau"] == pytest.approx((40 / 14 + 4) / 2) and mean["questions"] == 4
    assert row["seconds"] == 1.75 and row["prefill_seconds"] == 1.5
    assert format_table([*rows.values()]).splitlines()[-3:] == [
        "| eagle3 | mean  |    15.43 |   3.00× | 3.43 |         4/4 |    0 |      0 |",
        f"{'plain':19} {'#' * 15} 1.00×", f"{'eagle3':19} {'#' * 45} 3.00×",
    ]


def test_ties_and_errors(golden):
    """A token within rounding error of the best is a tie; any other, or an early end, is an error."""
    target, _ = load_model(golden)
    prompt = list(b"u:question 3\na:")
    engine = Engine(target, compile=False, max_seq_len=64)
    ids = engine.generate([prompt], Sampling(6, 2.0, seed=4))[0].ids
    plain = dataclasses.replace(answer(1, "none", [turn(ids, prompt=prompt)], 2.0), seed=4)

    def judged(judge: Judge, other_ids: list[int]):
        other = dataclasses.replace(plain, method="eagle3", turns=[turn(other_ids, prompt=prompt)])
        return judge.difference(plain, other)

    judge = Judge(str(golden), torch.bfloat16, "cpu")
    assert judged(judge, ids) is None
    other = dataclasses.replace(plain, turns=[turn([1, 2], prompt=prompt)] * 2)  # in the second turn
    assert first_difference(other, dataclasses.replace(other, turns=[other.turns[0], turn([1])])) == (1, 1)
    differences = [judged(judge, [*ids[:3], token, *ids[4:]]) for token in range(256) if token != ids[3]]
    assert all((d.turn, d.token, d.plain) == (0, 3, ids[3]) and d.gap > 0 for d in differences)
    assert any(not d.tie for d in differences) and all(d.tie == (d.gap <= d.bound) for d in differences)
    judge.tolerance = 100.0
    other = [*ids[:3], (ids[3] + 1) % 256, *ids[4:]]
    assert judged(judge, other).tie and not judged(judge, ids[:3]).tie
    exact = Judge(str(golden), torch.bfloat16, "cpu", batch_invariant=True)
    assert exact.tolerance == 0 and not judged(exact, other).tie  # on our kernels nothing is excused
    found = [Judge(str(golden), torch.float32, "cpu", kv=kv).tolerance for kv in ("auto", "int8", "fp8")]
    assert found == [TOLERANCE[torch.float32]] * 2 + [QUANTIZED_TOLERANCE["fp8"]]  # int8: on our kernels only


# -- question sets, the methods that answer, and the folder of answers ---------------------------------------


def stored_answer(question: dict, method: str) -> Answer:
    turns = [Turn([1], [2, 3], "text", "length", 0.1, 0.2, [1])]
    asked = digest(question["turns"], method)
    return Answer("set", question["question_id"], "", method, 0.0, 0, asked, turns)


def test_answers_outlive_the_book_and_are_forgotten_together(tmp_path):
    (tmp_path / ".options.json.1.partial").touch()  # of a run that was killed at its first write
    one, two = ({"question_id": i, "turns": [f"what is {i}?"]} for i in (1, 2))
    store = AnswerStore(tmp_path, {"seed": 0})
    for question in (one, two):
        for method in ("none", "eagle3"):
            store.add(stored_answer(question, method))
    again = AnswerStore(tmp_path, {"seed": 0})
    assert again.answers == store.answers
    assert again.find("set", one, "eagle3", 0.0, "eagle3") == stored_answer(one, "eagle3")
    assert not again.find("set", one, "eagle3", 0.0, "another head")
    assert not again.find("set", {**one, "turns": ["another question"]}, "eagle3", 0.0, "eagle3")
    again.drop_answers("set", one, 0.0)
    assert {a.question for a in again.answers.values()} == {2}
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


def test_sets_are_named_by_file_or_folder(tmp_path):
    for name in ("gsm8k", "qa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "question.jsonl").write_text('{"turns": ["what is 3?"]}\n')
    assert [*read_sets(tmp_path, None)] == ["gsm8k", "qa"]
    assert [*read_sets(tmp_path / "qa" / "question.jsonl", None)] == ["qa"]
    said: list[str] = []
    assert [*read_sets(None, 2, "mt_bench,code", said.append)] == ["writing", "code"] and len(said) == 1
    (tmp_path / "qa.jsonl").write_text('{"turns": ["what is 4?"]}\n')
    with refused(f"{tmp_path / 'qa.jsonl'}: the set name qa is reserved or used twice"):
        read_sets(tmp_path, None)


def test_options_reach_the_methods_that_take_them():
    line = "--checkpoint x --out x --speculate eagle3,draft-model,lookahead --draft draft-model=DIR"
    line += " --tree eagle3=8,2,4 --draft-window 64 --level 3"
    o = parser().parse_args(line.split(" "))
    assert read_draftings(o, ["none", "eagle3", "draft-model", "lookahead"]) == {
        "none": DraftOptions(), "eagle3": DraftOptions("eagle3", tree=TreeShape(8, 2, 4), window=64),
        "draft-model": DraftOptions("draft-model", "DIR"),
        "lookahead": DraftOptions("lookahead", flags={"level": 3}),
    }
    with refused("--level belongs to --speculate lookahead"):
        read_draftings(o, ["eagle3", "draft-model"])
