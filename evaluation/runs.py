"""Asking questions: every method answers every question, turn after turn, and each answer is kept the moment
it is there.
"""
from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import InputError
from common.files import atomic_path
from engine.api import TextDecoder
from tokens.dataset import read_questions

OWN = Path(__file__).resolve().parent / "questions"


@dataclass(frozen=True)
class Turn:
    """One answer: the prompt it was given to, its tokens and times. `lengths`: tokens emitted by each step.
    """

    prompt: list[int]
    ids: list[int]
    text: str
    finish: str
    prefill_seconds: float
    seconds: float
    lengths: list[int]


@dataclass(frozen=True)
class Answer:
    """All turns of one question by one method."""

    set: str
    question: int | str
    category: str
    method: str
    temperature: float
    seed: int
    asked: str  # digest of the question's turns and of what answered
    turns: list[Turn]

    @property
    def key(self) -> tuple:
        """What is asked once."""
        return self.set, self.question, self.method, self.temperature

    @property
    def tokens(self) -> int:
        """Tokens after the first of each turn: those that `seconds` are the time of."""
        return sum(max(0, len(t.ids) - 1) for t in self.turns)

    @property
    def seconds(self) -> float:
        """Time of decoding, prompts apart."""
        return sum(t.seconds for t in self.turns)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every step."""
        return [n for t in self.turns for n in t.lengths]

    @classmethod
    def read(cls, line: str) -> Answer:
        """Back from JSON."""
        row = json.loads(line)
        return cls(**{**row, "turns": [Turn(**turn) for turn in row["turns"]]})


def read_sets(path: str | Path | None, limit: int | None) -> dict[str, list[dict]]:
    """Questions by set: of a file, of every .jsonl of a folder, or our own. Of SET/question.jsonl, as EAGLE
    and Spec-Bench lay their data out, the folder names the set. Raises InputError if there are none.
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


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


def digest(question: dict, who: str) -> str:
    """Tells what a question asks, and whom (`checkpoint.identity` of target and drafter)."""
    return hashlib.sha256(json.dumps([question["turns"], who]).encode()).hexdigest()[:16]


class Book:
    """FOLDER/answers.jsonl: every answer so far, of runs with the same options (FOLDER/options.json)."""

    def __init__(self, folder: Path, options: dict):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "answers.jsonl"
        kept = folder / "options.json"
        try:
            old = json.loads(kept.read_text()) if kept.exists() else options
        except ValueError:
            raise InputError(f"{kept}: damaged; delete it, or choose another --out") from None
        if old != options:
            differs = sorted(
                name for name in old.keys() | options.keys() if old.get(name) != options.get(name)
            )
            raise InputError(
                f"{folder}: holds answers made with other options ({', '.join(differs)}); choose another --out"
            )
        write_text(kept, json.dumps(options, indent=1) + "\n")
        self.answers: dict[tuple, Answer] = {}
        if self.path.exists():
            try:
                lines = self.path.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError as e:
                raise InputError(f"{self.path}: damaged ({e}); delete it, or choose another --out") from None
            for line in lines:
                try:
                    answer = Answer.read(line)
                except (ValueError, TypeError, KeyError):
                    continue  # cut off when a run was killed
                self.answers[answer.key] = answer
        self._write_all()

    def _write_all(self) -> None:
        write_text(self.path, "".join(json.dumps(asdict(a)) + "\n" for a in self.answers.values()))

    def has(self, name: str, question: dict, method: str, temperature: float, who: str) -> bool:
        """Whether this very question is answered, by these weights."""
        answer = self.answers.get((name, question["question_id"], method, temperature))
        return answer is not None and answer.asked == digest(question, who)

    def forget(self, name: str, question: dict, temperature: float) -> None:
        """Drop all answers to a question: what is compared is answered in one round."""
        old = [
            key for key in self.answers
            if (key[0], key[1], key[3]) == (name, question["question_id"], temperature)
        ]
        for key in old:
            del self.answers[key]
        if old:
            self._write_all()

    def add(self, answer: Answer) -> None:
        """Keep an answer."""
        self.answers[answer.key] = answer
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer)) + "\n")

    def write_fastchat(self, answers: list[Answer]) -> None:
        """FOLDER/answers/SET/METHOD-tT.jsonl in FastChat's answer format, with what EAGLE and Spec-Bench add
        to it.
        """
        files: dict[Path, list[str]] = {}
        for a in answers:
            name = f"{a.method}-t{a.temperature:g}"
            choice = {
                "index": 0, "turns": [t.text for t in a.turns], "idxs": [len(t.lengths) for t in a.turns],
                "decoding_steps": [len(t.lengths) for t in a.turns],
                "new_tokens": [len(t.ids) for t in a.turns],
                "wall_time": [t.prefill_seconds + t.seconds for t in a.turns], "accept_lengths": a.lengths,
            }
            row = {
                "question_id": a.question, "category": a.category,
                "answer_id": hashlib.sha256(repr(a.key).encode()).hexdigest()[:22],
                "model_id": name, "choices": [choice], "tstamp": time.time(),
            }
            files.setdefault(
                self.folder / "answers" / a.set / f"{name}.jsonl", []
            ).append(json.dumps(row, ensure_ascii=False))
        for path, lines in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "\n".join(lines) + "\n")


def ask(model: TextDecoder, question: dict, max_new_tokens: int, temperature: float, seed: int) -> list[Turn]:
    """The question's turns, each with the model's own answers as history. A turn that no longer fits ends the
    conversation; of a question whose first one does not, there are none.
    """
    messages, turns = [], []
    for text in question["turns"]:
        messages.append({"role": "user", "content": text})
        ids = model.encode(messages)
        if len(ids) >= model.decoder.max_seq_len:
            break
        result = model.generate(ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        messages.append({"role": "assistant", "content": result.text})
        turns.append(
            Turn(
                ids, result.ids, result.text, result.finish, result.prefill_seconds, result.seconds,
                result.accept_lengths
            )
        )
    return turns


def rounds(
    sets: dict[str, list[dict]], temperatures: list[float], methods: list[str]
) -> Iterator[tuple[str, dict, float, list[str]]]:
    """(set, question, temperature, methods in the order of this round): one question of every set in turn, so
    that a run cut short has seen all sets; who begins changes from question to question of every set and
    temperature.
    """
    for i in range(max(map(len, sets.values()))):
        for name, questions in sets.items():
            if i < len(questions):
                for temperature in temperatures:
                    first = i % len(methods)
                    yield name, questions[i], temperature, methods[first:] + methods[:first]
