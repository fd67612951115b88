"""Question sets, and the folder that stores answers."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from common.errors import InputError, did_you_mean, parse_json, read_json
from common.schema import Schema, Text, Whole, named, number, schema_of, text, whole
from common.writing import digest, write_text, writing
from tokens.dataset import read_questions

BUILTIN_QUESTIONS = Path(__file__).resolve().parent / "questions"
MEAN = "mean"  # set name of the table row with the mean over all sets
PLAIN = "none"  # --speculate name of plain decoding
# Question sets of the papers, which are not included -> built-in set that --sets uses instead.
STAND_INS = {"mt_bench": "writing", "humaneval": "code", "gsm8k": "math", "sum": "summary"}
OPTIONS_FILE = "options.json"  # options of all runs in this folder
ADVICE = "delete it, or choose another --out"
Seconds = number(0, 1e9)
Name = text(pattern=r"^[^./\\][^/\\]{0,199}$")  # a safe file name


def read_sets(
    path: str | None, limit: int | None, names: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, list[dict]]:
    """Read the questions of a file, of a folder of files, or (None) the built-in ones, by set.

    A set has the name of its file, or for SET/question.jsonl (EAGLE, Spec-Bench) of its folder. limit:
    maximum questions per set. names: sets to read, comma-separated; None: all. log: called if STAND_INS
    apply. Raises InputError if no files or sets are found, or if set names or question ids are not unique.
    """
    source = Path(path) if path else BUILTIN_QUESTIONS
    files = [source]
    if source.is_dir():
        files = sorted((*source.glob("*.jsonl"), *source.glob("*/question.jsonl")))
    if not files:
        raise InputError(f"{source}: holds no question files (*.jsonl, */question.jsonl)")
    sets = {}
    for file in files:
        name = file.resolve().parent.name if file.name == "question.jsonl" else file.stem
        if name == MEAN or name in sets:
            raise InputError(f"{file}: the set name {name} is reserved or used twice; rename the file")
        sets[name] = QUESTIONS.require(read_questions(file)[:limit], file)
        if len({question["question_id"] for question in sets[name]}) < len(sets[name]):
            raise InputError(f"{file}: duplicate question_id (rows without one are numbered from 0)")
    chosen = names.split(",") if names else [*sets]
    for name, builtin in STAND_INS.items() if not path else ():
        if name in chosen:
            log(f"--sets {name}: using the built-in set {builtin}; for the original add --questions FILE")
            chosen = [builtin if x == name else x for x in chosen]
    for name in {*chosen} - {*sets}:
        known = sets if path else [*sets, *STAND_INS]
        raise InputError(f"--sets {name}: no such set{did_you_mean(name, known)}; choose from"
                         f" {', '.join(known)}")
    return {name: sets[name] for name in chosen}


def rotate_left(items: Iterable, count: int) -> list:
    """Rotate the items left by `count` positions."""
    items = [*items]
    first = count % len(items)
    return items[first:] + items[:first]


Id = whole(-(2**63), 2**63 - 1) | Text
QUESTIONS = Schema(list[TypedDict("Question", {"question_id": Id, "category": Text, "turns": list[str]})])


@dataclass(frozen=True)
class Turn:
    """The answer to one user turn.

    prefill_seconds: time to first token; later turns reuse the cached prefix of the conversation.
    """

    prompt: list[Whole]  # token ids
    ids: list[Whole]  # token ids of the answer
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
    asked: Text  # digest of the question's turns and the method's fingerprint, see `Contender`
    turns: list[Turn]

    @property
    def key(self) -> tuple[str, int | str, str, float]:
        """Unique key in an evaluation folder."""
        return self.set, self.question, self.method, self.temperature

    @property
    def tokens(self) -> int:
        """Number of decoded tokens, without the first token of each turn, which is prefill."""
        return sum(max(0, len(t.ids) - 1) for t in self.turns)

    @property
    def seconds(self) -> float:
        """Decode time, without prefill."""
        return sum(t.seconds for t in self.turns)

    @property
    def lengths(self) -> list[int]:
        """Tokens emitted by each step of all turns."""
        return [n for t in self.turns for n in t.lengths]

    @classmethod
    def read(cls, line: bytes, where: str) -> Answer:
        """Parse a line of answers.jsonl. Raises InputError that starts with `where`."""
        with named(where, ADVICE):
            return schema_of(cls).check(parse_json(line, where))


def check_evaluation(folder: Path) -> None:
    """Raise InputError if a folder has files but is not an evaluation's.

    Hidden files are ignored: a killed run may leave a partial file.
    """
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if any(not name.startswith(".") for name in names) and OPTIONS_FILE not in names:
        raise InputError(f"--out {folder}: not an evaluation folder; choose another one")


def check_options(folder: Path, options: dict) -> None:
    """Raise InputError if the evaluation in a folder was made with other options."""
    saved = read_json(folder / OPTIONS_FILE) if (folder / OPTIONS_FILE).exists() else options
    if changed := sorted(n for n in saved.keys() | options.keys() if saved.get(n) != options.get(n)):
        raise InputError(f"{folder}: holds answers made with other options ({', '.join(changed)});"
                         " choose another --out")


class AnswerStore:
    """Answers of runs with the same options, in FOLDER/answers.jsonl and FOLDER/options.json."""

    def __init__(self, folder: Path, options: dict):
        """Open or create a folder that has passed `check_evaluation` and `check_options`.

        Raises InputError on a damaged file, and OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "answers.jsonl"
        write_text(folder / OPTIONS_FILE, json.dumps(options, indent=1) + "\n")
        content = self.path.read_bytes() if self.path.exists() else b""
        *lines, _ = content.split(b"\n")  # drop an incomplete last line of a killed run
        answers = (Answer.read(line, f"{self.path}: line {i}") for i, line in enumerate(lines, 1))
        self.answers = {answer.key: answer for answer in answers}
        self._write()

    def _write(self) -> None:
        write_text(self.path, "".join(json.dumps(asdict(a)) + "\n" for a in self.answers.values()))

    def find(
        self, set_name: str, question: dict, method: str, temperature: float, fingerprint: str
    ) -> Answer | None:
        """Return the stored answer, or None if there is none or the question or method has changed."""
        answer = self.answers.get((set_name, question["question_id"], method, temperature))
        return answer if answer and answer.asked == digest(question["turns"], fingerprint) else None

    def drop_answers(self, set_name: str, question: dict, temperature: float) -> None:
        """Drop all methods' answers to a question: timings are only comparable within one round."""
        key = set_name, question["question_id"], temperature
        remaining = {a.key: a for a in self.answers.values() if (a.set, a.question, a.temperature) != key}
        if len(remaining) < len(self.answers):
            self.answers = remaining
            self._write()

    def add(self, answer: Answer) -> None:
        """Append an answer to answers.jsonl."""
        self.answers[answer.key] = answer
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer)) + "\n")
