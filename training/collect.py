"""The target answers: prompts of a file, or user turns it writes itself. Kept as shards, so that a broken run
goes on.

A shard is one JSON-lines file of rows (training.corpus). Its name ends in a digest of all that made it: other
prompts, settings or another target never find it. Several processes share the work, each decoding its own
shards.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from common.errors import InputError
from common.files import atomic_path
from engine.decoder import Decoder
from sampling.noise import seed_of
from sampling.options import Sampling
from tokens.ids import common_prefix
from tokens.tokenizer import Tokenizer
from training.corpus import extend, of_conversation
from training.processes import Processes

TURN_TOKENS = 96  # most tokens of a user turn that the model writes


def user_header(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """Token ids up to where the user begins to write the next turn: what two different next turns have in
    common.
    """
    a, b = (tokenizer.chat([*messages, {"role": "user", "content": text}]) for text in ("Apple", "zebra"))
    return a[: common_prefix(a, b)]


def user_end(tokenizer: Tokenizer, stop_ids: list[int]) -> str:
    """The text with which a template goes on from the user's turn to the assistant's, such as " ASSISTANT:",
    where no stop id ends the turn; "" where one does.
    """
    a, b = (tokenizer.chat([{"role": "user", "content": text}])[::-1] for text in ("Apple", "zebra"))
    ids = a[: common_prefix(a, b)][::-1]
    return "" if set(ids) & set(stop_ids) else tokenizer.decode(ids).strip()


class Collector:
    """Writes the shards that are not there yet; `shards` lists all that belong to what was asked for, in
    order.

    `target` is its `checkpoint.identity`. A shard's last line counts what was left out; `refusal` is what the
    chat template said when it last refused something, "" if it never did.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, folder: str | Path, *, target: str, seed: int, max_new_tokens: int,
                 temperature: float, max_prompt_tokens: int, processes: Processes | None = None,
                 quiet: bool = False):
        self.decoder, self.tokenizer, self.folder = decoder, tokenizer, Path(folder)
        self.seed, self.max_new_tokens, self.temperature = seed, max_new_tokens, temperature
        self.max_prompt_tokens, self.quiet = max_prompt_tokens, quiet
        self.processes = processes or Processes()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards: list[Path] = []
        self.left_out = 0  # of the shard at hand
        self.refusal = ""
        self.target = target
        self.stop_ids = decoder.state.stop_ids.tolist()
        probe = tokenizer.chat([{"role": "user", "content": "Probe: 1 + 1 = äß?"}])
        self.made_by = [
            target, tokenizer.template, probe, self.stop_ids, seed, max_new_tokens, temperature,
            max_prompt_tokens, TURN_TOKENS,
        ]

    def from_prompts(self, prompts: list[list[dict]]) -> None:
        """Answer conversations of which there are the user's messages only, maybe a system message before
        them. Where one no longer fits in `max_prompt_tokens` with all that was said before, the conversation
        ends.
        """
        def rows(begin: int, end: int) -> Iterator[dict]:
            chats = [[m for m in messages if m["role"] == "system"] for messages in prompts[begin:end]]
            asked = [
                [m["content"] for m in messages if m["role"] == "user"] for messages in prompts[begin:end]
            ]

            def turns(number: int, at: list[int], chats: list[list[dict]]) -> list[str | None]:
                self.left_out += sum(not asked[i][0] for i in at) if not number else 0
                return [asked[i][number] if number < len(asked[i]) else None for i in at]

            return self._converse("prompts", begin, chats, turns)

        self._write_shards("prompts", len(prompts), rows, lambda begin, end: prompts[begin:end])

    def synthesized(self, count: int, turns: int = 1, openings: tuple[str, ...] = ()) -> None:
        """Let the model write the user's part of `count` conversations too: `turns` of them in each, the
        first ones beginning with `openings`, in turns, to lead it to subjects (empty: as it likes). Raises
        InputError if the template has no header.
        """
        if count and not user_header(self.tokenizer, []):
            raise InputError(
                "--synthesize: the chat template puts nothing before a user's turn; the model cannot write one"
            )
        ends = user_end(self.tokenizer, self.stop_ids)

        def rows(begin: int, end: int) -> Iterator[dict]:
            def write(number: int, at: list[int], chats: list[list[dict]]) -> list[str | None]:
                if number == turns:
                    return [None] * len(at)
                begins = [
                    openings[(begin + i) % len(openings)] if openings and not number else "" for i in at
                ]
                headers = [
                    user_header(self.tokenizer, chat) + self.tokenizer.encode(text, bos=False) for chat,
                    text in zip(chats, begins)
                ]
                # Temperature 0.8 rather than 1 with top-p: as sane, and without a search over the vocabulary
                # at every step.
                sampling = [
                    Sampling(
                        TURN_TOKENS, temperature=0.8, seed=seed_of(self.seed, "user", number, begin + i)
                    ) for i in at
                ]
                fits = [len(h) <= self.max_prompt_tokens for h in headers]
                outputs = iter(
                    self._generate(
                        [h for h, ok in zip(headers, fits) if ok], [s for s, ok in zip(sampling, fits) if ok]
                    )
                )
                written = []
                for text, ok in zip(begins, fits):
                    output = next(outputs) if ok else None
                    turn = text + self.tokenizer.decode(output.ids) if output else ""
                    # A turn cut in the middle is no question.
                    whole = output is not None and output.finish == "stop"
                    if ends and ends in turn:
                        turn, whole = turn.split(ends, 1)[0], True
                    written.append(turn.strip() if whole else None)
                self.left_out += written.count(None) if not number else 0
                return written

            return self._converse("synthesized", begin, [[] for _ in range(begin, end)], write)

        self._write_shards("synthesized", count, rows, lambda begin, end: [begin, end, turns, *openings])

    def from_conversations(self, conversations: list[list[dict]]) -> None:
        """Take conversations as they are. Those that the template refuses (roles out of order) are left out.

        Raises InputError if it refuses every one.
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
                        raise InputError(
                            f"--conversations: the chat template takes none of them ({e})"
                        ) from None

        self._write_shards(
            "conversations", len(conversations), rows, lambda begin, end: conversations[begin:end], size=1000
        )

    def _converse(
        self, source: str, begin: int, chats: list[list[dict]], next_turns: Callable
    ) -> Iterator[dict]:
        """Conversations side by side, `chats` their messages so far. next_turns(number, which, their
        messages) -> the user's turns, None: it is over.
        """
        rows: list[dict | None] = [None] * len(chats)
        number, live = 0, list(range(len(chats)))
        while live:
            asked = next_turns(number, live, [chats[i] for i in live])
            prompts = {}
            for i, turn in zip(live, asked):
                if turn:
                    chats[i] = [*chats[i], {"role": "user", "content": turn}]
                    try:
                        prompts[i] = self.tokenizer.chat(chats[i])
                    except InputError as e:
                        self.left_out, self.refusal = self.left_out + 1, str(e)
            live = [i for i in prompts if len(prompts[i]) <= self.max_prompt_tokens]
            self.left_out += len(prompts) - len(live)
            seeds = [seed_of(self.seed, source, number, begin + i) for i in live]
            sampling = [Sampling(self.max_new_tokens, self.temperature, seed=seed) for seed in seeds]
            for i, output in zip(live, self._generate([prompts[i] for i in live], sampling)):
                chats[i] = [*chats[i], {"role": "assistant", "content": self.tokenizer.decode(output.ids)}]
                ids = prompts[i] + output.ids
                finished, rows[i] = extend(rows[i], ids, len(prompts[i]), len(ids), source)
                if finished:
                    yield finished
            number += 1
        yield from filter(None, rows)

    def _generate(self, prompts: list[list[int]], sampling: list[Sampling]) -> list:
        return self.decoder.generate(prompts, sampling) if prompts else []

    def _write_shards(
        self, source: str, count: int, rows: Callable, told_apart_by: Callable, size: int | None = None
    ) -> None:
        """rows(begin, end) gives the rows of a shard, told_apart_by(begin, end) what they depend on."""
        if not count:
            return
        size = size or self.decoder.batch
        spans = [(begin, min(begin + size, count)) for begin in range(0, count, size)]
        bar = tqdm(
            total=count, unit="prompt", desc=f"text ({source})",
            disable=self.quiet or not self.processes.first
        )
        for number, (begin, end) in enumerate(spans):
            made_by = json.dumps([self.made_by, told_apart_by(begin, end)])
            path = self.folder / f"{source}-{begin:06d}-{hashlib.sha256(made_by.encode()).hexdigest()[:8]}.jsonl"
            if self.processes.mine(number) and not path.exists():
                self.left_out = 0
                lines = [json.dumps({**row, "target": self.target}) for row in rows(begin, end)]
                lines += [json.dumps({"left_out": self.left_out})] if self.left_out else []
                with atomic_path(path) as part:
                    part.write_text("".join(line + "\n" for line in lines))
            self.shards.append(path)
            bar.update(end - begin)
        bar.close()
