"""Question sets, answers, and the folder that stores answers one by one."""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from common.errors import InputError, did_you_mean
from common.files import parse_json, read_json
from common.schema import Name, Schema, Text, Whole, named, number, schema_of, text, whole
from common.writing import digest, write_text, writing
from tokens.dataset import read_questions

OWN = Path(__file__).resolve().parent / "questions"
MEAN = "mean"  # the table's own set: the mean over the others
PLAIN = "none"  # the method that drafts nothing
OPTIONS = "options.json"  # of the folder's first run
ADVICE = "delete it, or choose another --out"
Seconds = number(0, 1e9)


def read_sets(path: str | None, limit: int | None, names: str | None = None) -> dict[str, list[dict]]:
    """Read the questions of a file, of all question files in a folder, or (None) our own, by set.

    A file names its set. SET/question.jsonl, the layout of EAGLE's and Spec-Bench's data, is named by its
    folder. limit: most questions of each set. names: the sets to read, with commas between them (None: all).
    Raises InputError if there are none, or if names or ids are not unique.
    """
    place = Path(path) if path else OWN
    if place.is_dir():
        files = sorted((*place.glob("*.jsonl"), *place.glob("*/question.jsonl")))
    else:
        files = [place]
    if not files:
        raise InputError(f"{place}: holds no question files (*.jsonl, */question.jsonl)")
    sets = {}
    for file in files:
        name = file.resolve().parent.name if file.name == "question.jsonl" else file.stem
        if name == MEAN or name in sets:
            raise InputError(f"{file}: a set cannot be named {name} (the table's own, or taken); rename it")
        sets[name] = QUESTIONS.require(read_questions(file)[:limit], file)
        if len({question["question_id"] for question in sets[name]}) < len(sets[name]):
            raise InputError(f"{file}: a question_id is there twice (rows without one are numbered from 0)")
    chosen = names.split(",") if names else [*sets]
    for name in {*chosen} - {*sets}:
        words = f"no such set{did_you_mean(name, sets)}; choose from {', '.join(sets)}"
        raise InputError(f"--sets {name}: {words}")
    return {name: sets[name] for name in chosen}


def rotated(items: Iterable, turn: int) -> list:
    """Return the items rotated left by `turn`."""
    items = [*items]
    first = turn % len(items)
    return items[first:] + items[:first]


Id = whole(-(2**63), 2**63 - 1) | Text
QUESTIONS = Schema(list[TypedDict("Question", {"question_id": Id, "category": Text, "turns": list[str]})])


@dataclass(frozen=True)
class Turn:
    """The answer to one user turn.

    prefill_seconds: from the question to the first token. The engine reads only that part of a prompt which
    no earlier text in its caches begins with, so later turns of a conversation take less.
    """

    prompt: list[Whole]  # token ids
    ids: list[Whole]  # of the answer
    text: text(1 << 26)
    finish: Text  # see `engine.request.Finish`
    prefill_seconds: Seconds
    seconds: Seconds  # after the first token
    lengths: list[Whole]  # tokens emitted by each step


@dataclass(frozen=True)
class Answer:
    """All turns of one question, answered by one method."""

    set: Name
    question: Id
    category: Text
    method: Name
    temperature: number(0, 1e6)
    seed: whole(-(2**63), 2**64 - 1)
    asked: Text  # `digest` of the question and of what answered it
    turns: list[Turn]

    @property
    def key(self) -> tuple[str, int | str, str, float]:
        """The name of an answer: a folder has one for each key."""
        return self.set, self.question, self.method, self.temperature

    @property
    def tokens(self) -> int:
        """Tokens after the first one of each turn, decoded in `seconds`."""
        return sum(max(0, len(t.ids) - 1) for t in self.turns)

    @property
    def seconds(self) -> float:
        """Time of decoding, without the prompts."""
        return sum(t.seconds for t in self.turns)

    @property
    def lengths(self) -> list[int]:
        """Tokens emitted by each step, of all turns."""
        return [n for t in self.turns for n in t.lengths]

    @classmethod
    def read(cls, line: bytes, where: str) -> Answer:
        """Read a line of answers.jsonl. Raises InputError, which begins with `where`, on a damaged one."""
        with named(where, ADVICE):
            return schema_of(cls).check(parse_json(line, where))


def check_evaluation(folder: Path) -> None:
    """Raise InputError if a folder holds something else than an evaluation.

    Ignore hidden files: a run that is killed at its first write leaves one.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if any(not name.startswith(".") for name in names) and OPTIONS not in names:
        raise InputError(f"--out {folder}: holds something else than an evaluation; choose another folder")


def check_options(folder: Path, options: dict) -> None:
    """Raise InputError if a folder holds an evaluation with other options."""
    first = read_json(folder / OPTIONS) if (folder / OPTIONS).exists() else options
    if other := sorted(n for n in first.keys() | options.keys() if first.get(n) != options.get(n)):
        raise InputError(f"{folder}: holds answers made with other options ({', '.join(other)});"
                         " choose another --out")


class Book:
    """All answers of runs with the same options, stored in FOLDER/answers.jsonl and FOLDER/options.json."""

    def __init__(self, folder: Path, options: dict):
        """Open a folder that has passed `check_evaluation` and `check_options`, or make it.

        Raises InputError on a damaged file, and OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "answers.jsonl"
        write_text(folder / OPTIONS, json.dumps(options, indent=1) + "\n")
        content = self.path.read_bytes() if self.path.exists() else b""
        *lines, _ = content.split(b"\n")  # a killed run leaves a line without an end
        answers = (Answer.read(line, f"{self.path}: line {i}") for i, line in enumerate(lines, 1))
        self.answers = {answer.key: answer for answer in answers}
        self._write()

    def _write(self) -> None:
        write_text(self.path, "".join(json.dumps(asdict(a)) + "\n" for a in self.answers.values()))

    def find(
        self, set_name: str, question: dict, method: str, temperature: float, identity: str
    ) -> Answer | None:
        """Return the answer to exactly this question by a method of this identity, if there is one."""
        answer = self.answers.get((set_name, question["question_id"], method, temperature))
        return answer if answer and answer.asked == digest(question["turns"], identity) else None

    def forget(self, set_name: str, question: dict, temperature: float) -> None:
        """Drop the answers of all methods to a question: only answers of one round are compared."""
        asked = set_name, question["question_id"], temperature
        kept = {a.key: a for a in self.answers.values() if (a.set, a.question, a.temperature) != asked}
        if len(kept) < len(self.answers):
            self.answers = kept
            self._write()

    def add(self, answer: Answer) -> None:
        """Store an answer."""
        self.answers[answer.key] = answer
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer)) + "\n")
