"""Data generation: shards, multi-turn conversations, ends of user turns, resuming after a kill."""
import itertools
import json
from types import SimpleNamespace

import pytest
from helpers.tokenizers import with_template
from helpers.training import users

import train
from checkpoint.load import load_model
from common.errors import InputError
from common.writing import digest
from drafters import estimate
from drafters.estimate import describe, expected_tau, min_minutes, phase_hours
from engine.engine import Engine
from engine.sampling import Sampling
from tokens.convert import TEMPLATES
from tokens.tokenizer import Tokenizer
from training import collector, data
from training.collector import Collector
from training.processes import ProcessGroup

SETTINGS = {
    "target": "golden", "seed": 0, "max_new_tokens": 12, "temperature": 0.0, "max_prompt_tokens": 100,
    "stop_ids": [ord("\n")], "processes": ProcessGroup(),
}


def make_collector(golden, folder, **changes) -> Collector:
    target, _ = load_model(golden)
    engine = Engine(target, max_seq_len=200, stop_ids=SETTINGS["stop_ids"], compile=False)
    return Collector(engine, Tokenizer.load(golden), folder, **SETTINGS | changes)


def read_rows(c: Collector) -> list[dict]:
    return [line.model_dump() for line in c.read(320) if not line.left_out]


def test_a_users_turn_ends_where_the_template_goes_on(golden, tmp_path, tmp_path_factory):
    """If no stop id ends the user's turn, the start of the assistant's turn does."""
    c = make_collector(golden, tmp_path)
    assert c.user_end() == ""
    c.stop_ids = [257]
    assert c.user_end() == "a:"
    for name, end in (("vicuna", "ASSISTANT:"), ("llama2", "[/INST]")):
        c.tokenizer = with_template(golden, tmp_path_factory.mktemp(name), TEMPLATES[name])
        assert c.user_end() == end


def test_several_turns_are_answered_with_what_was_said(golden, tmp_path):
    c = make_collector(golden, tmp_path)
    told = [{"role": "system", "content": "s"}, *users("q")]
    c.from_prompts([users("one", "two", "three"), users("x" * 95, "cut"), users("y" * 99), users(""), told])
    c.write()
    rows = read_rows(c)
    assert sorted(len(r["answers"]) for r in rows) == [1, 1, 3] and {r["target"] for r in rows} == {"golden"}
    assert any(bytes(r["ids"]).startswith(b"s:s\nu:q\na:") for r in rows)  # the system message is kept
    _, left_out = data.training_rows(c.read(320), 200)
    assert left_out == {
        "prompt longer than --max-prompt-tokens 100": 1, "empty or unfinished user turn": 1,
    }
    row = max(rows, key=lambda r: len(r["answers"]))
    plain = Engine(c.engine.target, compile=False, max_seq_len=200, stop_ids=[ord("\n")])
    for turn, (begin, end) in zip(("one", "two", "three"), row["answers"]):
        prompt = f"u:{turn}\na:".encode()
        assert bytes(row["ids"][begin - len(prompt) : begin]) == prompt
        # Each answer is what the target says to all that came before.
        assert plain.generate([row["ids"][:begin]], Sampling(12))[0].ids == row["ids"][begin:end]


def test_text_that_is_not_written_in_time_is_not_planned(golden, tmp_path, capsys, monkeypatch):
    c = written(golden, tmp_path, [users("one")])
    assert "00:00 left with training" in capsys.readouterr().err
    c.from_prompts([users("two"), users("three")])
    c.write(deadline=0.0)
    assert len(c.planned) == len(read_rows(c)) == 1 and c.engine.free == c.engine.batch
    ticks = itertools.count()
    monkeypatch.setattr(collector, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    c.from_prompts([users("two")])
    c.write(deadline=20.0)
    first, cut = (row["answers"][0] for row in read_rows(c))
    assert 0 < cut[1] - cut[0] < first[1] - first[0]  # an answer that has begun is cut


def written(golden, folder, prompts: list, **changes) -> Collector:
    c = make_collector(golden, folder, **changes)
    c.from_prompts(prompts)
    c.write()
    return c


def test_killed_generation_keeps_finished_conversations(golden, tmp_path, monkeypatch):
    """Finished conversations are not generated again; an incomplete line is ignored; other settings do not
    reuse them.
    """
    admit, lines, decoded, ended = Engine.admit, Collector._lines, [], []

    def watched(engine, prompt, *rest):
        decoded.append(prompt)
        return admit(engine, prompt, *rest)

    def kill(*talk):
        ended.append(talk)
        if len(ended) == 4:
            raise KeyboardInterrupt
        return lines(*talk)

    monkeypatch.setattr(Engine, "admit", watched)
    prompts, folder = [users("one", "two"), *(users(f"question {i}") for i in range(5))], tmp_path / "killed"
    alone = written(golden, tmp_path / "alone", prompts)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Collector, "_lines", kill)
        written(golden, folder, prompts)
    (left,) = folder.iterdir()
    with open(left, "a") as file:
        file.write('{"ids": [1, 2')
    decoded.clear()
    assert read_rows(written(golden, folder, prompts)) == read_rows(alone) and len(decoded) == 7 - 4
    before = left.read_bytes()
    more = written(golden, folder, [users("one more"), *prompts[::-1]])  # in any order
    assert len(decoded) == 3 + 1 and left.read_bytes().startswith(before) and len(read_rows(more)) == 7
    written(golden, folder, prompts, seed=1)
    assert len(decoded) == 3 + 1 + 7


# -- rows of text: how conversations become rows, and which of them are used ---------------------------------


def test_a_template_that_rewrites_what_was_said_gives_a_row_per_answer():
    """For example, templates that keep only the last answer's reasoning."""
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
    ('{"ids": [1, 2, 256], "answers": [[0, 3]]}', "is not a row"),
    ('{"step": 1, "loss": 2.0}', "is not a row"),
    ('{"ids": [1, 2, 3, 4, 5], "answers": [[4, 5], [1, 3]]}', "is not a row"),
    ('{"ids": [1, 2, 3], "answers": [[0, 3]], "target": "other"}', "was generated by another target"),
])
def test_invalid_shard_lines(tmp_path, line, words):
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


def test_estimate(golden, monkeypatch):
    """Hours grow with text and weights, and without memory for features; τ is a measured one."""
    config = json.loads((golden / "config.json").read_text())
    monkeypatch.setattr(estimate, "free_memory", lambda device: None)
    features = phase_hours(config, 1000, 256, 4, 1e9)["features"]
    monkeypatch.setattr(estimate, "free_memory", lambda device: 1 << 40)
    assert phase_hours(config, 1000, 256, 4, 1e9)["features"] == pytest.approx(features / 4)
    one, two = (sum(phase_hours(config, count, 256, 4, 1e9).values()) for count in (1000, 2000))
    assert two == pytest.approx(2 * one) and one > 0
    assert sum(phase_hours(config | {"hidden_size": 8192}, 1000, 256, 4, 1e9).values()) > 10 * one
    assert min_minutes(config, 256, 1e12) == 1 < min_minutes(config, 256, 1e7)
    assert [expected_tau(tokens) for tokens in (1, 62_000, 10**9)] == [2.05, 2.21, 3.82]
    assert "1,000 conversations, 4 epochs" in describe(config, 1000, 256, 4, 1e12)


def test_estimate_needs_no_data(golden, capsys, monkeypatch):
    monkeypatch.setattr(train, "MEASUREMENT_SECONDS", 0.01)
    assert train.main(["--checkpoint", str(golden), "--estimate"]) == 0
    assert "4,000 conversations" in capsys.readouterr().out
