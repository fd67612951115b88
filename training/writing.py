"""Writing the training text: the target answers prompts, writes user turns, or conversations are taken over.

The name of a shard ends in a digest of all that it was made from: another run with the same prompts, settings
and target finds it again, and no other run does. An answer depends on its place among the prompts, never on
the process: several processes take shards from one queue, and a later run completes what a killed one left.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from common.errors import InputError
from common.files import atomic_path, read_text
from engine.engine import Engine
from model import Transformer
from sampling.noise import seed_of
from sampling.options import Sampling
from tokens.ids import common_prefix
from tokens.tokenizer import Tokenizer, TooLong
from training.data import extend, of_conversation
from training.processes import Processes

TURN_TOKENS = 96  # most tokens of a user turn that the model writes
SHARD = 16  # conversations for each that is decoded at a time: few slots are empty while the last ones end
Written = tuple[list[int], str]  # ids of an answer, and the finish reason


def open_engine(
    target: Transformer, stop_ids: list[int], batch: int, longest: int, compiled: bool, say: Callable
) -> Engine:
    """Return the engine that decodes `batch` answers together. Raises InputError if they do not fit."""
    counts = (batch,) if target.embed.weight.device.type == "cuda" else None  # each count would be compiled
    try:
        return Engine(
            target, batch=batch, max_seq_len=longest, stop_ids=stop_ids, compile=compiled, say=say,
            counts=counts,
        )
    except ValueError as e:
        raise InputError(f"--decode-batch {batch} answers of up to {longest} tokens: {e}") from None


def decode_answers(
    engine: Engine, prompts: list[list[int]], sampling: list[Sampling], ended: Callable[[int, Written], None]
) -> list[Written]:
    """Decode prompts to the end. Call `ended` with the number of a prompt and its answer when it is there."""
    outputs = engine.generate(prompts, sampling, lambda i, output: ended(i, (output.ids, output.finish)))
    return [(output.ids, output.finish) for output in outputs]


class Journal:
    """The answers of a shard that is not complete yet, in a file beside it as they end. known: by key."""

    def __init__(self, shard: Path):
        self.path, self.file = shard.with_suffix(".answers"), None
        self.known: dict[str, Written] = {}
        for line in read_text(self.path).splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):  # a line that a kill cut off
                key, *answer = json.loads(line)
                self.known[key] = tuple(answer)

    @staticmethod
    def key(prompt: list[int], sampling: Sampling) -> str:
        """Return a digest that identifies an answer within its shard."""
        return hashlib.sha256(json.dumps([prompt, sampling.seed]).encode()).hexdigest()[:24]

    def add(self, key: str, answer: Written) -> None:
        """Append an answer."""
        self.file = self.file or self.path.open("a")
        self.file.write("\n" + json.dumps([key, *answer]))  # the last line may be cut off
        self.file.flush()

    def remove(self) -> None:
        """Remove the file: the shard is there."""
        if self.file:
            self.file.close()
        self.path.unlink(missing_ok=True)


class Piece(NamedTuple):
    """A planned shard. rows: yields its rows. end: number of conversations up to its last one."""

    path: Path
    rows: Callable[[], Iterator[dict]]
    end: int


class Collector:
    """Plans shards (`from_prompts`, `synthesize`, `from_conversations`) and writes those that are missing.

    target: its `checkpoint.loading.identity`; copy: that of a copy which writes. `pieces` are all planned
    shards, in order. `refusal` is the last error of the chat template.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, folder: Path, *, batch: int, stop_ids: list[int],
        target: str, seed: int, max_new_tokens: int, temperature: float, max_prompt_tokens: int,
        processes: Processes | None = None, copy: str | None = None,
    ):
        self.engine, self.tokenizer, self.folder, self.target = engine, tokenizer, folder, target
        self.batch, self.stop_ids, self.seed = batch, stop_ids, seed
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.max_prompt_tokens, self.processes = max_prompt_tokens, processes or Processes()
        folder.mkdir(parents=True, exist_ok=True)
        self.pieces: list[Piece] = []
        self.left_out = 0  # of the current shard
        self.journal: Journal | None = None  # of the current shard
        self.refusal = ""
        probe = tokenizer.chat([{"role": "user", "content": "Probe: 1 + 1 = äß?"}])
        self.made_by = [
            target, tokenizer.template, probe, stop_ids, seed, max_new_tokens, temperature, max_prompt_tokens,
            TURN_TOKENS, *([copy] if copy else []),
        ]

    def from_prompts(self, prompts: list[list[dict]]) -> None:
        """Plan to answer the user messages of conversations, which may begin with a system message.

        A conversation ends where its text no longer fits in `max_prompt_tokens`.
        """
        def rows(begin: int, end: int) -> Iterator[dict]:
            part = prompts[begin:end]
            turns = [[m["content"] for m in messages if m["role"] == "user"] for messages in part]

            def next_turns(number: int, places: list[int], chats: list[list[dict]]) -> list[str | None]:
                return [turns[i][number] if number < len(turns[i]) else None for i in places]

            self.left_out += sum(not turn[0] for turn in turns)
            system = [[m for m in messages if m["role"] == "system"] for messages in part]
            return self._converse("prompts", begin, system, next_turns)

        self._plan("prompts", len(prompts), rows, lambda begin, end: prompts[begin:end])

    def synthesize(self, count: int, turns: int = 1, openings: tuple[str, ...] = ()) -> None:
        """Plan to let the model write both parts of `count` conversations of `turns` user turns.

        The first turns begin with `openings`, one after the other, which lead it to subjects. Raises
        InputError if the chat template has no header for the user's turn.
        """
        if count and not self.user_header([]):
            raise InputError("--synthesize: the chat template puts nothing before a user's turn; the model"
                             " cannot write one")

        def rows(begin: int, end: int) -> Iterator[dict]:
            def next_turns(number: int, places: list[int], chats: list[list[dict]]) -> list[str | None]:
                if number == turns:
                    return [None] * len(places)
                first = openings if number == 0 else ()
                starts = [first[(begin + i) % len(first)] if first else "" for i in places]
                seeds = [seed_of(self.seed, "user", number, begin + i) for i in places]
                written = self._user_turns(chats, starts, seeds)
                self.left_out += written.count(None) if number == 0 else 0
                return written

            return self._converse("synthesized", begin, [[] for _ in range(begin, end)], next_turns)

        self._plan("synthesized", count, rows, lambda begin, end: [begin, end, turns, *openings])

    def from_conversations(self, conversations: list[list[dict]]) -> None:
        """Plan to take over conversations of another author."""
        def rows(begin: int, end: int) -> Iterator[dict]:
            for messages in conversations[begin:end]:
                try:
                    yield from list(of_conversation(self.tokenizer, messages, self.stop_ids))
                except InputError as e:
                    self.left_out, self.refusal = self.left_out + 1, str(e)

        self._plan(
            "conversations", len(conversations), rows, lambda begin, end: conversations[begin:end], 1000
        )

    def user_header(self, messages: list[dict]) -> list[int]:
        """Return the token ids before the text of the user's next turn: the prefix of two different turns."""
        turns = ([*messages, {"role": "user", "content": text}] for text in ("Apple", "zebra"))
        a, b = map(self.tokenizer.chat, turns)
        return a[: common_prefix(a, b)]

    def user_end(self) -> str:
        """Return the text between the user's turn and the assistant's, such as " ASSISTANT:".

        It is "" if a stop id ends the user's turn.
        """
        a, b = (self.tokenizer.chat([{"role": "user", "content": text}])[::-1] for text in ("Apple", "zebra"))
        ids = a[: common_prefix(a, b)][::-1]
        return "" if set(ids) & set(self.stop_ids) else self.tokenizer.decode(ids).strip()

    def _user_turns(self, chats: list[list[dict]], starts: list[str], seeds: list[int]) -> list[str | None]:
        """Return the next user turn of each chat, which begins with its start; None if it did not end."""
        headers = [self.user_header(chat) + self.tokenizer.encode(start, bos=False)
                   for chat, start in zip(chats, starts)]
        # Temperature 0.8 is as sane as 1 with top-p, and needs no search over the vocabulary at every step.
        answers = self._answers(headers, [Sampling(TURN_TOKENS, temperature=0.8, seed=s) for s in seeds])
        end, turns = self.user_end(), []
        for start, answer in zip(starts, answers):
            ids, finish = answer or ([], "")
            turn, complete = start + self.tokenizer.decode(ids), finish == "stop"  # a cut turn is no question
            if ids and end and end in turn:
                turn, complete = turn.split(end, 1)[0], True
            turns.append(turn.strip() if complete else None)
        return turns

    def _converse(
        self, source: str, begin: int, chats: list[list[dict]], next_turns: Callable
    ) -> Iterator[dict]:
        """Yield the rows of conversations side by side.

        chats: their messages so far; begin: number of the first. next_turns(number of the turn, places in
        `chats`, their messages) returns the user's turns, None where the conversation is over.
        """
        rows: list[dict | None] = [None] * len(chats)
        number, live = 0, list(range(len(chats)))
        while live:
            prompts = {}
            for i, turn in zip(live, next_turns(number, live, [chats[i] for i in live])):
                if turn:
                    chats[i] = [*chats[i], {"role": "user", "content": turn}]
                    try:
                        prompts[i] = self.tokenizer.chat(chats[i], at_most=self.max_prompt_tokens)
                    except TooLong:
                        self.left_out += 1
                    except InputError as e:
                        self.left_out, self.refusal = self.left_out + 1, str(e)
            seeds = [seed_of(self.seed, source, number, begin + i) for i in prompts]
            sampling = [Sampling(self.max_new_tokens, self.temperature, seed=seed) for seed in seeds]
            live = []
            for i, answer in zip(prompts, self._answers(list(prompts.values()), sampling)):
                if answer is None:
                    self.left_out += 1
                    continue
                live.append(i)
                chats[i] = [*chats[i], {"role": "assistant", "content": self.tokenizer.decode(answer[0])}]
                ids = prompts[i] + answer[0]
                finished, rows[i] = extend(rows[i], ids, len(prompts[i]), len(ids), source)
                if finished:
                    yield finished
            number += 1
        yield from filter(None, rows)

    def _answers(self, prompts: list[list[int]], sampling: list[Sampling]) -> list[Written | None]:
        """Return the answers to prompts, decoding missing ones. A prompt that is too long has none."""
        keys, known = list(map(Journal.key, prompts, sampling)), self.journal.known
        missing = [i for i, prompt in enumerate(prompts)
                   if keys[i] not in known and len(prompt) <= self.max_prompt_tokens]
        if missing:
            written = decode_answers(
                self.engine, [prompts[i] for i in missing], [sampling[i] for i in missing],
                lambda number, answer: self.journal.add(keys[missing[number]], answer),
            )
            known.update(zip((keys[i] for i in missing), written))
        return [known.get(key) for key in keys]

    def _plan(
        self, source: str, count: int, rows: Callable, made_of: Callable, size: int | None = None
    ) -> None:
        """Plan `count` conversations as shards of `size` (default: `SHARD` for each decoded at a time).

        rows(begin, end) yields the rows of a shard; made_of(begin, end) returns all that they depend on.
        """
        size, before = size or SHARD * self.batch, self.pieces[-1].end if self.pieces else 0
        for begin in range(0, count, size):
            end = min(begin + size, count)
            made_by = json.dumps([self.made_by, made_of(begin, end)])
            digest = hashlib.sha256(made_by.encode()).hexdigest()[:8]
            path = self.folder / f"{source}-{begin:06d}-{digest}.jsonl"
            self.pieces.append(Piece(path, partial(rows, begin, end), before + end))

    def write(self) -> None:
        """Write the missing shards that this process takes from the queue."""
        total = self.pieces[-1].end if self.pieces else 0
        with tqdm(total=total, unit="prompt", desc="text", disable=not self.processes.first) as bar:
            for number in self.processes.queue("text", len(self.pieces)):
                self.write_piece(number)
                bar.update(self.pieces[number].end - bar.n)  # those before it are taken
            bar.update(total - bar.n)

    def write_piece(self, number: int) -> None:
        """Write a shard unless it is there."""
        piece = self.pieces[number]
        self.journal, self.left_out = Journal(piece.path), 0
        if not piece.path.exists():
            lines = [json.dumps({**row, "target": self.target}) for row in piece.rows()]
            lines += [json.dumps({"left_out": self.left_out})] if self.left_out else []
            with atomic_path(piece.path) as part:
                part.write_text("".join(line + "\n" for line in lines))
        self.journal.remove()
