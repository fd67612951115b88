"""Question sets, the order in which they are asked, and asking one question."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from common.errors import InputError
from engine.text_decoder import TextDecoder
from evaluation.answers import Turn
from tokens.dataset import read_questions
from tokens.spelling import TooLong

OWN = Path(__file__).resolve().parent / "questions"

Item = TypeVar("Item")


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
        ids = [question["question_id"] for question in sets[name]]
        double = next((i for i in ids if ids.count(i) > 1), None)
        if double is not None:
            raise InputError(
                f"{file}: question_id {double} is there twice (rows without one are numbered from 0)"
            )
    return sets


def rotated(items: list[Item], turn: int) -> list[Item]:
    """The same items in the same circle; another one begins at every turn."""
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


def ask(model: TextDecoder, question: dict, max_new_tokens: int, temperature: float, seed: int) -> list[Turn]:
    """Ask a question turn by turn, each with the model's own answers as history.

    The conversation ends before a turn that no longer fits; if the first one does not, the list is empty.
    """
    messages, turns = [], []
    for text in question["turns"]:
        messages.append({"role": "user", "content": text})
        try:
            ids = model.encode(messages)
        except TooLong:
            break
        if len(ids) >= model.decoder.max_seq_len:
            break
        result = model.generate(ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        messages.append({"role": "assistant", "content": result.text})
        turns.append(Turn(
            ids, result.ids, result.text, result.finish, result.prefill_seconds, result.seconds,
            result.accept_lengths,
        ))
    return turns
