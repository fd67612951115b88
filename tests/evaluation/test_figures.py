"""Figures are the arithmetic of the answers, differences are judged rightly."""
import dataclasses

import pytest
import torch

from checkpoint.load import load_model
from engine.engine import Engine
from engine.sampling import Sampling
from evaluation.answers import Answer, Turn
from evaluation.lossless import QUANTIZED_TOLERANCE, TOLERANCE, Judge, first_difference
from evaluation.table import format_table, summarize


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
    """A token within rounding of the best is a tie, any other an error, an early end always an error."""
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
    exact = Judge(str(golden), torch.bfloat16, "cpu", exact=True)
    assert exact.tolerance == 0 and not judged(exact, other).tie  # on our kernels nothing is excused
    found = [Judge(str(golden), torch.float32, "cpu", kv=kv).tolerance for kv in ("auto", "int8", "fp8")]
    assert found == [TOLERANCE[torch.float32]] * 2 + [QUANTIZED_TOLERANCE["fp8"]]  # int8: on our kernels only
