"""Sets of questions, read before torch is there."""
from __future__ import annotations

from collections import Counter
from pathlib import Path

from common.errors import InputError, printable
from tokens.dataset import read_questions

OWN = Path(__file__).resolve().parent / "questions"


def read_sets(path: str | Path | None, limit: int | None) -> dict[str, list[dict]]:
    """Read the questions of a file, of every question file in a folder, or (None) our own, by set.

    A file names its set, SET/question.jsonl (the layout of EAGLE's and Spec-Bench's data) is named by its
    folder. limit: take only the first so many questions of each set. Raises InputError if there are none, or
    if names or ids are not unique.
    """
    place = Path(path) if path else OWN
    files = sorted((*place.glob("*.jsonl"), *place.glob("*/question.jsonl"))) if place.is_dir() else [place]
    if not files:
        raise InputError(f"{place}: holds no question files (*.jsonl, */question.jsonl)")
    sets = {}
    for file in files:
        name = file.resolve().parent.name if file.name == "question.jsonl" else file.stem
        if name == "mean" or name in sets:
            raise InputError(
                f"{file}: a set cannot be named {name} here (it is the table's own, or taken); rename it"
            )
        sets[name] = read_questions(file)[:limit]
        counts = Counter(question["question_id"] for question in sets[name])
        if double := [i for i, count in counts.items() if count > 1]:
            raise InputError(
                f"{file}: question_id {printable(str(double[0]))} is there twice (rows without one are"
                " numbered from 0)"
            )
    return sets
