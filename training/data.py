"""Training data: rows of token ids with marked answers, and the files (shards) that they are stored in.

A row is {"ids": [...], "answers": [[begin, end], ...], "source": "...", "chat": "...", "target": "..."}.
ids[begin:end] is an answer of the target; the loss is on these tokens only. `chat` identifies the first
prompt of the conversation, `target` the model. A shard is a JSON Lines file: each line is a row, or the
reason why a conversation was skipped.
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
    """A line of a shard: a row, or a skipped conversation.

    talk: digest of the conversation (`training.collector`). ended: this is its last line. left_out: the
    reason why it was skipped.
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
        """Return whether this is a skipped conversation, or a valid row of a target with this vocabulary."""
        edges = [0, *(edge for answer in self.answers for edge in answer), len(self.ids)]
        return bool(self.left_out) or (
            bool(self.ids and self.answers) and max(self.ids) < vocab_size and edges == sorted(edges)
        )


def extend(row: dict | None, ids: list[int], begin: int, end: int, source: str) -> tuple[dict | None, dict]:
    """Add the answer ids[begin:end] to the row of a conversation with the tokens `ids` so far.

    row: None at first. Returns (finished row or None, current row). A new row starts if the template has
    rewritten earlier turns, as some drop the reasoning of earlier answers.
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
    """Return (validation set, training set): 5 % of the prompts, at most 64, are held out with their rows.

    The choice does not depend on the order of the rows, and no prompt is on both sides.
    """
    chats = {row["chat"] for row in rows}
    held_out = set(sorted(chats)[: max(1, min(64, len(chats) // 20))])
    return [r for r in rows if r["chat"] in held_out], [r for r in rows if r["chat"] not in held_out]


def shards_in(folder: Path) -> list[Path]:
    """Return the shards of a folder, by name. Raises InputError if there are none."""
    shards = sorted(folder.glob("*.jsonl"))
    if not shards:
        raise InputError(f"--shards {folder}: holds no *.jsonl files; name the data folder of a run")
    return shards


def read_shards(paths: list[Path], vocab_size: int, target: str) -> list[Line]:
    """Read the lines of shards. target: its `checkpoint.folder.identity`.

    Raises InputError on an invalid line, and on one of another target.
    """
    lines = []
    for path in paths:
        for number, text in enumerate(read_text(path).splitlines(), 1):
            try:
                line = Line.model_validate_json(text)
            except ValidationError:
                line = Line()
            if not line.fits(vocab_size):
                raise InputError(f"{path}: line {number} is not a row of this target's token ids and answers;"
                                 " --shards takes the data folder of a run")
            if line.target not in ("", target):
                raise InputError(f"{path}: line {number} is of another target, or of another dtype")
            lines.append(line)
    return lines


def training_rows(lines: list[Line], max_len: int) -> tuple[list[dict], Counter]:
    """Return the usable rows without duplicates, and the number of skipped conversations by reason."""
    given = (line.model_dump(include={"ids", "answers", "source", "chat"}) for line in lines)
    rows = {digest(row["ids"]): row for row in (trim(row, max_len) for row in given) if row}
    return list(rows.values()), Counter(line.left_out for line in lines if line.left_out)


def draft_vocabulary(rows: list[dict], size: int, vocab_size: int) -> Tensor:
    """Return the `size` most frequent answer tokens, ascending."""
    counts = Counter(t for row in rows for b, e in row["answers"] for t in row["ids"][b:e])
    ranked = [t for t, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:size]
    # With little data, fill up with the lowest unused ids: the most frequent merges of the tokenizer.
    if len(ranked) < size:
        ranked += [t for t in range(vocab_size) if t not in counts][: size - len(ranked)]
    return torch.tensor(sorted(ranked))


def rarest_id(rows: list[dict], vocab_size: int) -> int:
    """Return the least frequent id, the highest one on a tie."""
    counts = torch.bincount(torch.tensor([t for row in rows for t in row["ids"]]), minlength=vocab_size)
    return int((counts == counts.min()).nonzero()[-1])
