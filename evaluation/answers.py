"""Answers, and the folder that keeps each one from the moment it is there."""
from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from common.errors import InputError, printable
from common.files import parse_json, read_bytes, read_json, write_text, writing
from common.schema import Name, Text, Whole, number, schema_of, text, whole

Seconds = number(0, 1e9)
OPTIONS = "options.json"  # of the first run, in its folder
ADVICE = "delete it, or choose another --out"


@dataclass(frozen=True)
class Turn:
    """The answer to one user turn: prompt ids, new ids and times in seconds."""

    prompt: list[Whole]
    ids: list[Whole]
    text: text(1 << 26)
    finish: text(100)  # see `engine.run.Output`
    prefill_seconds: Seconds
    seconds: Seconds  # after the first token
    lengths: list[Whole]  # tokens emitted by each step


@dataclass(frozen=True)
class Answer:
    """All turns of one question, answered by one method."""

    set: Name
    question: whole(-(2**63), 2**63 - 1) | Text
    category: Text
    method: Name
    temperature: number(0, 1e6)
    seed: whole(-(2**63), 2**64 - 1)
    asked: text(100)  # `digest` of the question and of what answered it
    turns: list[Turn]

    @property
    def key(self) -> tuple[str, int | str, str, float]:
        """What is answered once."""
        return self.set, self.question, self.method, self.temperature

    @property
    def tokens(self) -> int:
        """Tokens after the first one of each turn. `seconds` is the time they took."""
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
        """Read a line of answers.jsonl. Raises InputError, which begins with `where`, if it is none."""
        row = schema_of(cls).require(parse_json(line, where), where, ADVICE)
        turns = [Turn(**{f.name: turn[f.name] for f in fields(Turn)}) for turn in row["turns"]]
        return cls(**{**{f.name: row[f.name] for f in fields(cls)}, "turns": turns})


def digest(question: dict, identity: str) -> str:
    """A short hash of a question's turns and of the identity of what answers it (`evaluation.methods`)."""
    return hashlib.sha256(json.dumps([question["turns"], identity]).encode()).hexdigest()[:16]


class Book:
    """All answers of runs with the same options, kept in FOLDER/answers.jsonl and FOLDER/options.json."""

    def __init__(self, folder: Path, options: dict):
        """Open a folder, or make it.

        Raises InputError if it is damaged or holds answers of runs with other options, and OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "answers.jsonl"
        check_options(folder, options, all_of_them=True)
        write_text(folder / OPTIONS, json.dumps(options, indent=1) + "\n")
        self.answers = {answer.key: answer for answer in self._read()}
        self._write()

    def _read(self) -> list[Answer]:
        if not self.path.exists():
            return []
        *lines, _ = read_bytes(self.path).split(b"\n")  # what has no end was being written by a killed run
        try:
            return [Answer.read(line, f"{self.path}: line {i}") for i, line in enumerate(lines, 1)]
        except InputError as e:
            raise InputError(str(e) if str(e).endswith(ADVICE) else f"{e}; {ADVICE}") from None

    def _write(self) -> None:
        write_text(self.path, "".join(json.dumps(asdict(a)) + "\n" for a in self.answers.values()))

    def has(self, set_name: str, question: dict, method: str, temperature: float, identity: str) -> bool:
        """Whether exactly this question is answered, by a method of this identity."""
        answer = self.answers.get((set_name, question["question_id"], method, temperature))
        return answer is not None and answer.asked == digest(question, identity)

    def forget(self, set_name: str, question: dict, temperature: float) -> None:
        """Drop the answers of all methods to a question: only answers of one round are compared."""
        keys = [
            a.key for a in self.answers.values()
            if (a.set, a.question, a.temperature) == (set_name, question["question_id"], temperature)
        ]
        for key in keys:
            del self.answers[key]
        if keys:
            self._write()

    def add(self, answer: Answer) -> None:
        """Keep an answer."""
        schema_of(Answer).check(asdict(answer))
        self.answers[answer.key] = answer
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer)) + "\n")

    def write_fastchat(self, answers: Iterable[Answer]) -> None:
        """Write FOLDER/answers/SET/METHOD-tT.jsonl in FastChat's answer format.

        `idxs`, `decoding_steps`, `new_tokens`, `wall_time` and `accept_lengths` are what EAGLE and Spec-Bench
        add to that format.
        """
        files: dict[Path, list[str]] = {}
        for a in answers:
            model_id = f"{a.method}-t{a.temperature:g}"
            steps = [len(t.lengths) for t in a.turns]
            choice = {
                "index": 0, "turns": [t.text for t in a.turns], "idxs": steps, "decoding_steps": steps,
                "new_tokens": [len(t.ids) for t in a.turns],
                "wall_time": [t.prefill_seconds + t.seconds for t in a.turns], "accept_lengths": a.lengths,
            }
            row = {
                "question_id": a.question, "category": a.category,
                "answer_id": hashlib.sha256(repr(a.key).encode()).hexdigest()[:22],
                "model_id": model_id, "choices": [choice], "tstamp": time.time(),
            }
            path = self.folder / "answers" / a.set / f"{model_id}.jsonl"
            files.setdefault(path, []).append(json.dumps(row, ensure_ascii=False))
        for path, lines in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "\n".join(lines) + "\n")


def check_out(folder: Path) -> None:
    """Raise InputError if a folder holds something else than the answers of an evaluation.

    Hidden files are none of anybody's: a run that was killed at its first write has left one.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if any(not name.startswith(".") for name in names) and OPTIONS not in names:
        raise InputError(f"--out {folder}: holds something else than an evaluation; choose another folder")


def check_options(folder: Path, options: dict, all_of_them: bool = False) -> None:
    """Raise InputError if a folder's first run had other options than these, of which some may be missing,
    unless it is said that they are `all_of_them`.
    """
    try:
        first = read_json(folder / OPTIONS) if (folder / OPTIONS).exists() else options
    except InputError as e:
        raise InputError(f"{e}; {ADVICE}") from None
    names = first.keys() | options.keys() if all_of_them else options.keys()
    if other := sorted(n for n in names if first.get(n) != options.get(n)):
        words = printable(", ".join(other))
        raise InputError(f"{folder}: holds answers made with other options ({words}); choose another --out")
