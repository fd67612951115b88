"""Answers, and the folder that keeps each one from the moment it is there."""
from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import InputError
from common.files import write_text, writing


@dataclass(frozen=True)
class Turn:
    """The answer to one user turn: prompt ids, new ids and times in seconds."""

    prompt: list[int]
    ids: list[int]
    text: str
    finish: str  # see `engine.run.Output`
    prefill_seconds: float
    seconds: float  # after the first token
    lengths: list[int]  # tokens emitted by each step


@dataclass(frozen=True)
class Answer:
    """All turns of one question, answered by one method."""

    set: str
    question: int | str
    category: str
    method: str
    temperature: float
    seed: int
    asked: str  # `digest` of the question and of what answered it
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
    def read(cls, line: str) -> Answer:
        """Read a line of answers.jsonl. Raises ValueError, TypeError or KeyError if it is none."""
        row = json.loads(line)
        return cls(**{**row, "turns": [Turn(**turn) for turn in row["turns"]]})


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
        _check_options(folder / "options.json", options)
        self.answers = {answer.key: answer for answer in self._read()}
        self._write()

    def _read(self) -> list[Answer]:
        if not self.path.exists():
            return []
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as e:
            raise InputError(f"{self.path}: damaged ({e}); delete it, or choose another --out") from None
        answers = []
        for line in lines:
            try:
                answers.append(Answer.read(line))
            except (ValueError, TypeError, KeyError):
                continue  # the run was killed while writing this line
        return answers

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


def _check_options(path: Path, options: dict) -> None:
    """Write the options, or raise InputError if they are not those of the folder's first run."""
    try:
        first = dict(json.loads(path.read_text())) if path.exists() else options
    except (ValueError, TypeError):
        raise InputError(f"{path}: damaged; delete it, or choose another --out") from None
    if first != options:
        names = sorted(n for n in first.keys() | options.keys() if first.get(n) != options.get(n))
        raise InputError(
            f"{path.parent}: holds answers made with other options ({', '.join(names)}); choose another --out"
        )
    write_text(path, json.dumps(options, indent=1) + "\n")
