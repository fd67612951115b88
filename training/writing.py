"""Writing the training text: the target answers prompts, or writes user turns and answers them.

Conversations are decoded side by side, and each is appended to a file of this process when it ends. The file
is named by a digest of the target and the settings, a conversation in it by a digest of all that it was made
from: another run with the same prompts, settings and target finds it again, and no other run does. An answer
depends on the settings and its prompt, one to a turn of the model's own on that turn's number, never on the
process: several processes share the work, and a later run writes what a killed one did not end.
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
from common.progress import live_bar
from common.writing import digest, writing
from engine.engine import Engine
from engine.request import Request
from sampling.noise import seed_of
from sampling.options import Sampling
from tokens.tokenizer import PromptTooLong, Tokenizer, common_prefix
from training.data import Line, extend, read_shards
from training.processes import Processes
from training.report import read_log

MAX_USER_TOKENS = 96  # of a user turn that the model writes
REFUSED = "refused by the chat template ({})"


# A conversation on its way yields what is to be decoded, and receives the request when that has ended. It
# returns its rows (see `training.data`), and the reason if there are none.
Steps = Generator[tuple[list[int], Sampling], Request, tuple[list[dict], str]]


class Collector:
    """Plans conversations (`from_prompts`, `synthesize`) and writes the missing ones.

    target: its `checkpoint.folder.identity`. `planned` are the digests of the conversations of this run, in
    order, each with a function that starts it.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, folder: Path, *, stop_ids: list[int], target: str,
        seed: int, max_new_tokens: int, temperature: float, max_prompt_tokens: int,
        processes: Processes,
    ):
        self.engine, self.tokenizer, self.folder, self.target = engine, tokenizer, folder, target
        self.stop_ids, self.seed, self.max_new_tokens = stop_ids, seed, max_new_tokens
        self.temperature, self.max_prompt_tokens = temperature, max_prompt_tokens
        self.processes = processes
        self.planned: dict[str, Callable[[], Steps]] = {}
        probe = tokenizer.chat([{"role": "user", "content": "Probe: 1 + 1 = äß?"}])
        self.made_by = digest(target, tokenizer.template, probe, stop_ids, seed, max_new_tokens, temperature,
                              max_prompt_tokens, MAX_USER_TOKENS)

    def from_prompts(self, prompts: list[list[dict]]) -> None:
        """Plan to answer the user messages of conversations, which may begin with a system message.

        A conversation ends where its text no longer fits in `max_prompt_tokens`.
        """
        for messages in prompts:
            system = [m for m in messages if m["role"] == "system"]
            turns = [m["content"] for m in messages if m["role"] == "user"]
            self._plan(["prompts", messages], self._converse, "prompts", json.dumps(messages), system, turns)

    def synthesize(self, count: int, openings: tuple[str, ...] = ()) -> None:
        """Plan to let the model write both parts of `count` conversations of one turn each.

        The user's turns begin with `openings`, one after the other, which lead it to subjects. Raises
        InputError if the chat template has no header for the user's turn.
        """
        if count and not self.user_header():
            raise InputError("--synthesize: the chat template puts nothing before a user's turn")
        for i in range(count):
            opening = openings[i % len(openings)] if openings else ""
            made_of = ["synthesized", i, 1, opening]
            self._plan(made_of, self._converse, "synthesized", i, [], [None], opening)

    def _plan(self, made_of: list, steps: Callable[..., Steps], *arguments) -> None:
        self.planned[digest(self.made_by, *made_of)] = partial(steps, *arguments)

    # -- conversations ---------------------------------------------------------------------------------------

    def _converse(
        self, source: str, name: int | str, chat: list[dict], turns: list[str | None], opening: str = ""
    ) -> Steps:
        """Answer the user's turns one by one, after the messages of `chat`.

        The target writes a turn that is None, which begins with `opening`. source, name: tell conversations
        apart, whose answers are drawn with other seeds.
        """
        rows, row, left_out = [], None, ""
        for i, turn in enumerate(turns):
            try:
                if turn is None:
                    turn = yield from self._user_turn(opening, seed_of(self.seed, "user", i, name))
                if not turn:
                    left_out = "with an empty prompt or one without an end"
                    break
                chat = [*chat, {"role": "user", "content": turn}]
                prompt = self._short(self.tokenizer.chat(chat, at_most=self.max_prompt_tokens))
            except PromptTooLong:
                left_out = f"longer than --max-prompt-tokens {self.max_prompt_tokens}"
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
        """Let the target write a user's turn, which begins with `start`. Return "" if it did not end."""
        header = self._short(self.user_header() + self.tokenizer.encode(start, bos=False))
        # Temperature 0.8 is as sane as 1 with top-p, and needs no search over the vocabulary at every step.
        written = yield header, Sampling(MAX_USER_TOKENS, temperature=0.8, seed=seed)
        turn = start + self.tokenizer.decode(written.ids)
        if (end := self.user_end()) and end in turn:
            return turn.split(end, 1)[0].strip()
        return turn.strip() if written.finish == "stop" else ""  # a cut turn is no question

    def _short(self, prompt: list[int]) -> list[int]:
        """Return a prompt. Raises PromptTooLong if it is."""
        if len(prompt) > self.max_prompt_tokens:
            raise PromptTooLong(f"has {len(prompt):,} tokens")
        return prompt

    def _two_turns(self) -> Iterator[list[int]]:
        """Return the token ids of two different turns of a user."""
        return (self.tokenizer.chat([{"role": "user", "content": text}]) for text in ("Apple", "zebra"))

    def user_header(self) -> list[int]:
        """Return the token ids before the text of a user's turn: the prefix of two different turns."""
        a, b = self._two_turns()
        return a[: common_prefix(a, b)]

    def user_end(self) -> str:
        """Return the text between the user's turn and the assistant's, such as " ASSISTANT:".

        It is "" if a stop id ends the user's turn.
        """
        a, b = (ids[::-1] for ids in self._two_turns())
        ids = a[: common_prefix(a, b)][::-1]
        return "" if set(ids) & set(self.stop_ids) else self.tokenizer.decode(ids).strip()

    # -- files -----------------------------------------------------------------------------------------------

    @property
    def files(self) -> list[Path]:
        """The files of all processes, of this run and of earlier ones with its settings."""
        return sorted(self.folder.glob(f"{self.made_by}-*.jsonl"))

    def write(self, deadline: float = math.inf) -> None:
        """Write this process's share of the missing conversations, until `deadline` (`time.monotonic`).

        Conversations that are missing then are not planned any more.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.processes.first:
            for path in self.files:  # a line without its end, as a kill leaves it
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.processes.wait()
        known = {line["talk"] for path in self.files for line in read_log(path) if line.get("ended")}
        self.processes.wait()  # all have read before any writes
        missing = [talk for talk in self.planned if talk not in known]
        mine = self.processes.share(missing)
        path = self.folder / f"{self.made_by}-{self.processes.rank}.jsonl"
        live: dict[Request, tuple[str, Steps]] = {}
        tokens = 0
        with live_bar(total=len(mine), unit="conversation", desc="text") as bar, open(path, "a") as file:

            def go_on(talk: str, steps: Steps, answer: Request | None = None) -> None:
                """Let a conversation go on to what it decodes next, or write it."""
                try:
                    live[self.engine.admit(*steps.send(answer))] = talk, steps
                except StopIteration as end:
                    with writing(path):
                        file.write(self._lines(talk, *end.value))
                        file.flush()
                    bar.update()

            def step() -> None:
                nonlocal tokens
                for event in self.engine.step():
                    tokens += len(event.ids)
                    if event.finish:
                        go_on(*live.pop(event.request), event.request)
                bar.set_postfix_str(counted(tokens, "token"), refresh=False)
                bar.update(0)

            for talk in mine:
                if time.monotonic() >= deadline:
                    break
                go_on(talk, self.planned[talk]())
                while not self.engine.free and time.monotonic() < deadline:
                    step()
            while live and time.monotonic() < deadline:
                step()
        for request in live:
            self.engine.remove(request)
        self.processes.wait()
        if deadline < math.inf:
            known = {line["talk"] for path in self.files for line in read_log(path) if line.get("ended")}
            self.planned = {talk: steps for talk, steps in self.planned.items() if talk in known}

    def _lines(self, talk: str, rows: list[dict], left_out: str) -> str:
        """Return a conversation as lines of a file. The last one is marked."""
        rows = rows or [{"ids": [], "left_out": left_out}]
        marked = [row | {"target": self.target, "talk": talk} for row in rows]
        marked[-1]["ended"] = True
        return "".join(json.dumps(row) + "\n" for row in marked)

    def read(self, vocab_size: int) -> list[Line]:
        """Read the planned conversations, in order. Raises InputError if one is not there."""
        place = {talk: i for i, talk in enumerate(self.planned)}
        found = read_shards(self.files, vocab_size, self.target)
        lines = sorted((x for x in found if x.talk in place), key=lambda line: place[line.talk])
        if place.keys() - {line.talk for line in lines if line.ended}:
            raise InputError(f"{self.folder}: conversations that another process has written are not here;"
                             " --out must lie on a disk that all machines share")
        return lines
