"""Shards of text that the target writes: several turns, user turns of its own, several processes."""
import json

import pytest
from helpers.tokenizers import with_template
from helpers.training import users

from checkpoint.loading import load_model
from common.errors import InputError
from engine.engine import Engine
from sampling.options import Sampling
from tokens.templates import TEMPLATES
from tokens.tokenizer import Tokenizer
from training import data, writing
from training.processes import Processes
from training.writing import Collector, open_engine

SETTINGS = {
    "target": "golden", "seed": 0, "max_new_tokens": 12, "temperature": 0.0, "max_prompt_tokens": 100,
    "batch": 1, "stop_ids": [ord("\n")],
}


def collector(golden, folder, **changes) -> Collector:
    target, _ = load_model(golden)
    engine = open_engine(target, SETTINGS["stop_ids"], 1, 200, False, print)
    return Collector(engine, Tokenizer.load(golden), folder, **SETTINGS | changes)


@pytest.fixture
def decoded(monkeypatch) -> list[list[int]]:
    """Every prompt that is decoded."""
    original, prompts = writing.decode_answers, []

    def watched(engine, more, *rest):
        prompts.extend(more)
        return original(engine, more, *rest)

    monkeypatch.setattr(writing, "decode_answers", watched)
    return prompts


def shards(c: Collector) -> list:
    return [piece.path for piece in c.pieces]


def read_rows(c: Collector) -> list[dict]:
    rows = [row for path in shards(c) for row in map(json.loads, path.read_text().splitlines())]
    return [row for row in rows if "left_out" not in row]


def test_a_users_turn_ends_where_the_template_goes_on(golden, tmp_path, tmp_path_factory, monkeypatch):
    """Where no stop id ends the user's turn, the text that leads to the assistant does."""
    c = collector(golden, tmp_path)
    assert c.user_end() == ""
    c.stop_ids = []
    assert c.user_end() == "a:"
    c.stop_ids = [257]
    for name, end in (("vicuna", "ASSISTANT:"), ("llama2", "[/INST]")):
        c.tokenizer = with_template(golden, tmp_path_factory.mktemp(name), TEMPLATES[name])
        assert c.user_end() == end
    c.max_prompt_tokens = 10**6
    texts = iter([[list(b" What is two? [/INST] Two.")], [list(b" It is two.")]])
    monkeypatch.setattr(writing, "decode_answers", lambda *_: [(ids, "length") for ids in next(texts)])
    c.synthesize(1)
    c.write()
    (row,) = read_rows(c)
    text = bytes(i for i in row["ids"] if i < 256)
    assert b"What is two?" in text and text.endswith(b" It is two.") and b" Two." not in text


def test_several_turns_are_answered_with_what_was_said(golden, tmp_path):
    c = collector(golden, tmp_path)
    with_system = [{"role": "system", "content": "s"}, *users("q")]
    c.from_prompts([users("one", "two", "three"), users("four"), users("x" * 95, "dropped"), with_system])
    c.write()
    rows = read_rows(c)
    assert sorted(len(r["answers"]) for r in rows) == [1, 1, 1, 3]
    assert {r["target"] for r in rows} == {"golden"}
    assert any(bytes(r["ids"]).startswith(b"s:s\nu:q\na:") for r in rows)  # the system message is kept
    usable, left_out, _ = data.load_shards(shards(c), 200, 320, "golden")
    assert left_out == 1 and len(usable) <= 4
    with pytest.raises(InputError, match="another target"):
        data.load_shards(shards(c), 200, 320, "other")
    target, _ = load_model(golden)
    row = max(rows, key=lambda r: len(r["answers"]))
    plain = Engine(target, compile=False, max_seq_len=200, stop_ids=[ord("\n")])
    for begin, end in row["answers"]:  # each answer is what the target says to all that came before
        assert plain.generate([row["ids"][:begin]], Sampling(12))[0].ids == row["ids"][begin:end]
    prompts = [f"u:{turn}\na:".encode() for turn in ("one", "two", "three")]
    before = [row["ids"][begin - len(prompt) : begin] for prompt, (begin, _) in zip(prompts, row["answers"])]
    assert list(map(bytes, before)) == prompts


