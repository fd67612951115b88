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
FIRST_BATCH = 4  # with a deadline: conversations started at first, and again after each finished one
REJECTED = "rejected by the chat template ({})"


# Yields a prompt and its sampling options, and receives the finished request. Returns rows (see
# `training.data`), and the reason if there are none.
Conversation = Generator[tuple[list[int], Sampling], Request, tuple[list[dict], str]]


class Collector:
    """Plans conversations (`from_prompts`, `synthesize`) and generates the missing ones (`write`).

    target: its `checkpoint.folder.weights_fingerprint`. planned: by digest of each conversation, in order,
    the function that starts it. settings: digest of everything that changes the generated text.
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
        self.settings = digest(target, tokenizer.template, probe, stop_ids, seed, max_new_tokens, temperature,
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
        """Plan `count` conversations of one turn. The user turn is generated too.

        User turns start with `openings`, used cyclically. Raises InputError if the chat template has no
        header before a user turn.
        """
        if count and not self.user_header():
            raise InputError("--synthesize: the chat template starts a user turn with no header; use"
                             " --prompts")
        for i in range(count):
            opening = openings[i % len(openings)] if openings else ""
            inputs = ["synthesized", i, 1, opening]
            self._plan(inputs, self._converse, "synthesized", i, [], [None], opening)

    def _plan(self, inputs: list, converse: Callable[..., Conversation], *arguments) -> None:
        self.planned[digest(self.settings, *inputs)] = partial(converse, *arguments)

    # -- conversations ---------------------------------------------------------------------------------------

    def _converse(
        self, source: str, name: int | str, chat: list[dict], turns: list[str | None], opening: str = ""
    ) -> Conversation:
        """Answer the user turns in order, after the messages of `chat`.

        A turn that is None is generated, starting with `opening`. source, name: make the seed unique.
        """
        rows, row, skip_reason = [], None, ""
        for i, turn in enumerate(turns):
            try:
                if turn is None:
                    turn = yield from self._user_turn(opening, seed_of(self.seed, "user", i, name))
                if not turn:
                    skip_reason = "empty or unfinished user turn"
                    break
                chat = [*chat, {"role": "user", "content": turn}]
                prompt = self._check_length(self.tokenizer.chat(chat))
            except PromptTooLong:
                skip_reason = f"prompt longer than --max-prompt-tokens {self.max_prompt_tokens}"
                break
            except InputError as e:
                skip_reason = REJECTED.format(e)
                break
            seed = seed_of(self.seed, source, i, name)
            answer = (yield prompt, Sampling(self.max_new_tokens, self.temperature, seed=seed)).ids
            chat = [*chat, {"role": "assistant", "content": self.tokenizer.decode(answer)}]
            finished, row = extend(row, prompt + answer, len(prompt), len(prompt + answer), source)
            rows += [finished] if finished else []
        rows += [row] if row else []
        return rows, skip_reason

    def _user_turn(self, opening: str, seed: int) -> Generator[tuple, Request, str]:
        """Generate a user turn that starts with `opening`. Return "" if it exceeds MAX_USER_TOKENS."""
        prompt = self._check_length(self.user_header() + self.tokenizer.encode(opening, bos=False))
        # Instead of top-p, which would sort the vocabulary at every step.
        request = yield prompt, Sampling(MAX_USER_TOKENS, temperature=0.8, seed=seed)
        turn = opening + self.tokenizer.decode(request.ids)
        if (end := self.user_end()) and end in turn:
            return turn.split(end, 1)[0].strip()
        return turn.strip() if request.finish == "stop" else ""  # drop a truncated turn

    def _check_length(self, prompt: list[int]) -> list[int]:
        """Return the prompt. Raises PromptTooLong."""
        if len(prompt) > self.max_prompt_tokens:
            raise PromptTooLong(f"has {len(prompt):,} tokens")
        return prompt

    def _two_turns(self) -> Iterator[list[int]]:
        """Yield the token ids of two user turns with different contents."""
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
        return sorted(self.folder.glob(f"{self.settings}-*.jsonl"))

    def write(self, deadline: float = math.inf, training_seconds: float = 0.0) -> None:
        """Generate this rank's shard of the missing conversations, until `deadline` (`time.monotonic`).

        If the target is sharded, all ranks decode all missing conversations, and rank 0 writes the file. At
        the deadline, running answers are truncated, and conversations that have not started are removed from
        `planned`. The progress bar shows the remaining time, training (`training_seconds`) included.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.processes.is_main:
            for path in self.files:  # a killed run may leave an incomplete line
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.processes.barrier()
        finished = self._finished()
        self.processes.barrier()  # all ranks must read before any rank writes
        missing = [key for key in self.planned if key not in finished]
        sharded_target = self.processes.target_ranks is not None
        keys = missing if sharded_target else self.processes.shard(missing)
        path = self.folder / f"{self.settings}-{self.processes.rank}.jsonl"
        path = Path(os.devnull) if sharded_target and not self.processes.is_main else path
        running: dict[Request, tuple[str, Conversation]] = {}
        tokens, start_time, batch = 0, time.monotonic(), self.engine.batch
        format = "{desc} |{bar:12}| {n_fmt}/{total_fmt} conversations [{elapsed}{postfix}]"
        with progress_bar(total=len(keys), desc="data", bar_format=format) as bar, open(path, "a") as file:

            def advance(key: str, conversation: Conversation, answer: Request | None = None) -> None:
                """Admit the next request of a conversation, or write the finished conversation."""
                try:
                    request = conversation.send(answer)
                    if time.monotonic() < deadline:
                        running[self.engine.admit(*request)] = key, conversation
                except StopIteration as end:
                    if end.value[0] or time.monotonic() < deadline:
                        with writing(path):
                            file.write(self._lines(key, *end.value))
                            file.flush()
                    bar.update()

            def step() -> None:
                nonlocal tokens
                for event in self.engine.step():
                    tokens += len(event.ids)
                    if event.finish == "error":
                        raise InputError(event.request.error)
                    if event.finish:
                        advance(*running.pop(event.request), event.request)
                finished_tokens = tokens - sum(len(request.ids) for request in running)
                expected = (finished_tokens + batch * self.max_new_tokens) / (bar.n + batch) * len(keys)
                now = time.monotonic()
                seconds = max(expected - tokens, 0) * (now - start_time) / max(tokens, 1)
                seconds = max(min(seconds, deadline - now), 0) + training_seconds
                remaining = f"{bar.format_interval(seconds)} left with training"
                bar.set_postfix_str(f"{counted(tokens, 'token')}, {remaining}", refresh=False)
                bar.update(0)

            for key in keys:
                if time.monotonic() >= deadline:
                    break
                advance(key, self.planned[key]())
                # With a deadline start with few: a smaller batch finishes its first conversations earlier.
                max_running = FIRST_BATCH * (1 + bar.n) if deadline < math.inf else batch
                while (not self.engine.free or len(running) >= max_running) and time.monotonic() < deadline:
                    step()
            while running and time.monotonic() < deadline:
                step()
            for request in [*running]:
                self.engine.remove(request)
                advance(*running.pop(request), request)
        self.processes.barrier()
        if deadline < math.inf:
            finished = self._finished()
            self.planned = {key: start for key, start in self.planned.items() if key in finished}

    def _finished(self) -> set[str]:
        """Return the digests of the finished conversations of all ranks."""
        return {line["talk"] for path in self.files for line in read_log(path) if line.get("ended")}

    def _lines(self, key: str, rows: list[dict], skip_reason: str) -> str:
        """Format a conversation as lines of a shard. The last line has "ended"."""
        rows = rows or [{"ids": [], "left_out": skip_reason}]
        lines = [row | {"target": self.target, "talk": key} for row in rows]
        lines[-1]["ended"] = True
        return "".join(json.dumps(line) + "\n" for line in lines)

    def read(self, vocab_size: int) -> list[Line]:
        """Read the planned conversations, in order. Raises InputError if one is missing."""
        order = {key: i for i, key in enumerate(self.planned)}
        lines = [x for x in read_shards(self.files, vocab_size, self.target) if x.talk in order]
        lines.sort(key=lambda line: order[line.talk])
        if order.keys() - {line.talk for line in lines if line.ended}:
            raise InputError(f"{self.folder}: conversations of other processes are missing; --out must be on"
                             " a disk that all machines share")
        return lines
