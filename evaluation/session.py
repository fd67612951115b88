"""One run of evaluate.py: ask every question, judge the texts, write tables and pictures."""
from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tqdm import tqdm

from common.files import write_text
from evaluation import pictures
from evaluation.answers import Answer, Book, digest
from evaluation.asking import ask, rounds
from evaluation.lossless import Difference, Judge
from evaluation.methods import Contender
from evaluation.observing import TreeStatistics
from evaluation.table import PLAIN, as_csv, bound_to_be_plain, markdown, summarise
from sampling.noise import seed_of
from sampling.options import Sampling

MOST_PRINTED = 10  # errors printed; differences.json has all of them


@dataclass
class Evaluation:
    """The contenders, the questions, and the book of answers so far."""

    contenders: dict[str, Contender]  # by label
    sets: dict[str, list[dict]]
    book: Book
    judge: Judge
    temperatures: list[float]
    max_new_tokens: int
    seed: int
    say: Callable[[str], None]

    def answer(self) -> None:
        """Ask every question that a method has not answered yet. A live line shows the figures so far."""
        methods = [*self.contenders]
        todo = [
            (name, question, temperature, order)
            for name, question, temperature, order in rounds(self.sets, self.temperatures, methods)
            if not all(self._is_answered(name, question, method, temperature) for method in methods)
        ]
        if not todo:
            return
        for temperature in self.temperatures:
            for contender in self.contenders.values():
                contender.model.warm_up(Sampling(8, temperature, seed=self.seed), every_length=True)
                ask(contender.model, {"turns": ["Hello"]}, 16, temperature, self.seed)
        bar = tqdm(todo, desc="questions", unit="question")
        for name, question, temperature, order in bar:
            self.book.forget(name, question, temperature)
            for method in order:
                self._ask(name, question, method, temperature)
            bar.set_postfix_str(self._running(temperature))

    def _ask(self, name: str, question: dict, method: str, temperature: float) -> None:
        """Ask one question of one method and keep the answer."""
        contender, number = self.contenders[method], question["question_id"]
        seed = seed_of(self.seed, name, number)
        turns = ask(contender.model, question, self.max_new_tokens, temperature, seed)
        if len(turns) < len(question["turns"]):
            self.say(
                f"{name} question {number}: turn {len(turns) + 1} does not fit in"
                f" {contender.model.decoder.max_seq_len} tokens"
                + ("" if turns else "; the question is left out")
            )
        if turns:
            asked = digest(question, contender.identity)
            category = question["category"]
            self.book.add(Answer(name, number, category, method, temperature, seed, asked, turns))

    def _is_answered(self, name: str, question: dict, method: str, temperature: float) -> bool:
        return self.book.has(name, question, method, temperature, self.contenders[method].identity)

    def _running(self, temperature: float) -> str:
        """The means so far at one temperature."""
        means = [
            row for row in self._rows(self._answers(), [])
            if (row["set"], row["temperature"]) == ("mean", temperature) and row["method"] != PLAIN
        ]
        return ", ".join(
            f"{row['method']} τ {row['tau']:.2f} {row['speedup']:.2f}×" for row in means
            if row["speedup"] and row["tau"]
        )

    def _answers(self) -> list[Answer]:
        """The answers of this run's methods to this run's questions; the folder may hold others."""
        questions = {(name, q["question_id"]): q for name, group in self.sets.items() for q in group}
        return [
            a for a in self.book.answers.values()
            if (a.set, a.question) in questions and a.temperature in self.temperatures
            and a.method in self.contenders
            and self._is_answered(a.set, questions[a.set, a.question], a.method, a.temperature)
        ]

    def _rows(self, answers: list[Answer], differences: list[Difference]) -> list[dict]:
        return summarise(answers, [*self.sets], [*self.contenders], differences)

    def report(self) -> int:
        """Write and print the figures so far. Returns how many texts differ by more than rounding."""
        answers = self._answers()
        self.book.write_fastchat(answers)  # first: it needs nothing that may fail
        differences = self._differences(answers)
        rows = self._rows(answers, differences)
        if not rows:
            self.say("no answers yet")
            return 0
        self._write(rows, answers, differences)
        errors = [d for d in differences if not d.tie]
        for d in errors[:MOST_PRINTED]:
            self.say(
                f"error: {d.method} leaves the plain text: {d.set} question {d.question}, temperature"
                f" {d.temperature:g}, turn {d.turn + 1}, token {d.token}: {d.other} for {d.plain},"
                f" {d.gap:.4g} behind (a tie is up to {d.bound:.4g})"
            )
        return len(errors)

    def _differences(self, answers: list[Answer]) -> list[Difference]:
        """The first difference of every text that is not the plain one and must be."""
        plain_answers = {(a.set, a.question, a.temperature): a for a in answers if a.method == PLAIN}
        differences = []
        for a in answers:
            plain = plain_answers.get((a.set, a.question, a.temperature))
            if plain and a.method != PLAIN and bound_to_be_plain(a.method, a.temperature):
                differences.append(self.judge.difference(plain, a))
        return [d for d in differences if d is not None]

    def _write(self, rows: list[dict], answers: list[Answer], differences: list[Difference]) -> None:
        """Write the tables, the differences and their pictures; print the table."""
        out, sets = self.book.folder, [*self.sets]
        text = markdown(rows, sets)
        answered = {(a.set, a.question) for a in answers if a.method == PLAIN}
        if left := sum(map(len, self.sets.values())) - len(answered):
            room = self.contenders[PLAIN].model.decoder.max_seq_len
            text += f"{left} questions have no answer: not asked yet, or too long for {room} tokens.\n"
        listed = [
            asdict(d) | {"tie": d.tie, "gap": d.gap if math.isfinite(d.gap) else None} for d in differences
        ]
        for name, content in (
            ("table.md", text), ("table.json", json.dumps(rows, indent=1) + "\n"),
            ("table.csv", as_csv(rows)), ("differences.json", json.dumps(listed, indent=1) + "\n"),
        ):
            write_text(out / name, content)
        if any(row["method"] != PLAIN for row in rows):
            pictures.draw_table(rows, sets, out / "sets.png")
        lengths: dict[str, list[int]] = {}
        for a in answers:
            if a.method != PLAIN and a.lengths:
                name = a.method if len(self.temperatures) == 1 else f"{a.method}, T = {a.temperature:g}"
                lengths.setdefault(name, []).extend(a.lengths)
        if lengths:
            pictures.draw_lengths(lengths, out / "lengths.png")
        print(text)

    def observe(self, questions: int, show_tree: bool) -> None:
        """Draw what the drafted trees look like, from a few questions of every set answered again, untimed.

        They are answered greedily: with noise, the drafter's confidence is not its probability. show_tree:
        draw, and print, the tree with most accepted nodes.
        """
        statistics = {name: TreeStatistics() for name in self.contenders if name != PLAIN}
        for name, counts in statistics.items():
            model = self.contenders[name].model
            with model.decoder.observe(counts.add):
                for group in self.sets.values():
                    for question in group[: max(1, questions)]:
                        first_turn = question | {"turns": question["turns"][:1]}
                        ask(model, first_turn, min(128, self.max_new_tokens), 0.0, self.seed)
        drafted = {name: counts.best for name, counts in statistics.items() if counts.best}
        if drafted:
            pictures.draw_acceptance(statistics, self.book.folder / "acceptance.png")
            pictures.draw_calibration(statistics, self.book.folder / "calibration.png")
        if show_tree and not drafted:
            self.say("--show-tree: nothing was drafted")
        elif show_tree:
            method = max(drafted, key=lambda name: len(drafted[name].accepted))
            tokenizer = self.contenders[method].model.tokenizer

            def word(token: int) -> str:
                return tokenizer.piece(token).decode("utf-8", "replace")

            print(f"a tree of {method}, greedy; ● accepted:\n{pictures.text_tree(drafted[method], word)}")
            pictures.draw_tree(drafted[method], word, method, self.book.folder / "tree.png")
