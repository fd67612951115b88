"""Shards of training text: the target answers prompts, writes user turns, or conversations are taken over.

The name of a shard ends in a digest of all that it was made from: another run with the same prompts, settings
and target finds it again, and no other run does. An answer depends on its place among the prompts, never on
who writes it: several processes take shards from one queue, and whoever comes after a kill goes on with what
was left.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from common.errors import InputError
from common.files import atomic_path
from engine.run import Output
from engine.seats import Seats
from sampling.noise import seed_of
from sampling.options import Sampling
from tokens.ids import common_prefix
from tokens.tokenizer import Tokenizer, TooLong
from training.corpus import extend, of_conversation
from training.journal import Journal, key_of
from training.processes import Processes

TURN_TOKENS = 96  # most tokens of a user turn that the model writes
SHARD = 16  # conversations for each that is decoded at a time: few places are empty while the last ones end


def user_header(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """Token ids up to where the user begins to write the next turn: what two different next turns share."""
    a, b = (tokenizer.chat([*messages, {"role": "user", "content": text}]) for text in ("Apple", "zebra"))
    return a[: common_prefix(a, b)]


def user_end(tokenizer: Tokenizer, stop_ids: list[int]) -> str:
    """The text that leads from the user's turn to the assistant's, such as " ASSISTANT:"; "" if a stop id
    ends the user's turn.
    """
    a, b = (tokenizer.chat([{"role": "user", "content": text}])[::-1] for text in ("Apple", "zebra"))
    ids = a[: common_prefix(a, b)][::-1]
    return "" if set(ids) & set(stop_ids) else tokenizer.decode(ids).strip()


class Piece(NamedTuple):
    """A shard that was requested. rows: gives what it holds. end: conversations up to its last one."""

    path: Path
    rows: Callable[[], Iterator[dict]]
    end: int


class Collector:
    """Plans shards (`from_prompts`, `synthesize`, `from_conversations`) and writes those that are missing.

    `pieces` are all that were planned, in order.

    `target` is its `checkpoint.loading.identity`, `writer` that of a copy of it that writes the text. The
    last line of a shard counts what was left out. `refusal` is what the chat template said when it last
    refused something, "" if it never did.
    """

    def __init__(
        self, seats: Seats, tokenizer: Tokenizer, folder: str | Path, *, target: str, seed: int,
        max_new_tokens: int, temperature: float, max_prompt_tokens: int, processes: Processes | None = None,
        quiet: bool = False, writer: str | None = None,
    ):
        self.seats, self.tokenizer, self.folder, self.target = seats, tokenizer, Path(folder), target
        self.seed, self.max_new_tokens, self.temperature = seed, max_new_tokens, temperature
        self.max_prompt_tokens, self.quiet = max_prompt_tokens, quiet
        self.processes = processes or Processes()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.pieces: list[Piece] = []
        self.left_out = 0  # of the current shard
        self.journal: Journal | None = None  # of the current shard
        self.refusal = ""
        self.stop_ids = seats.state.stop_ids.tolist()
        probe = tokenizer.chat([{"role": "user", "content": "Probe: 1 + 1 = äß?"}])
        self.made_by = [
            target, tokenizer.template, probe, self.stop_ids, seed, max_new_tokens, temperature,
            max_prompt_tokens, TURN_TOKENS, *([writer] if writer else []),
        ]

    @property
    def shards(self) -> list[Path]:
        """All that were planned, in order."""
        return [piece.path for piece in self.pieces]

    def from_prompts(self, prompts: list[list[dict]]) -> None:
        """Plan to answer the user messages of conversations, which may begin with a system message.

        A conversation ends where all that was said no longer fits in `max_prompt_tokens`.
        """
        def rows(begin: int, end: int) -> Iterator[dict]:
            part = prompts[begin:end]
            turns = [[m["content"] for m in messages if m["role"] == "user"] for messages in part]

            def next_turns(number: int, places: list[int], chats: list[list[dict]]) -> list[str | None]:
                if number == 0:
                    self.left_out += sum(not turns[i][0] for i in places)
                return [turns[i][number] if number < len(turns[i]) else None for i in places]

            system = [[m for m in messages if m["role"] == "system"] for messages in part]
            return self._converse("prompts", begin, system, next_turns)

        self._plan("prompts", len(prompts), rows, lambda begin, end: prompts[begin:end])

    def synthesize(self, count: int, turns: int = 1, openings: tuple[str, ...] = ()) -> None:
        """Plan to let the model write both parts of `count` conversations of `turns` user turns.

        The first turns begin with `openings`, one after the other, which lead it to subjects. Raises
        InputError if the chat template has no header for the user's turn.
        """
        if count and not user_header(self.tokenizer, []):
            raise InputError(
                "--synthesize: the chat template puts nothing before a user's turn;"
                " the model cannot write one"
            )

        def rows(begin: int, end: int) -> Iterator[dict]:
            def next_turns(number: int, places: list[int], chats: list[list[dict]]) -> list[str | None]:
                if number == turns:
                    return [None] * len(places)
                first = openings if number == 0 else ()
                starts = [first[(begin + i) % len(first)] if first else "" for i in places]
                written = self._user_turns(
                    chats, starts, [seed_of(self.seed, "user", number, begin + i) for i in places]
                )
                self.left_out += written.count(None) if number == 0 else 0
                return written

            return self._converse("synthesized", begin, [[] for _ in range(begin, end)], next_turns)

        self._plan("synthesized", count, rows, lambda begin, end: [begin, end, turns, *openings])

    def from_conversations(self, conversations: list[list[dict]]) -> None:
        """Plan to take conversations as they are. Those that the template refuses (roles out of order) are
        left out; `write` raises InputError if it refuses every one.
        """
        refused = 0

        def rows(begin: int, end: int) -> Iterator[dict]:
            nonlocal refused
            for messages in conversations[begin:end]:
                try:
                    yield from of_conversation(self.tokenizer, messages, self.stop_ids)
                except InputError as e:
                    refused, self.left_out, self.refusal = refused + 1, self.left_out + 1, str(e)
                    if refused == len(conversations):
                        message = f"--conversations: the chat template takes none of them ({e})"
                        raise InputError(message) from None

        self._plan(
            "conversations", len(conversations), rows, lambda begin, end: conversations[begin:end], size=1000
        )

    def _user_turns(
        self, chats: list[list[dict]], starts: list[str], seeds: list[int]
    ) -> list[str | None]:
        """The next user turn of each chat, which begins with its start; None if the model does not end it."""
        headers = [
            user_header(self.tokenizer, chat) + self.tokenizer.encode(start, bos=False)
            for chat, start in zip(chats, starts)
        ]
        # Temperature 0.8 is as sane as 1 with top-p, and needs no search over the vocabulary at every step.
        outputs = self._generate(headers, [Sampling(TURN_TOKENS, temperature=0.8, seed=s) for s in seeds])
        end, turns = user_end(self.tokenizer, self.stop_ids), []
        for start, output in zip(starts, outputs):
            turn = start + self.tokenizer.decode(output.ids) if output else ""
            # A turn that is cut in the middle is no question.
            complete = output is not None and output.finish == "stop"
            if end and end in turn:
                turn, complete = turn.split(end, 1)[0], True
            turns.append(turn.strip() if complete else None)
        return turns

    def _converse(
        self, source: str, begin: int, chats: list[list[dict]], next_turns: Callable
    ) -> Iterator[dict]:
        """The rows of conversations side by side. chats: their messages so far; `begin`: number of the first.

        next_turns(number of the turn, places in `chats`, their messages) gives the user's turns, None where
        the conversation is over.
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
            for i, output in zip(prompts, self._generate(list(prompts.values()), sampling)):
                if output is None:
                    self.left_out += 1
                    continue
                live.append(i)
                chats[i] = [*chats[i], {"role": "assistant", "content": self.tokenizer.decode(output.ids)}]
                ids = prompts[i] + output.ids
                finished, rows[i] = extend(rows[i], ids, len(prompts[i]), len(ids), source)
                if finished:
                    yield finished
            number += 1
        yield from filter(None, rows)

    def _generate(self, prompts: list[list[int]], sampling: list[Sampling]) -> list[Output | None]:
        """Decode prompts that have not been answered yet; None for those longer than `max_prompt_tokens`."""
        outputs: list[Output | None] = [None] * len(prompts)
        keys = [key_of(*job) for job in zip(prompts, sampling)]
        missing = []
        for i, (key, prompt) in enumerate(zip(keys, prompts)):
            if key in self.journal.known:
                outputs[i] = Output(*self.journal.known[key], [], [], 0.0, 0.0)
            elif len(prompt) <= self.max_prompt_tokens:
                missing.append(i)

        def ended(number: int, output: Output) -> None:
            if self.processes.leads:
                self.journal.add(keys[missing[number]], output)

        if missing:
            jobs = [prompts[i] for i in missing], [sampling[i] for i in missing]
            written = self.seats.generate(*jobs, ended)
            for i, output in zip(missing, written):
                outputs[i] = output
        return outputs

    def _plan(
        self, source: str, count: int, rows: Callable, made_of: Callable, size: int | None = None
    ) -> None:
        """Plan `count` conversations as shards of `size` (default: `SHARD` for each place).

        rows(begin, end) gives the rows of a shard, made_of(begin, end) what they depend on.
        """
        size, before = size or SHARD * self.seats.batch, self.pieces[-1].end if self.pieces else 0
        for begin in range(0, count, size):
            end = min(begin + size, count)
            made_by = json.dumps([self.made_by, made_of(begin, end)])
            digest = hashlib.sha256(made_by.encode()).hexdigest()[:8]
            path = self.folder / f"{source}-{begin:06d}-{digest}.jsonl"
            self.pieces.append(Piece(path, partial(rows, begin, end), before + end))

    def write(self) -> None:
        """Write the shards that are missing: those that this process, or its team, takes from the queue."""
        total, quiet = self.pieces[-1].end if self.pieces else 0, self.quiet or not self.processes.first
        with tqdm(total=total, unit="prompt", desc="text", disable=quiet) as bar:
            for number in self.processes.queue("text", len(self.pieces)):
                self.write_piece(number)
                bar.update(self.pieces[number].end - bar.n)  # those before it are taken
            bar.update(total - bar.n)

    def write_piece(self, number: int) -> None:
        """Write a shard unless it is there."""
        piece, lead = self.pieces[number], self.processes.leads
        self.journal, self.left_out = Journal(piece.path), 0
        if not self.processes.told(piece.path.exists()):
            # What the lead has read, or the processes of a team would decode different prompts together.
            self.journal.known = self.processes.told(self.journal.read() if lead else {})
            lines = [json.dumps({**row, "target": self.target}) for row in piece.rows()]
            lines += [json.dumps({"left_out": self.left_out})] if self.left_out else []
            if lead:
                with atomic_path(piece.path) as part:
                    part.write_text("".join(line + "\n" for line in lines))
        if lead:
            self.journal.remove()
