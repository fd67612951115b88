"""Shards of text that the target writes: several turns, user turns of its own, several processes."""
import json

import pytest
import torch
from helpers.tokenizers import with_template
from helpers.training import users

from checkpoint.loading import load_model
from common.errors import InputError
from engine.decoder import Decoder
from engine.run import Output
from engine.seats import Seats
from sampling.options import Sampling
from tokens.dataset import read_openings
from tokens.templates import TEMPLATES
from tokens.tokenizer import Tokenizer
from training import collect, corpus
from training.collect import Collector, user_end, user_header
from training.processes import Processes

SETTINGS = {
    "target": "golden", "seed": 0, "max_new_tokens": 12, "temperature": 0.0, "max_prompt_tokens": 100,
    "quiet": True,
}


def collector(golden, folder, **changes) -> Collector:
    target, _ = load_model(golden)
    seats = Seats(target, places=1, max_seq_len=200, compile=False, stop_ids=[ord("\n")])
    return Collector(seats, Tokenizer.load(golden), folder, **SETTINGS | changes)


def read_rows(c: Collector) -> list[dict]:
    rows = [row for path in c.shards for row in map(json.loads, path.read_text().splitlines())]
    return [row for row in rows if "left_out" not in row]


def test_a_users_turn_ends_where_the_template_goes_on(golden, tmp_path, tmp_path_factory):
    """Where no stop id ends the user's turn, the text that leads to the assistant does."""
    tokenizer = Tokenizer.load(golden)
    assert user_end(tokenizer, [ord("\n")]) == "" and user_end(tokenizer, []) == "a:"
    for name, end in (("vicuna", "ASSISTANT:"), ("llama2", "[/INST]")):
        tokenizer = with_template(golden, tmp_path_factory.mktemp(name), TEMPLATES[name])
        assert user_end(tokenizer, [257]) == end

    class FakeSeats:
        batch, target, state = 2, None, torch.nn.Module()

        def generate(self, prompts, sampling, ended):
            texts = [b" What is two? [/INST] Two." if len(p) < 700 else b" It is two." for p in prompts]
            return [Output(list(text), "length", [], [], 0.0, 0.0) for text in texts]

    FakeSeats.state.stop_ids = torch.tensor([257])
    turns = []
    c = Collector(FakeSeats(), tokenizer, tmp_path, **SETTINGS | {"max_prompt_tokens": 10**6})
    original = c._converse

    def watched(source, begin, chats, next_turns):
        turns.extend(next_turns(0, [0, 1], [[], []]))
        return original(source, begin, [], lambda *a: [])

    c._converse = watched
    c.synthesize(2)
    c.write()
    assert turns == ["What is two?"] * 2


def test_several_turns_are_answered_with_what_was_said(golden, tmp_path):
    c = collector(golden, tmp_path)
    with_system = [{"role": "system", "content": "s"}, *users("q")]
    c.from_prompts([users("one", "two", "three"), users("four"), users("x" * 95, "dropped"), with_system])
    c.write()
    rows = read_rows(c)
    assert sorted(len(r["answers"]) for r in rows) == [1, 1, 1, 3]
    assert {r["target"] for r in rows} == {"golden"}
    assert any(bytes(r["ids"]).startswith(b"s:s\nu:q\na:") for r in rows)  # the system message is kept
    usable, left_out, _ = corpus.load_shards(c.shards, 200, 320, "golden")
    assert left_out == 1 and len(usable) <= 4
    with pytest.raises(InputError, match="another target"):
        corpus.load_shards(c.shards, 200, 320, "other")
    target, _ = load_model(golden)
    row = max(rows, key=lambda r: len(r["answers"]))
    plain = Decoder(target, compile=False, max_seq_len=200, stop_ids=[ord("\n")])
    for begin, end in row["answers"]:  # each answer is what the target says to all that came before
        assert plain.generate([row["ids"][:begin]], Sampling(12))[0].ids == row["ids"][begin:end]
    prompts = [f"u:{turn}\na:".encode() for turn in ("one", "two", "three")]
    before = [row["ids"][begin - len(prompt) : begin] for prompt, (begin, _) in zip(prompts, row["answers"])]
    assert list(map(bytes, before)) == prompts


@pytest.mark.slow
def test_user_turns_of_its_own(golden, tmp_path):
    assert user_header(Tokenizer.load(golden), []) == list(b"u:")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert user_header(Tokenizer.load(golden), messages) == list(b"u:a\na:b\nu:")
    c = collector(golden, tmp_path, max_new_tokens=8)
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


def test_openings_that_cannot_be_used(tmp_path):
    file = tmp_path / "openings.txt"
    for content, words in (
        (None, "no such file"), (b"\xff\xfe", "cannot be read"), (b" \n\n", "holds no lines")
    ):
        if content:
            file.write_bytes(content)
        with pytest.raises(InputError, match=f"openings.txt: {words}"):
            read_openings(str(file))
    file.write_text("Write \n\nSum\n")
    assert read_openings(str(file)) == ("Write", "Sum")


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
    monkeypatch.setattr(collect, "SHARD", 4)
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
    before = {p: p.stat().st_mtime_ns for p in alone.shards}
    alone.shards[1].unlink()
    again = written_by(collector(golden, tmp_path / "alone"), prompts)
    assert read_rows(again) == read_rows(parts[1])
    assert [p.stat().st_mtime_ns == before[p] for p in again.shards] == [True, False, True]


def test_a_killed_writer_leaves_its_answers(golden, tmp_path, monkeypatch):
    """Those that had ended are not written again, whoever goes on, and half a line of them is no answer."""
    prompts = [users("one", "two"), *(users(f"question {i}") for i in range(5))]
    alone = written_by(collector(golden, tmp_path / "alone"), prompts)
    killed, asked = collector(golden, tmp_path / "killed"), []
    generate = killed.seats.generate

    def kill(prompts, sampling, ended):
        def then(number, output):
            ended(number, output)
            asked.append(prompts[number])
            if len(asked) == 3:
                raise KeyboardInterrupt
        return generate(prompts, sampling, then)

    monkeypatch.setattr(killed.seats, "generate", kill)
    with pytest.raises(KeyboardInterrupt):
        written_by(killed, prompts)
    (left,) = tmp_path.glob("killed/*.answers")
    assert len(left.read_text().splitlines()) == 3 and not killed.shards[0].exists()
    with open(left, "a") as file:
        file.write('["half a li')
    again = collector(golden, tmp_path / "killed")
    generate_again, more = again.seats.generate, []

    def watch(prompts, sampling, ended):
        more.extend(prompts)
        return generate_again(prompts, sampling, ended)

    monkeypatch.setattr(again.seats, "generate", watch)
    written_by(again, prompts)
    assert read_rows(again) == read_rows(alone) and len(asked) + len(more) == 7
    assert not any(prompt in asked for prompt in more)
    assert [p.name for p in (tmp_path / "killed").iterdir()] == [p.name for p in alone.shards]
