"""The training text: conversations as token ids, with the assistant's answers marked.

A row is {"ids": [...], "answers": [[begin, end], ...], "source": "...", "chat": "...", "target": "..."}.
ids[begin:end] is what the target said, and the only part that a head learns to draft. `chat` identifies the
first prompt of the conversation, `target` the model that speaks. A head never drafts the first token of an
answer, so only answers of three tokens and more are used. A shard is a file with one row in JSON per line.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from common.errors import InputError
from common.files import read_lines, read_text
from tokens.ids import common_prefix
from tokens.tokenizer import Tokenizer
from training.choices import SHORTEST


def extend(row: dict | None, ids: list[int], begin: int, end: int, source: str) -> tuple[dict | None, dict]:
    """Add the answer ids[begin:end] to the row of a conversation whose text so far is `ids`.

    `row` is None if there is none yet. Returns (finished row or None, current row). A template may rewrite
    what was said before (some drop the thoughts of earlier answers). Then the row so far is finished, and a
    new one begins with this answer alone.
    """
    if row and common_prefix(row["ids"], ids) >= row["answers"][-1][1]:
        return None, {**row, "ids": ids[:end], "answers": [*row["answers"], [begin, end]]}
    chat = row["chat"] if row else digest(ids[:begin])
    return row, {"ids": ids[:end], "answers": [[begin, end]], "source": source, "chat": chat}


def whole(row: dict) -> dict:
    """The row as if the target had said all of it."""
    return {**row, "answers": [[1, len(row["ids"])]]}


def of_conversation(tokenizer: Tokenizer, messages: list[dict], stop_ids: Iterable[int]) -> Iterator[dict]:
    """The rows of a conversation that somebody else wrote: each answer up to and including its stop id.

    Raises InputError if the template refuses it, or moves things so that an answer cannot be told from what
    came before it (some write the system message into the last user turn).
    """
    stop_ids, row = set(stop_ids), None
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        ids = tokenizer.chat(messages[: i + 1], add_generation_prompt=False)
        begin = common_prefix(tokenizer.chat(messages[:i]), ids)
        before = tokenizer.decode(ids[:begin])
        if any(m["content"].strip() not in before for m in messages[:i] if m["role"] != "assistant"):
            raise InputError(
                "the chat template changes what came before an answer, so that the answer cannot be told"
                " from it"
            )
        end = next((j + 1 for j in range(begin, len(ids)) if ids[j] in stop_ids), len(ids))
        finished, row = extend(row, ids, begin, end, "conversations")
        if finished:
            yield finished
    if row:
        yield row


def usable(row: dict, max_len: int) -> dict | None:
    """The row cut to `max_len` tokens, without answers that are too short; None if no answer is left."""
    answers = [[b, min(e, max_len)] for b, e in row["answers"]]
    answers = [[b, e] for b, e in answers if e - b >= SHORTEST and b > 0]
    if not answers:
        return None
    chat = row.get("chat") or digest(row["ids"][: row["answers"][0][0]])
    ids, source = row["ids"][: answers[-1][1]], row.get("source", "shards")
    return {**row, "ids": ids, "answers": answers, "source": source, "chat": chat}


def digest(prompt: list[int]) -> str:
    """Identifies the first prompt of a conversation; rows that answer the same one share it."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def hold_out(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """(held out, training): a twentieth of the prompts, at most 64, with all rows that answer them.

    The choice does not depend on the order of the rows, and no prompt is on both sides.
    """
    chats = {row["chat"] for row in rows}
    held_out = set(sorted(chats)[: max(1, min(64, len(chats) // 20))])
    return [r for r in rows if r["chat"] in held_out], [r for r in rows if r["chat"] not in held_out]


def shards_in(folder: Path) -> list[Path]:
    """The shards of a folder, by name. Raises InputError if there are none."""
    shards = sorted(folder.glob("*.jsonl"))
    if not shards:
        raise InputError(
            f"--shards {folder}: holds no shards (*.jsonl); it is the data folder of another run's --work"
        )
    return shards


def load_shards(paths: list[Path], max_len: int, vocab_size: int, target: str) -> tuple[list[dict], int, int]:
    """Read the shards of a target, given by its `checkpoint.loading.identity`.

    Returns (all usable rows in order, without exact repeats; how many prompts were left out when they were
    written; how many rows are longer than `max_len` and are cut). Raises InputError on a line that is no row,
    or one of another target.
    """
    known, rows, left_out, cut = set(), [], 0, 0
    for path in paths:
        lines = read_text(path, most=1 << 40).splitlines()
        for number, line in enumerate(lines, 1):
            row = _read(path, number, line, vocab_size)
            if "left_out" in row:
                left_out += row["left_out"]
                continue
            if row.get("target", target) != target:
                raise InputError(
                    f"{path}: line {number} was written by another target, or by this one in another --dtype"
                )
            cut += len(row["ids"]) > max_len
            row = usable(row, max_len)
            if row and tuple(row["ids"]) not in known:
                known.add(tuple(row["ids"]))
                rows.append(row)
    return rows, left_out, cut


def check_shards(folder: Path, vocab_size: int) -> None:
    """Raise InputError unless a folder holds shards, of which the first begins with a row of such a target.
    """
    path = shards_in(folder)[0]
    for line in islice(read_lines(path), 1):
        _read(path, 1, line, vocab_size)


def _read(path: Path, number: int, line: str, vocab_size: int) -> dict:
    """A line of a shard: a row, or {"left_out": number of prompts}. Raises InputError if it is neither."""
    try:
        row = json.loads(line)
        if type(row.get("left_out")) is int:
            return row
        edges = [0, *(edge for begin, end in row["answers"] for edge in (begin, end)), len(row["ids"])]
        numbers = all(type(i) is int for i in (*row["ids"], *edges))
        words = all(isinstance(row.get(key, ""), str) for key in ("source", "chat", "target"))
        if numbers and words and all(0 <= i < vocab_size for i in row["ids"]) and edges == sorted(edges):
            return row
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise InputError(
        f"{path}: line {number} is no row of this target's token ids and answers; --shards takes the data"
        " folder of a run"
    )
