"""Question sets, and the order of their questions in a run."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.errors import InputError, printable
from common.files import check_readable
from tokens.dataset import read_questions

OWN = Path(__file__).resolve().parent / "questions"
MEAN = "mean"  # the table's own set: the mean over the others


def read_sets(path: str | None, limit: int | None) -> dict[str, list[dict]]:
    """Read the questions of a file, of all question files in a folder, or (None) our own, by set.

    A file names its set. SET/question.jsonl, the layout of EAGLE's and Spec-Bench's data, is named by its
    folder. limit: most questions of each set. Raises InputError if there are none, or if names or ids are not
    unique.
    """
    place = Path(path) if path else OWN
    if place.is_dir():
        files = sorted((*place.glob("*.jsonl"), *place.glob("*/question.jsonl")))
    else:
        check_readable("--questions", place)
        files = [place]
    if not files:
        raise InputError(f"{place}: holds no question files (*.jsonl, */question.jsonl)")
    sets = {}
    for file in files:
        name = file.resolve().parent.name if file.name == "question.jsonl" else file.stem
        if name == MEAN or name in sets or not name.isprintable() or name.startswith("."):
            raise InputError(
                f"{file}: a set cannot be named {printable(name)} here (hidden, the table's own, or taken);"
                " rename it"
            )
        sets[name] = read_questions(file)[:limit]
        counts = Counter(question["question_id"] for question in sets[name])
        if double := [i for i, count in counts.items() if count > 1]:
            raise InputError(
                f"{file}: question_id {printable(str(double[0]))} is there twice (rows without one are"
                " numbered from 0)"
            )
    return sets


def rotated(items: Iterable, turn: int) -> list:
    """Return the same items in the same circle. A different one begins at every turn."""
    items = [*items]
    first = turn % len(items)
    return items[first:] + items[:first]


def rounds(
    sets: dict[str, list[dict]], temperatures: list[float], methods: list[str]
) -> Iterator[tuple[str, dict, float, list[str]]]:
    """Yield (set, question, temperature, methods in the order of this round).

    The sets take turns, so that a run that is cut short has asked questions of all of them. In each set, and
    at each temperature, the method that begins changes from question to question.
    """
    for i in range(max(map(len, sets.values()))):
        for name, questions in sets.items():
            if i < len(questions):
                for temperature in temperatures:
                    yield name, questions[i], temperature, rotated(methods, i)
