"""Rows of text: how conversations become rows, and which of them are used."""
import json

import pytest

import train
from common.errors import InputError
from common.writing import digest
from drafters.estimate import describe, expected_tau, min_minutes, phases
from training import data


def test_a_template_that_rewrites_what_was_said_gives_a_row_per_answer():
    """Thoughts that a template keeps in the last answer only: the first answer has another text before it."""
    texts = b"u:hi\na:hm/hello\n", b"u:hi\na:hello\nu:so\na:eh/bye\n"
    one, two = map(list, texts)
    finished, row = data.extend(None, one, 7, len(one), "x")
    assert finished is None and row["answers"] == [[7, len(one)]]
    finished, second = data.extend(row, two, 20, len(two), "x")
    assert finished == row and second["ids"] == two and second["answers"] == [[20, len(two)]]
    assert second["chat"] == row["chat"]  # one conversation: held out or trained on together
    finished, longer = data.extend(row, one + two, len(one) + 20, len(one + two), "x")
    assert finished is None and longer["answers"] == [[7, len(one)], [len(one) + 20, len(one + two)]]


@pytest.mark.parametrize("line, words", [
    ('{"ids": [1, 2, 256], "answers": [[0, 3]]}', "is no row"), ('{"step": 1, "loss": 2.0}', "is no row"),
    ('{"ids": [1, 2, 3, 4, 5], "answers": [[4, 5], [1, 3]]}', "is no row"),
    ('{"ids": [1, 2, 3], "answers": [[0, 3]], "target": "other"}', "was written by another target"),
])
def test_a_line_that_is_no_row(tmp_path, line, words):
    good = '{"ids": [9, 1, 2, 3], "answers": [[1, 4]], "target": "this"}\n'
    shard = tmp_path / "a.jsonl"
    shard.write_text(good + good + '{"left_out": "too long"}\n')
    rows, left_out = data.training_rows(data.read_shards([shard], 256, "this"), 100)
    assert [row["ids"] for row in rows] == [[9, 1, 2, 3]] and left_out == {"too long": 1}
    shard.write_text(good + line + "\n")
    with pytest.raises(InputError, match=f"a.jsonl: line 2 {words}"):
        data.read_shards([shard], 256, "this")


def test_no_prompt_is_both_held_out_and_trained_on():
    rows = [
        {"ids": [i // 3, 0, i, 1, 2], "answers": [[2, 5]], "source": "x", "chat": digest([i // 3, 0])}
        for i in range(300)
    ]
    held_out, rest = data.hold_out(rows)
    assert len(held_out) == 15 and len(held_out) + len(rest) == 300  # 5 of 100 prompts, three rows each
    assert not {r["ids"][0] for r in held_out} & {r["ids"][0] for r in rest}
    assert data.hold_out(rows[::-1])[0] == held_out[::-1]


def test_estimate(golden):
    """Hours grow with text and weights; the acceptance length is the measured one where it was measured."""
    config = json.loads((golden / "config.json").read_text())
    one, two = (sum(phases(config, count, 256, 4, 1e9).values()) for count in (1000, 2000))
    assert two == pytest.approx(2 * one) and one > 0
    assert sum(phases(config | {"hidden_size": 8192}, 1000, 256, 4, 1e9).values()) > 10 * one
    assert min_minutes(config, 256, 1e12) == 1 < min_minutes(config, 256, 1e7)
    assert [expected_tau(tokens) for tokens in (1, 62_000, 10**9)] == [2.05, 2.21, 3.82]
    assert "1,000 conversations, 4 epochs" in describe(config, 1000, 256, 4, 1e12)


def test_estimate_needs_no_data(golden, capsys, monkeypatch):
    monkeypatch.setattr(train, "MEASUREMENT", 0.01)
    assert train.main(["--checkpoint", str(golden), "--estimate"]) == 0
    assert "4,000 conversations" in capsys.readouterr().out
