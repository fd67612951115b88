"""One run of evaluate.py: the answers, what is wrong with them, and what is written about them."""
from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from checkpoint.loading import identity
from drafters import read_flags
from engine.api import TextDecoder
from evaluation import pictures
from evaluation.lossless import Judge
from evaluation.methods import say, temperatures_of
from evaluation.runs import Answer, Book, ask, digest, rounds, write_text
from evaluation.table import PLAIN, as_csv, bound_to_be_plain, markdown, method_of, summarise
from sampling.noise import seed_of
from sampling.options import Sampling


class Evaluation:
    """One run: the answers, what is wrong with them, and what is written about them."""

    def __init__(self, o, models: dict[str, TextDecoder], sets: dict[str, list[dict]], book: Book):
        self.o, self.models, self.sets, self.book, self.out = o, models, sets, book, Path(o.out)
        self.temperatures = temperatures_of(o.temperature)
        flags = read_flags(o, [method_of(name) for name in models])
        plain = models[PLAIN]
        asked_as = hashlib.sha256(
            f"{plain.tokenizer.template} {plain.decoder.state.stop_ids.tolist()}".encode()
        ).hexdigest()[:16]
        self.who = {}  # of every method, what tells its answers and times from another's
        for name, model in models.items():
            drafter = model.decoder.drafter
            made_of = identity(drafter) + drafter.made_of
            self.who[name] = f"{identity(model.decoder.target)} {asked_as} {made_of} {drafter.shape} {flags[method_of(name)]}"
        target = models[PLAIN].decoder.target
        self.judge = Judge(
            o.checkpoint, target.embed.weight.dtype, str(target.embed.weight.device), target.on_kernels
        )

    def run(self) -> None:
        """Answer what is not answered yet, with the running figures on a live line."""
        methods = [*self.models]
        todo = [
            (name, question, temperature, order)
            for name, question, temperature, order in rounds(self.sets, self.temperatures, methods)
            if not all(
                self.book.has(name, question, method, temperature, self.who[method]) for method in methods
            )
        ]
        if not todo:
            return
        for temperature in self.temperatures:
            for model in self.models.values():
                model.warm_up(Sampling(8, temperature, seed=self.o.seed), every_length=True)
                ask(model, {"turns": ["Hello"]}, 16, temperature, self.o.seed)
        bar = tqdm(todo, desc="questions", unit="question")
        for name, question, temperature, order in bar:
            seed = seed_of(self.o.seed, name, question["question_id"])
            self.book.forget(name, question, temperature)
            for method in order:
                turns = ask(self.models[method], question, self.o.max_new_tokens, temperature, seed)
                if len(turns) < len(question["turns"]):
                    room = self.models[method].decoder.max_seq_len
                    say(f"{name} question {question['question_id']}: turn {len(turns) + 1} does not fit in {room} tokens"
                        + ("" if turns else "; the question is left out"))
                if turns:
                    given = name, question["question_id"], question["category"], method, temperature, seed
                    self.book.add(Answer(*given, digest(question, self.who[method]), turns))
            bar.set_postfix_str(self._running(temperature))

    def _running(self, temperature: float) -> str:
        """The table's means so far, of one temperature."""
        rows = [
            row for row in self._rows(self._answers(), [])
            if (row["set"], row["temperature"]) == ("mean", temperature)
        ]
        shown = [row for row in rows if row["method"] != PLAIN and row["speedup"] and row["tau"]]
        return ", ".join(f"{row['method']} τ {row['tau']:.2f} {row['speedup']:.2f}×" for row in shown)

    def _answers(self) -> list[Answer]:
        """What this run asks, answered by what it runs, now or earlier; the folder may hold other answers."""
        asked = {(name, q["question_id"]): q for name, questions in self.sets.items() for q in questions}
        return [
            a for a in self.book.answers.values()
            if (a.set, a.question) in asked and a.temperature in self.temperatures and a.method in self.models
            and self.book.has(a.set, asked[a.set, a.question], a.method, a.temperature, self.who[a.method])
        ]

    def _rows(self, answers: list[Answer], differences: list) -> list[dict]:
        return summarise(answers, [*self.sets], [*self.models], differences)

    def report(self) -> int:
        """Tables, answers and differences of what there is so far; returns how many differences are errors.
        """
        answers = self._answers()
        self.book.write_fastchat(answers)  # whatever happens to what follows
        plain = {a.key: a for a in answers if a.method == PLAIN}
        differences = []
        for a in answers:
            base = plain.get((a.set, a.question, PLAIN, a.temperature))
            if a.method != PLAIN and base and bound_to_be_plain(a.method, a.temperature) and (
                found := self.judge.difference(base, a)
            ):
                differences.append(found)
        rows = self._rows(answers, differences)
        if not rows:
            say("no answers yet")
            return 0
        text = markdown(rows, [*self.sets])
        answered = {(a.set, a.question) for a in answers if a.method == PLAIN}
        if left := sum(map(len, self.sets.values())) - len(answered):
            text += f"{left} questions have no answer: not asked yet, or too long for {self.models[PLAIN].decoder.max_seq_len} tokens.\n"
        for name, content in (
            ("table.md", text), ("table.json", json.dumps(rows, indent=1) + "\n"), ("table.csv", as_csv(rows))
        ):
            write_text(self.out / name, content)
        listed = [
            asdict(d) | {"tie": d.tie, "gap": d.gap if math.isfinite(d.gap) else None} for d in differences
        ]
        write_text(self.out / "differences.json", json.dumps(listed, indent=1) + "\n")
        if any(row["method"] != PLAIN for row in rows):
            pictures.draw_table(rows, [*self.sets], self.out / "sets.png")
        lengths: dict[str, list[int]] = {}
        for a in answers:
            if a.method != PLAIN:
                name = a.method if len(self.temperatures) == 1 else f"{a.method}, T = {a.temperature:g}"
                lengths.setdefault(name, []).extend(a.lengths)
        if any(lengths.values()):
            pictures.draw_lengths(
                {method: found for method, found in lengths.items() if found}, self.out / "lengths.png"
            )
        print(text)
        errors = [d for d in differences if not d.tie]
        for d in errors[:10]:
            say(f"error: {d.method} leaves the plain text: {d.set} question {d.question}, temperature {d.temperature:g}, turn {d.turn + 1},"
                f" token {d.token}: {d.other} for {d.plain}, {d.gap:.4g} behind (a tie is up to {d.bound:.4g})")
        return len(errors)

    def observe(self) -> None:
        """The pictures of drafted trees, from a few questions answered again, greedily: with noise, what a
        drafter is sure of is not its probabilities.
        """
        observed: dict[str, pictures.Observed] = {}
        for method, model in self.models.items():
            if method == PLAIN:
                continue
            seen = observed[method] = pictures.Observed()
            with model.decoder.observe(seen.see):
                for questions in self.sets.values():
                    for question in questions[: max(1, self.o.observe)]:
                        first = {**question, "turns": question["turns"][:1]}
                        ask(model, first, min(128, self.o.max_new_tokens), 0.0, self.o.seed)
        if not any(seen.best for seen in observed.values()):
            if self.o.show_tree:
                say("--show-tree: nothing was drafted")
            return
        pictures.draw_acceptance(observed, self.out / "acceptance.png")
        pictures.draw_calibration(observed, self.out / "calibration.png")
        if self.o.show_tree:
            method, seen = max(
                ((m, s) for m, s in observed.items() if s.best), key=lambda item: len(item[1].best.accepted)
            )

            def word(token: int) -> str:
                return self.models[method].tokenizer.piece(token).decode("utf-8", "replace")

            print(f"a tree of {method}, greedy; ● accepted:\n{pictures.text_tree(seen.best, word)}")
            pictures.draw_tree(seen.best, word, method, self.out / "tree.png")
