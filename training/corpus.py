"""The training text: conversations as token ids, with the parts marked that the assistant said.

A row is {"ids": [...], "answers": [[begin, end], ...], "source": "...", "chat": "...", "target": "..."}:
ids[begin:end] is what the target said, and the only part a head learns to draft; `chat` tells the
conversation's first prompt, `target` the model that speaks. A head never drafts an answer's first token, so
an answer counts from three tokens on.
"""
from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from common.errors import InputError
from tokens.ids import common_prefix
from tokens.tokenizer import Tokenizer

SHORTEST = 3  # tokens of an answer: one from the target, one for the head to read, one to predict
COVERAGE = (2048, 4096, 8192, 16384, 32768)  # draft vocabularies that the report speaks of


def extend(row: dict | None, ids: list[int], begin: int, end: int, source: str) -> tuple[dict | None, dict]:
    """Add the answer ids[begin:end] to the row (None: there is none yet) of a conversation whose text so far
    is `ids`.

    Returns (finished row or None, the row at hand): a template may rewrite what was said before (some drop
    the thoughts of earlier answers); then the row up to here is finished and a new one begins with this
    answer alone.
    """
    if row and common_prefix(row["ids"], ids) >= row["answers"][-1][1]:
        return None, {**row, "ids": ids[:end], "answers": [*row["answers"], [begin, end]]}
    chat = row["chat"] if row else digest(ids[:begin])
    return row, {"ids": ids[:end], "answers": [[begin, end]], "source": source, "chat": chat}


def of_conversation(tokenizer: Tokenizer, messages: list[dict], stop_ids: Iterable[int]) -> Iterator[dict]:
    """The rows of a conversation somebody else wrote: each answer up to and including its stop id.

    Raises InputError if the template refuses it, or moves things so that an answer cannot be told from what
    came before it (some write the system message into the last user turn).
    """
    stop_ids, row = set(stop_ids), None
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        whole = tokenizer.chat(messages[: i + 1], add_generation_prompt=False)
        begin = common_prefix(tokenizer.chat(messages[:i]), whole)
        asked = [m["content"].strip() for m in messages[:i] if m["role"] != "assistant"]
        said = tokenizer.decode(whole[:begin])
        if any(text not in said for text in asked):
            raise InputError(
                "the chat template changes what came before an answer, so that the answer cannot be told from it"
            )
        end = next((j + 1 for j in range(begin, len(whole)) if whole[j] in stop_ids), len(whole))
        finished, row = extend(row, whole, begin, end, "conversations")
        if finished:
            yield finished
    if row:
        yield row


def usable(row: dict, max_len: int) -> dict | None:
    """The row cut to `max_len` tokens, without answers that are too short; None if none is left."""
    answers = [[b, min(e, max_len)] for b, e in row["answers"]]
    answers = [[b, e] for b, e in answers if e - b >= SHORTEST and b > 0]
    if not answers:
        return None
    chat = row.get("chat") or digest(row["ids"][: row["answers"][0][0]])
    return {
        **row, "ids": row["ids"][: answers[-1][1]], "answers": answers, "source": row.get("source", "shards"),
        "chat": chat
    }


def shards_in(folder: Path) -> list[Path]:
    """The shards of a folder, by name. Raises InputError if there are none."""
    found = sorted(folder.glob("*.jsonl"))
    if not found:
        raise InputError(
            f"--shards {folder}: holds no shards (*.jsonl); it is the data folder of another run's --work"
        )
    return found


