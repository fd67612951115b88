"""Training text: rows of token ids in which the assistant's answers are marked, and their files (shards).

A row is {"ids": [...], "answers": [[begin, end], ...], "source": "...", "chat": "...", "target": "..."}.
ids[begin:end] is an answer of the target; a head learns to draft only these. `chat` identifies the first
prompt of the conversation, `target` the model. A shard is a file with one row in JSON per line, or the reason
why a conversation has none.
"""
from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from common.errors import InputError, read_text
from common.schema import Whole
from common.writing import digest
from tokens.tokenizer import common_prefix

MIN_ANSWER_TOKENS = 3  # the root (from the target), one for the head to read, one to predict


class Line(BaseModel):
    """A line of a shard: a row, or a conversation that was left out.

    talk, ended: the conversation's digest in `training.writing`, and whether this is its last line. left_out:
    the reason.
    """

    ids: list[Whole] = []
    answers: list[tuple[Whole, Whole]] = []
    source: str = "shards"
    chat: str = ""
    target: str = ""
    talk: str = ""
    ended: bool = False
    left_out: str = ""

    def fits(self, vocab_size: int) -> bool:
        """Return whether this has no row, or answers in order and ids of the target."""
        edges = [0, *(edge for answer in self.answers for edge in answer), len(self.ids)]
        return bool(self.left_out) or (
            bool(self.ids and self.answers) and max(self.ids) < vocab_size and edges == sorted(edges)
        )


def extend(row: dict | None, ids: list[int], begin: int, end: int, source: str) -> tuple[dict | None, dict]:
    """Add the answer ids[begin:end] to the row of a conversation whose text so far is `ids`.

    row: None at the beginning. Returns (finished row or None, current row). A template may rewrite earlier
    turns, as some drop the thoughts of earlier answers. Then `row` is finished and a new one begins.
    """
    if row and common_prefix(row["ids"], ids) >= row["answers"][-1][1]:
        return None, {**row, "ids": ids[:end], "answers": [*row["answers"], [begin, end]]}
    chat = row["chat"] if row else digest(ids[:begin])
    return row, {"ids": ids[:end], "answers": [[begin, end]], "source": source, "chat": chat}


def trim(row: dict, max_len: int) -> dict | None:
    """Cut a row to `max_len` tokens and drop answers that are too short. Return None if no answer is left."""
    answers = [[b, min(e, max_len)] for b, e in row["answers"]]
    answers = [[b, e] for b, e in answers if e - b >= MIN_ANSWER_TOKENS and b > 0]
    if not answers:
        return None
    chat = row.get("chat") or digest(row["ids"][: row["answers"][0][0]])
    return {**row, "ids": row["ids"][: answers[-1][1]], "answers": answers, "chat": chat}


def hold_out(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return (held out, training): a twentieth of the prompts, at most 64, with all rows that answer them.

    The choice does not depend on the order of the rows, and no prompt is on both sides.
    """
    chats = {row["chat"] for row in rows}
    held_out = set(sorted(chats)[: max(1, min(64, len(chats) // 20))])
    return [r for r in rows if r["chat"] in held_out], [r for r in rows if r["chat"] not in held_out]


def shards_in(folder: Path) -> list[Path]:
    """Return the shards of a folder, by name. Raises InputError if there are none."""
    shards = sorted(folder.glob("*.jsonl"))
    if not shards:
        raise InputError(f"--shards {folder}: holds no shards (*.jsonl); name the data folder of a run")
    return shards


def read_shards(paths: list[Path], vocab_size: int, target: str) -> list[Line]:
    """Read the lines of shards of a target, given by its `checkpoint.folder.identity`.

    Raises InputError on a damaged line, and on one of another target.
    """
    lines = []
    for path in paths:
        for number, text in enumerate(read_text(path).splitlines(), 1):
            try:
                line = Line.model_validate_json(text)
            except ValidationError:
                line = Line()
            if not line.fits(vocab_size):
                raise InputError(f"{path}: line {number} is no row of this target's token ids and answers;"
                                 " --shards takes the data folder of a run")
            if line.target not in ("", target):
                raise InputError(f"{path}: line {number} was written by another target, or in another dtype")
            lines.append(line)
    return lines


def training_rows(lines: list[Line], max_len: int) -> tuple[list[dict], Counter]:
    """Return the usable rows without exact repeats, and how often each reason left a conversation out."""
    given = (line.model_dump(include={"ids", "answers", "source", "chat"}) for line in lines)
    rows = {digest(row["ids"]): row for row in (trim(row, max_len) for row in given) if row}
    return list(rows.values()), Counter(line.left_out for line in lines if line.left_out)


def draft_vocabulary(rows: list[dict], size: int, vocab_size: int) -> Tensor:
    """Return the `size` most frequent answer tokens, ascending."""
    counts = Counter(t for row in rows for b, e in row["answers"] for t in row["ids"][b:e])
    ranked = [t for t, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:size]
    # With little text the rest are the lowest unused ids, which are the tokenizer's commonest merges.
    if len(ranked) < size:
        ranked += [t for t in range(vocab_size) if t not in counts][: size - len(ranked)]
    return torch.tensor(sorted(ranked))


def rarest_id(rows: list[dict], vocab_size: int) -> int:
    """Return the id that is rarest in the text; of several, the last."""
    counts = torch.bincount(torch.tensor([t for row in rows for t in row["ids"]]), minlength=vocab_size)
    return int((counts == counts.min()).nonzero()[-1])