@pytest.mark.slow
def test_user_turns_of_its_own(golden, tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    c = collector(golden, tmp_path, max_new_tokens=8)
    assert c.user_header([]) == list(b"u:") and c.user_header(messages) == list(b"u:a\na:b\nu:")
    c.synthesize(24, turns=2, openings=("Write", "Sum"))
    c.write()
    rows = read_rows(c)
    assert rows and any(len(r["answers"]) == 2 for r in rows)
    begins = {bytes(r["ids"]).split(b":")[1][:3] for r in rows}
    assert begins == {b"Wri", b"Sum"} and all(r["source"] == "synthesized" for r in rows)


def test_a_template_without_a_header_for_the_user(golden, tmp_path, tmp_path_factory):
    c, bare = collector(golden, tmp_path), "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    c.tokenizer = with_template(golden, tmp_path_factory.mktemp("bare"), bare)
    with pytest.raises(InputError, match="--synthesize: the chat template puts nothing before a user's turn"):
        c.synthesize(1)
    assert not list(tmp_path.iterdir())


class Counter:
    """A store of torch.distributed, for processes that are not there."""

    def __init__(self):
        self.taken = 0

    def add(self, name: str, number: int) -> int:
        self.taken += number
        return self.taken


def written_by(c: Collector, prompts: list) -> Collector:
    c.from_prompts(prompts)
    c.write()
    return c


def test_shards_are_shared_between_processes(golden, tmp_path, monkeypatch):
    """Whoever is free takes the next one, and what it holds does not depend on who that is."""
    monkeypatch.setattr(writing, "SHARD", 4)
    prompts, store = [users(f"question {i}") for i in range(10)], Counter()
    alone = written_by(collector(golden, tmp_path / "alone"), prompts)
    both = [Processes(rank, 2, store=store) for rank in (0, 1)]
    parts = [collector(golden, tmp_path / "shared", processes=processes) for processes in both]
    for part in parts:
        part.from_prompts(prompts)
    queues = [part.processes.queue("text", 3) for part in parts]
    taken = [next(queues[1]), next(queues[0]), next(queues[1])]
    assert taken == [0, 1, 2] and [list(queue) for queue in queues] == [[], []]
    for rank, number in zip((1, 0, 1), taken):
        parts[rank].write_piece(number)
    assert read_rows(parts[0]) == read_rows(alone) and parts[0].left_out == 0
    before = {p: p.stat().st_mtime_ns for p in shards(alone)}
    shards(alone)[1].unlink()
    again = written_by(collector(golden, tmp_path / "alone"), prompts)
    assert read_rows(again) == read_rows(parts[1])
    assert [p.stat().st_mtime_ns == before[p] for p in shards(again)] == [True, False, True]


def test_a_killed_writer_leaves_its_answers(golden, tmp_path, monkeypatch, decoded):
    """Finished answers are not decoded again, and half a line of them is no answer."""
    prompts = [users("one", "two"), *(users(f"question {i}") for i in range(5))]
    alone = written_by(collector(golden, tmp_path / "alone"), prompts)
    killed, kept = collector(golden, tmp_path / "killed"), []
    add = writing.Journal.add

    def kill(journal, key, answer):
        add(journal, key, answer)
        kept.append(key)
        if len(kept) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writing.Journal, "add", kill)
        written_by(killed, prompts)
    (left,) = tmp_path.glob("killed/*.answers")
    assert len(left.read_text().split()) > 3 and not shards(killed)[0].exists()
    with open(left, "a") as file:
        file.write('\n["half a li')
    decoded.clear()
    again = written_by(collector(golden, tmp_path / "killed"), prompts)
    assert read_rows(again) == read_rows(alone) and len(decoded) == 7 - 3
    assert [p.name for p in (tmp_path / "killed").iterdir()] == [p.name for p in shards(alone)]