def load_shards(paths: list[Path], max_len: int, vocab_size: int, target: str) -> tuple[list[dict], int, int]:
    """(all usable rows of these shards, in order, without exact repeats; how many prompts were left out when
    they were written; how many rows are longer than `max_len` and are cut).

    Raises InputError on a line that is no row, or one of another target than `target`.
    """
    seen, rows, left_out, cut = set(), [], 0, 0
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"{path}: cannot be read ({e})") from None
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if "left_out" in row:
                    left_out += row["left_out"]
                    continue
                ids, edges = row["ids"], [edge for begin, end in row["answers"] for edge in (begin, end)]
                whole = all(
                    0 <= i < vocab_size for i in ids
                ) and [*edges, len(ids)] == sorted([0, *edges, len(ids)])[1:]
                other = row.get("target", target) != target
            except (ValueError, KeyError, TypeError):
                whole = other = False
            if not whole:
                raise InputError(
                    f"{path}: line {number} is no row of this target's token ids and answers; --shards takes the data folder of a run"
                ) from None
            if other:
                raise InputError(
                    f"{path}: line {number} was written by another target, or by this one in another --dtype"
                )
            cut += len(ids) > max_len
            row = usable(row, max_len)
            if row and tuple(row["ids"]) not in seen:
                seen.add(tuple(row["ids"]))
                rows.append(row)
    return rows, left_out, cut


def digest(prompt: list[int]) -> str:
    """Tells the first prompt of a conversation; rows that answer the same one share it."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]


def hold_out(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """(held out, training): a twentieth of the prompts, at most 64, with all rows that answer them.

    Which ones does not depend on the order of the rows, and no prompt is on both sides.
    """
    chats = {row["chat"] for row in rows}
    held = set(sorted(chats)[: max(1, min(64, len(chats) // 20))])
    return [r for r in rows if r["chat"] in held], [r for r in rows if r["chat"] not in held]


def answer_tokens(row: dict) -> int:
    """How many of a row's tokens are the assistant's."""
    return sum(e - b for b, e in row["answers"])


def counts_of(rows: list[dict]) -> Counter:
    """How often each token occurs in the answers."""
    return Counter(t for r in rows for b, e in r["answers"] for t in r["ids"][b:e])


def draft_vocabulary(counts: Counter, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent answer tokens, ascending, and the share of answer tokens they cover."""
    ranked = [t for t, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:size]
    # Little text: fill with the lowest unused ids, which are the tokenizer's commonest merges.
    if len(ranked) < size:
        seen = set(ranked)
        ranked += [t for t in range(vocab_size) if t not in seen][: size - len(ranked)]
    covered = sum(counts[t] for t in ranked) / max(1, counts.total())
    return torch.tensor(sorted(ranked)), covered


def describe(rows: list[dict], vocab_size: int) -> dict:
    """Figures of the training text: rows, tokens, answers, lengths, and what draft vocabularies would cover.
    """
    lengths, counts = [len(r["ids"]) for r in rows], counts_of(rows)
    histogram, low = {}, 0
    for high in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 1 << 30):
        number = sum(low < n <= high for n in lengths)
        if number:
            histogram[f"{low + 1}-{high}" if high < 1 << 30 else f"over {low}"] = number
        low = high
    return {
        "rows": len(rows), "by_source": dict(Counter(r["source"] for r in rows)),
        "answers": sum(len(r["answers"]) for r in rows),
        "several_answers": sum(len(r["answers"]) > 1 for r in rows), "tokens": sum(lengths),
        "answer_tokens": counts.total(),
        "longest": max(lengths), "lengths": histogram, "distinct_answer_tokens": len(counts),
        "coverage": {
            size: draft_vocabulary(counts, size, vocab_size)[1] for size in COVERAGE if size < vocab_size
        },
    }


def report(d: dict) -> str:
    """`describe` for people."""
    sources = ", ".join(f"{name} {n:,}" for name, n in d["by_source"].items())
    lines = [
        f"{d['rows']:,} conversations ({sources}), {d['several_answers']:,} with several answers",
        f"{d['tokens']:,} tokens, {d['answer_tokens']:,} of them in {d['answers']:,} answers; the longest row has {d['longest']:,}",
        "lengths  " + ", ".join(f"{span}: {n:,}" for span, n in d["lengths"].items()),
        f"{d['distinct_answer_tokens']:,} distinct answer tokens"
        + ("; a draft vocabulary covers " if d["coverage"] else "")
        + ", ".join(f"{size:,}: {share:.2%}" for size, share in d["coverage"].items()),
    ]
    return "\n".join(lines)
