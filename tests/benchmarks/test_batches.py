"""batches.py on a small model: who answers what, what is kept, the table. Speeds are not tested."""
import json
from types import SimpleNamespace

import batches
import pytest
from hugging_face import HuggingFace, as_llama

from checkpoint.loading import load_model

SMALL = (
    "--threads", "1", "--no-compile", "--tree", "4,1,2", "--batch", "1", "3", "--least", "2", "--each", "2",
    "--max-new-tokens", "12",
)


def cell(turn: int, batch: int, who: str, rate: float, texts: str = "ab", **more) -> dict:
    return {"round": turn, "batch": batch, "who": who, "rate": rate, "step_rate": 3 * rate,
            "texts": [*texts], "tokens": 20, "trees": {}, "steps": 0, **more}


def test_ratios_are_those_of_rounds():
    trees = {"trees": {"4/1/2": 6, "plain": 3}, "steps": 9}
    cells = [
        cell(0, 4, "plain", 10), cell(0, 4, "drafted", 20, "ab", **trees), cell(0, 4, "transformers", 5),
        cell(1, 4, "plain", 40), cell(1, 4, "drafted", 40, "ac", **trees),
        cell(2, 4, "plain", 20), cell(2, 4, "drafted", 30, "ab", **trees),
    ]
    found = batches.summarise(cells)[4]
    assert found["rates"] == {"plain": 20, "drafted": 30, "transformers": 5}
    assert found["ratios"] == {"plain": 1.5, "transformers": 4} and found["steps"] == 1.5
    assert found["tau"] == 2  # 18 of 20 tokens came by steps
    assert (found["equal"], found["of"]) == (5, 6) and found["trees"] == {"4/1/2": 2 / 3, "plain": 1 / 3}


def test_answers_end_at_different_lengths_and_rounds_ask_others():
    o = SimpleNamespace(each=2, least=6, batch=[1, 4], max_new_tokens=96, temperature=0.0)
    questions = [[i] for i in range(30)]
    (few, _), (many, limits), (later, _) = (
        batches.asked(o, questions, turn, batch) for turn, batch in ((0, 1), (0, 4), (1, 4))
    )
    assert len(few) == 6 and len(many) == 8 and few == many[:6] and not any(q in many for q in later)
    lengths = [request.max_new_tokens for request in limits]
    assert len(set(lengths)) == 8 and 48 <= min(lengths) and max(lengths) <= 96


def test_a_run_goes_on_where_it_was_stopped(golden, questions, results, capsys):
    argv = ["--checkpoint", str(golden), "--questions", str(questions), *SMALL, "--no-transformers"]

    def cells(*more: str) -> list[dict]:
        assert batches.main([*argv, *more]) == 0
        return json.loads((results / "batches.json").read_text())["cells"]

    first = cells("--rounds", "1")
    assert [(c["batch"], c["who"]) for c in first] == [
        (1, "plain"), (1, "drafted"), (3, "drafted"), (3, "plain")
    ]
    assert all(0 < c["prompt_seconds"] < c["seconds"] and c["step_rate"] > 0 for c in first)
    assert all(c["tokens"] > 0 and c["steps"] == sum(c["trees"].values()) > 0 for c in first)
    assert {name for c in first for name in c["trees"]} == {"plain", "4/1/2"}
    assert "going on" not in capsys.readouterr().err
    both = cells("--rounds", "2")
    assert both[:4] == first and len(both) == 8
    head, _, names, line, *rows = (results / "batches.md").read_text().splitlines()
    assert "float" not in head and names.startswith("| batch | plain | eagle3 |") and len(rows) == 2
    assert "4/4" in rows[0] and "12/12" in rows[1]  # texts equal plain
    assert cells("--rounds", "3", "--minutes", "0") == both and "minutes are over" in capsys.readouterr().err
    assert len(cells("--rounds", "1", "--fresh")) == 4
    assert len(cells("--rounds", "1", "--max-new-tokens", "11")) == 4  # other settings


def test_transformers_decodes_a_padded_batch(golden):
    pytest.importorskip("transformers")
    peer = HuggingFace(as_llama(load_model(golden)[0]), [ord("e")])
    prompts, limits = [[*b"u:tell me a"], [*b"x"], [*b"and 4 and 5?"]], [9, 12, 4]
    alone = [peer.decode(ids, limit).ids for ids, limit in zip(prompts, limits)]
    assert peer.decode_together(prompts, limits) == alone


def test_who_cannot_take_part_is_named(int8, capsys):
    pytest.importorskip("transformers")
    o = SimpleNamespace(weights=None, checkpoint=str(int8), transformers=True, peer_rounds=1)
    assert batches.peer_of(o, []) is None
    assert "is quantised; name the unquantised target with --weights" in capsys.readouterr().err


def test_what_it_refuses(golden, questions, refused):
    argv = "--checkpoint", golden, "--questions", questions, "--no-compile", "--threads", "1"
    refused(batches.main, *argv, "--max-seq-len", "20", words="no question and its answer fit")
