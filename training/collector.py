"""Generate the training data: the target answers prompts, or generates user turns and answers them.

Conversations are decoded in a batch. When one ends, it is appended to the rank's file. The file name has a
digest of target and settings, and each conversation a digest of its inputs, so that a resumed run generates
only what is missing. Seeds depend on the conversation, not on the rank.
"""
from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path

from common.errors import InputError, counted
from common.hashes import seed_of
from common.progress import progress_bar
from common.writing import digest, writing
from engine.engine import Engine
from engine.request import Request
from engine.sampling import Sampling
from tokens.tokenizer import PromptTooLong, Tokenizer, common_prefix
from training.data import Line, extend, read_shards
from training.processes import ProcessGroup
from training.report import read_log

MAX_USER_TOKENS = 96  # of a synthesized user turn
FIRST_BATCH = 4  # with a deadline: conversations started at first, and for each one that has ended
REFUSED = "rejected by the chat template ({})"


# Yields a prompt and its sampling options, and receives the finished request. Returns rows (see
# `training.data`), and the reason if there are none.
Conversation = Generator[tuple[list[int], Sampling], Request, tuple[list[dict], str]]


class Collector:
    """Plans conversations (`from_prompts`, `synthesize`) and generates the missing ones (`write`).

    target: its `checkpoint.folder.identity`. planned: digest of each conversation, in order, and the function
    that starts it.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, folder: Path, *, stop_ids: list[int], target: str,
        seed: int, max_new_tokens: int, temperature: float, max_prompt_tokens: int,
        processes: ProcessGroup,
    ):
        self.engine, self.tokenizer, self.folder, self.target = engine, tokenizer, folder, target
        self.stop_ids, self.seed, self.max_new_tokens = stop_ids, seed, max_new_tokens
        self.temperature, self.max_prompt_tokens = temperature, max_prompt_tokens
        self.processes = processes
        self.planned: dict[str, Callable[[], Conversation]] = {}
        probe = tokenizer.chat([{"role": "user", "content": "Probe: 1 + 1 = äß?"}])
        self.made_by = digest(target, tokenizer.template, probe, stop_ids, seed, max_new_tokens, temperature,
                              max_prompt_tokens, MAX_USER_TOKENS)

    def from_prompts(self, prompts: list[list[dict]]) -> None:
        """Plan answers to the user messages of conversations, which may start with a system message.

        A conversation ends when its next prompt exceeds `max_prompt_tokens`.
        """
        for messages in prompts:
            system = [m for m in messages if m["role"] == "system"]
            turns = [m["content"] for m in messages if m["role"] == "user"]
            self._plan(["prompts", messages], self._converse, "prompts", json.dumps(messages), system, turns)

    def synthesize(self, count: int, openings: tuple[str, ...] = ()) -> None:
        """Plan `count` conversations of one turn, whose user turn is generated too.

        User turns start with `openings`, in turn. Raises InputError if the chat template has no header for
        the user's turn.
        """
        if count and not self.user_header():
            raise InputError("--synthesize: the chat template has no header of a user turn; use --prompts")
        for i in range(count):
            opening = openings[i % len(openings)] if openings else ""
            made_of = ["synthesized", i, 1, opening]
            self._plan(made_of, self._converse, "synthesized", i, [], [None], opening)

    def _plan(self, made_of: list, steps: Callable[..., Conversation], *arguments) -> None:
        self.planned[digest(self.made_by, *made_of)] = partial(steps, *arguments)

    # -- conversations ---------------------------------------------------------------------------------------

    def _converse(
        self, source: str, name: int | str, chat: list[dict], turns: list[str | None], opening: str = ""
    ) -> Conversation:
        """Answer the user turns in order, after the messages of `chat`.

        A turn that is None is generated, starting with `opening`. source, name: make the seed unique.
        """
        rows, row, left_out = [], None, ""
        for i, turn in enumerate(turns):
            try:
                if turn is None:
                    turn = yield from self._user_turn(opening, seed_of(self.seed, "user", i, name))
                if not turn:
                    left_out = "empty or unfinished user turn"
                    break
                chat = [*chat, {"role": "user", "content": turn}]
                prompt = self._short(self.tokenizer.chat(chat))
            except PromptTooLong:
                left_out = f"prompt longer than --max-prompt-tokens {self.max_prompt_tokens}"
                break
            except InputError as e:
                left_out = REFUSED.format(e)
                break
            seed = seed_of(self.seed, source, i, name)
            answer = (yield prompt, Sampling(self.max_new_tokens, self.temperature, seed=seed)).ids
            chat = [*chat, {"role": "assistant", "content": self.tokenizer.decode(answer)}]
            finished, row = extend(row, prompt + answer, len(prompt), len(prompt + answer), source)
            rows += [finished] if finished else []
        rows += [row] if row else []
        return rows, left_out

    def _user_turn(self, start: str, seed: int) -> Generator[tuple, Request, str]:
        """Generate a user turn that starts with `start`. Return "" if it did not end."""
        header = self._short(self.user_header() + self.tokenizer.encode(start, bos=False))
        # As good as temperature 1 with top-p, without sorting the vocabulary at every step.
        written = yield header, Sampling(MAX_USER_TOKENS, temperature=0.8, seed=seed)
        turn = start + self.tokenizer.decode(written.ids)
        if (end := self.user_end()) and end in turn:
            return turn.split(end, 1)[0].strip()
        return turn.strip() if written.finish == "stop" else ""  # drop a truncated turn

    def _short(self, prompt: list[int]) -> list[int]:
        """Return the prompt. Raises PromptTooLong."""
        if len(prompt) > self.max_prompt_tokens:
            raise PromptTooLong(f"has {len(prompt):,} tokens")
        return prompt

    def _two_turns(self) -> Iterator[list[int]]:
        """Return the token ids of two different user turns."""
        return (self.tokenizer.chat([{"role": "user", "content": text}]) for text in ("Apple", "zebra"))

    def user_header(self) -> list[int]:
        """Return the token ids before the content of a user turn: the common prefix of two turns."""
        a, b = self._two_turns()
        return a[: common_prefix(a, b)]

    def user_end(self) -> str:
        """Return the text between a user turn and the answer, such as " ASSISTANT:".

        It is "" if a stop id ends the user turn.
        """
        a, b = (ids[::-1] for ids in self._two_turns())
        ids = a[: common_prefix(a, b)][::-1]
        return "" if set(ids) & set(self.stop_ids) else self.tokenizer.decode(ids).strip()

    # -- files -----------------------------------------------------------------------------------------------

    @property
    def files(self) -> list[Path]:
        """The files of all ranks, of this run and of earlier runs with the same settings."""
        return sorted(self.folder.glob(f"{self.made_by}-*.jsonl"))

    def write(self, deadline: float = math.inf, training_seconds: float = 0.0) -> None:
        """Generate this rank's shard of the missing conversations, until `deadline` (`time.monotonic`).

        If the target is sharded, all ranks decode all of them, and rank 0 writes the file. At the deadline,
        running answers are truncated, and conversations that have not started are removed from `planned`. The
        progress bar shows the remaining time, training (`training_seconds`) included.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.processes.is_main:
            for path in self.files:  # a killed run may leave an incomplete line
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.processes.barrier()
        known = {line["talk"] for path in self.files for line in read_log(path) if line.get("ended")}
        self.processes.barrier()  # all ranks have read before any writes
        missing = [talk for talk in self.planned if talk not in known]
        together = self.processes.target_ranks is not None
        mine = missing if together else self.processes.shard(missing)
        path = self.folder / f"{self.made_by}-{self.processes.rank}.jsonl"
        path = Path(os.devnull) if together and not self.processes.is_main else path
        live: dict[Request, tuple[str, Conversation]] = {}
        tokens, began, batch = 0, time.monotonic(), self.engine.batch
        form = "{desc} |{bar:12}| {n_fmt}/{total_fmt} conversations [{elapsed}{postfix}]"
        with progress_bar(total=len(mine), desc="data", bar_format=form) as bar, open(path, "a") as file:

            def advance(talk: str, steps: Conversation, answer: Request | None = None) -> None:
                """Admit the next request of a conversation, or write the finished conversation."""
                try:
                    request = steps.send(answer)
                    if time.monotonic() < deadline:
                        live[self.engine.admit(*request)] = talk, steps
                except StopIteration as end:
                    if end.value[0] or time.monotonic() < deadline:
                        with writing(path):
                            file.write(self._lines(talk, *end.value))
                            file.flush()
                    bar.update()

            def step() -> None:
                nonlocal tokens
                for event in self.engine.step():
                    tokens += len(event.ids)
                    if event.finish:
                        advance(*live.pop(event.request), event.request)
                ended = tokens - sum(len(request.ids) for request in live)
                expected = (ended + batch * self.max_new_tokens) / (bar.n + batch) * len(mine)
                now = time.monotonic()
                left = min(max(expected - tokens, 0) * (now - began) / max(tokens, 1), deadline - now)
                left = bar.format_interval(max(left, 0) + training_seconds)
                bar.set_postfix_str(f"{counted(tokens, 'token')}, {left} left with training", refresh=False)
                bar.update(0)

            for talk in mine:
                if time.monotonic() >= deadline:
                    break
                advance(talk, self.planned[talk]())
                # With a deadline start with few: a smaller batch finishes its first conversations earlier.
                most = FIRST_BATCH * (1 + bar.n) if deadline < math.inf else batch
                while (not self.engine.free or len(live) >= most) and time.monotonic() < deadline:
                    step()
            while live and time.monotonic() < deadline:
                step()
            for request in [*live]:
                self.engine.remove(request)
                advance(*live.pop(request), request)
        self.processes.barrier()
        if deadline < math.inf:
            known = {line["talk"] for path in self.files for line in read_log(path) if line.get("ended")}
            self.planned = {talk: steps for talk, steps in self.planned.items() if talk in known}

    def _lines(self, talk: str, rows: list[dict], left_out: str) -> str:
        """Format a conversation as lines of a shard. The last one is marked."""
        rows = rows or [{"ids": [], "left_out": left_out}]
        marked = [row | {"target": self.target, "talk": talk} for row in rows]
        marked[-1]["ended"] = True
        return "".join(json.dumps(row) + "\n" for row in marked)

    def read(self, vocab_size: int) -> list[Line]:
        """Read the planned conversations, in order. Raises InputError if one is missing."""
        order = {talk: i for i, talk in enumerate(self.planned)}
        found = read_shards(self.files, vocab_size, self.target)
        lines = sorted((x for x in found if x.talk in order), key=lambda line: order[line.talk])
        if order.keys() - {line.talk for line in lines if line.ended}:
            raise InputError(f"{self.folder}: conversations of other processes are missing; --out must be on"
                             " a disk that all machines share")
        return lines
