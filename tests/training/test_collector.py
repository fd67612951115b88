"""Data generation: shards, multi-turn conversations, ends of user turns, resuming after a kill."""
import itertools
import json
from types import SimpleNamespace

import pytest
from helpers.tokenizers import with_template
from helpers.training import user_messages

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


def test_end_of_a_user_turn(golden, tmp_path, tmp_path_factory):
    """If no stop id ends the user turn, the start of the assistant's turn does."""
    c = make_collector(golden, tmp_path)
    assert c.user_end() == ""
    c.stop_ids = [257]
    assert c.user_end() == "a:"
    for name, end in (("vicuna", "ASSISTANT:"), ("llama2", "[/INST]")):
        c.tokenizer = with_template(golden, tmp_path_factory.mktemp(name), TEMPLATES[name])
        assert c.user_end() == end


def test_each_turn_is_answered_given_the_earlier_turns(golden, tmp_path):
    """Each answer is the target's, after all earlier turns. Too long and empty prompts are skipped."""
    c = make_collector(golden, tmp_path)
    with_system = [{"role": "system", "content": "s"}, *user_messages("q")]
    turns = ("one", "two", "three"), ("x" * 95, "cut"), ("y" * 99,), ("",)
    c.from_prompts([*(user_messages(*x) for x in turns), with_system])
    c.write()
    rows = read_rows(c)
    assert sorted(len(r["answers"]) for r in rows) == [1, 1, 3] and {r["target"] for r in rows} == {"golden"}
    assert any(bytes(r["ids"]).startswith(b"s:s\nu:q\na:") for r in rows)  # the system message is kept
    _, skipped = data.training_rows(c.read(320), 200)
    assert skipped == {
        "prompt longer than --max-prompt-tokens 100": 1, "empty or unfinished user turn": 1,
    }
    row = max(rows, key=lambda r: len(r["answers"]))
    plain = Engine(c.engine.target, compile=False, max_seq_len=200, stop_ids=[ord("\n")])
    for turn, (begin, end) in zip(("one", "two", "three"), row["answers"]):
        prompt = f"u:{turn}\na:".encode()
        assert bytes(row["ids"][begin - len(prompt) : begin]) == prompt
        assert plain.generate([row["ids"][:begin]], Sampling(12))[0].ids == row["ids"][begin:end]


def test_conversations_not_started_by_the_deadline_are_removed_from_the_plan(
    golden, tmp_path, capsys, monkeypatch
):
    """A running answer is truncated."""
    c = collected(golden, tmp_path, [user_messages("one")])
    assert "00:00 left with training" in capsys.readouterr().err
    c.from_prompts([user_messages("two"), user_messages("three")])
    c.write(deadline=0.0)
    assert len(c.planned) == len(read_rows(c)) == 1 and c.engine.free == c.engine.batch
    ticks = itertools.count()
    monkeypatch.setattr(collector, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    c.from_prompts([user_messages("two")])
    c.write(deadline=20.0)
    complete, truncated = (row["answers"][0] for row in read_rows(c))
    assert 0 < truncated[1] - truncated[0] < complete[1] - complete[0]


def collected(golden, folder, prompts: list, **changes) -> Collector:
    """Return a collector that has generated answers to these prompts."""
    c = make_collector(golden, folder, **changes)
    c.from_prompts(prompts)
    c.write()
    return c


def test_killed_generation_keeps_finished_conversations(golden, tmp_path, monkeypatch):
    """Finished conversations are not generated again; an incomplete line is ignored; other settings do not
    reuse them.
    """
    admit, lines, admitted, finished = Engine.admit, Collector._lines, [], []

    def recording_admit(engine, prompt, *options):
        admitted.append(prompt)
        return admit(engine, prompt, *options)

    def kill(*conversation):
        finished.append(conversation)
        if len(finished) == 4:
            raise KeyboardInterrupt
        return lines(*conversation)

    monkeypatch.setattr(Engine, "admit", recording_admit)
    prompts = [user_messages("one", "two"), *(user_messages(f"question {i}") for i in range(5))]
    folder, uninterrupted = tmp_path / "killed", collected(golden, tmp_path / "uninterrupted", prompts)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Collector, "_lines", kill)
        collected(golden, folder, prompts)
    (shard,) = folder.iterdir()
    with open(shard, "a") as file:
        file.write('{"ids": [1, 2')
    admitted.clear()
    assert read_rows(collected(golden, folder, prompts)) == read_rows(uninterrupted)
    assert len(admitted) == 7 - 4
    content = shard.read_bytes()
    more = collected(golden, folder, [user_messages("one more"), *prompts[::-1]])  # in another order
    assert len(admitted) == 3 + 1 and shard.read_bytes().startswith(content) and len(read_rows(more)) == 7
    collected(golden, folder, prompts, seed=1)
    assert len(admitted) == 3 + 1 + 7


# -- rows: how conversations become rows, and which rows are used --------------------------------------------


def test_a_template_that_changes_earlier_turns_starts_a_new_row():
    """For example, a template that keeps only the last answer's reasoning."""
    texts = b"u:hi\na:hm/hello\n", b"u:hi\na:hello\nu:so\na:eh/bye\n"
    one, two = map(list, texts)
    finished, row = data.extend(None, one, 7, len(one), "x")
    assert finished is None and row["answers"] == [[7, len(one)]]
    finished, second = data.extend(row, two, 20, len(two), "x")
    assert finished == row and second["ids"] == two and second["answers"] == [[20, len(two)]]
    assert second["chat"] == row["chat"]  # one conversation: both rows are held out, or neither
    finished, longer = data.extend(row, one + two, len(one) + 20, len(one + two), "x")
    assert finished is None and longer["answers"] == [[7, len(one)], [len(one) + 20, len(one + two)]]


@pytest.mark.parametrize("line, message", [
    ('{"ids": [1, 2, 256], "answers": [[0, 3]]}', "is not a row"),
    ('{"step": 1, "loss": 2.0}', "is not a row"),
    ('{"ids": [1, 2, 3, 4, 5], "answers": [[4, 5], [1, 3]]}', "is not a row"),
    ('{"ids": [1, 2, 3], "answers": [[0, 3]], "target": "other"}', "was generated by another target"),
])
def test_invalid_shard_lines_raise_errors(tmp_path, line, message):
    good = '{"ids": [9, 1, 2, 3], "answers": [[1, 4]], "target": "this"}\n'
    shard = tmp_path / "a.jsonl"
    shard.write_text(good + good + '{"left_out": "too long"}\n')
    rows, skipped = data.training_rows(data.read_shards([shard], 256, "this"), 100)
    assert [row["ids"] for row in rows] == [[9, 1, 2, 3]] and skipped == {"too long": 1}
    shard.write_text(good + line + "\n")
    with pytest.raises(InputError, match=f"a.jsonl: line 2 {message}"):
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


def test_estimated_hours_and_tau(golden, monkeypatch):
    """Hours grow with tokens and weights, and without memory for features; τ stays within measured values."""
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
    assert "1,000 conversations, 4 epochs" in describe(config, 1000, 256, 4, 1e5)
    assert " hours (data " in describe(config, 1000, 256, 4, 1e5)
    assert " minutes (data " in describe(config, 60, 256, 4, 1e9)


def test_estimate_runs_without_data(golden, capsys, monkeypatch):
    monkeypatch.setattr(train, "MEASUREMENT_SECONDS", 0.01)
    assert train.main(["--checkpoint", str(golden), "--estimate"]) == 0
    assert "4,000 conversations" in capsys.readouterr().out
