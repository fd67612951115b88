"""Training text for a head: the target's own answers, decoded in batches and kept as resumable shards.

A shard is one JSON-lines file, a conversation a line: {"ids": [...], "answer": n, "source": "prompts" | "synthesized"};
ids[n:] is what the target said, and the only part a head is trained to draft. A shard's name ends in a digest of all that
made it: other prompts, settings or another target never find it.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from checkpoint import CheckpointError
from decoder import Decoder, Sampling
from tokenizer import Tokenizer


def read_prompts(path: str | Path) -> list[str]:
    """First turns of a JSON-lines file: `turns` (FastChat), `prompt`, `conversations` or `messages` (ShareGPT/OpenAI).

    Raises CheckpointError naming the first line that has none of them.
    """
    prompts = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028 may stand in a text
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{path}: cannot be read ({e})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            first = row.get("turns") or row.get("conversations") or row.get("messages") or [row["prompt"]]
            first = first[0]
            text = first if isinstance(first, str) else first.get("value", first.get("content"))
            if not isinstance(text, str):
                raise TypeError
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError):
            raise CheckpointError(f"{path}: line {number} is no JSON object with turns, prompt, conversations or messages") from None
        prompts.append(text)
    if not prompts:
        raise CheckpointError(f"{path}: holds no prompts")
    return prompts


def user_header(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the chat template up to where the user begins to write: what two different chats have in common."""
    a, b = (tokenizer.chat([{"role": "user", "content": text}]) for text in ("Apple", "zebra"))
    same = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    return a[:same]


class Collector:
    """Lets the target answer, shard by shard. A shard that exists is not decoded again; a broken run goes on behind it.

    `shards` lists the files that belong to what was asked for, in order.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, folder: str | Path, *, seed: int, max_new_tokens: int,
                 temperature: float, max_prompt_tokens: int, quiet: bool = False):
        self.decoder, self.tokenizer, self.folder = decoder, tokenizer, Path(folder)
        self.seed, self.max_new_tokens, self.temperature = seed, max_new_tokens, temperature
        self.max_prompt_tokens, self.quiet = max_prompt_tokens, quiet
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shards: list[Path] = []
        norm = decoder.target.norm.weight.float().cpu().numpy().tobytes()  # tells targets apart
        self.made_by = [seed, max_new_tokens, temperature, max_prompt_tokens, hashlib.sha256(norm).hexdigest()]

    def from_prompts(self, prompts: list[str]) -> None:
        """Answer these prompts. Those longer than `max_prompt_tokens` as a chat are left out."""
        def turns(begin: int, end: int) -> list[str]:
            return prompts[begin:end]

        self._shards("prompts", len(prompts), turns, turns)

    def synthesized(self, count: int) -> None:
        """Let the model write `count` user turns from its template's user header, then answer them."""
        header = user_header(self.tokenizer)

        def turns(begin: int, end: int) -> list[str]:
            # Temperature 0.8 rather than 1 with top-p: as sane, and without a search over the vocabulary at every step.
            sampling = [Sampling(96, temperature=0.8, seed=self.seed + 10**9 + i) for i in range(begin, end)]
            outputs = self.decoder.generate([header] * (end - begin), sampling)
            return [self.tokenizer.decode(o.ids).strip() for o in outputs if o.finish == "stop"]

        self._shards("synthesized", count, turns, lambda begin, end: [begin, end])

    def _shards(self, source: str, count: int, turns, told_apart_by) -> None:
        """`turns(begin, end)` gives the user's turns of a shard, `told_apart_by(begin, end)` what they depend on."""
        size = self.decoder.batch
        bar = tqdm(total=count, unit="prompt", desc=f"answers ({source})", disable=self.quiet)
        for begin in range(0, count, size):
            end = min(begin + size, count)
            made_by = json.dumps([self.made_by, told_apart_by(begin, end)])
            path = self.folder / f"{source}-{begin:06d}-{hashlib.sha256(made_by.encode()).hexdigest()[:8]}.jsonl"
            if not path.exists():
                rows = self._answers(source, turns(begin, end), begin)
                part = path.with_suffix(".partial")
                part.write_text("".join(json.dumps(row) + "\n" for row in rows))
                os.replace(part, path)
            self.shards.append(path)
            bar.update(end - begin)
        bar.close()

    def _answers(self, source: str, turns: list[str], begin: int) -> Iterator[dict]:
        chats = [self.tokenizer.chat([{"role": "user", "content": turn}]) for turn in turns if turn]
        chats = [chat for chat in chats if len(chat) <= self.max_prompt_tokens]
        sampling = [Sampling(self.max_new_tokens, self.temperature, seed=self.seed + begin + i) for i in range(len(chats))]
        for chat, output in zip(chats, self.decoder.generate(chats, sampling)):
            yield {"ids": chat + output.ids, "answer": len(chat), "source": source}


def load_shards(paths: list[Path]) -> list[dict]:
    """All conversations of these shards, in order, without exact repeats."""
    seen, rows = set(), []
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = tuple(row["ids"])
            if key not in seen and len(row["ids"]) - row["answer"] >= 3:
                seen.add(key)
                rows.append(row)
    return rows
