"""The papers' table on your machine: speedup and acceptance length per question set, losslessness checked, in one run.

    python evaluate.py --checkpoint checkpoints/smollm2-135m --out runs/eval --speculate eagle3
    python evaluate.py --checkpoint DIR --out FOLDER --speculate eagle3,eagle2 --questions data/ --limit 40 --temperature 0,1

Every question is answered by plain decoding and by each method, in turns, in one process: batch 1, prompts timed apart,
everything compiled before the first answer. Questions are FastChat's question.jsonl (EAGLE's and Spec-Bench's too), a file or
a folder of them; without --questions a small set of our own. A run that is stopped goes on where it was.

FOLDER/table.md, table.json, table.csv   the table, printed too: also after Ctrl-C
FOLDER/answers/SET/METHOD-tT.jsonl       answers in FastChat's format, read by EAGLE's and Spec-Bench's scripts
FOLDER/differences.json                  where a text is not the plain one, scored again in float32
FOLDER/*.png                             acceptance by depth and rank, lengths, calibration, bars, a tree

The exit status is 1 if any text differs from the plain one by more than rounding explains.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from accepting import RULES
from checkpoint import identity
from decoder import Sampling
from drafters import METHODS, add_flags, given_flags, known
from errors import CheckpointError
from evaluation import pictures
from evaluation.lossless import Judge
from evaluation.runs import Answer, Book, ask, digest, read_sets, rounds, write_whole
from evaluation.table import PLAIN, as_csv, bound_to_be_plain, label, markdown, method_of, summarise
from model import run_layers
from sampling import seed_of
from text import TextDecoder, load, read_tree


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True, help="converted target")
    p.add_argument("--out", required=True, help="folder for answers, tables and pictures")
    all_methods = ", ".join(METHODS)
    p.add_argument("--speculate", default="eagle3", metavar="METHOD[,METHOD]", help=f"of {all_methods}; plain decoding always runs")
    p.add_argument("--draft", action="append", default=[], metavar="[METHOD=]DIR", help="head or draft model; may be repeated")
    p.add_argument("--tree", action="append", default=[], metavar="[METHOD=]SPEC", help="as for generate.py; may be repeated")
    p.add_argument("--accept", action="append", default=[], metavar="[METHOD=]RULE", help="equal, typical or residual; may be repeated")
    add_flags(p)
    p.add_argument("--questions", metavar="FILE_OR_FOLDER", help="FastChat questions (default: our own)")
    p.add_argument("--limit", type=int, help="only the first so many of every set")
    p.add_argument("--temperature", default="0", metavar="T[,T]", help="0 is greedy (default 0)")
    p.add_argument("--max-new-tokens", type=int, default=512, help="per turn (default 512)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device")
    p.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default: as stored")
    p.add_argument("--max-seq-len", type=int)
    p.add_argument("--threads", type=int)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--observe", type=int, default=4, metavar="N", help="questions per set answered again, untimed, for the pictures")
    p.add_argument("--show-tree", action="store_true", help="draw the drafted tree that had most accepted, here and as tree.png")
    return p


def say(line: str) -> None:
    """Everything but the table and the tree goes to stderr."""
    tqdm.write(line, file=sys.stderr)


def numbers(text: str) -> list[float]:
    """Temperatures of the command line. Raises CheckpointError."""
    try:
        found = [float(part) for part in text.split(",")]
        for value in found:
            Sampling(temperature=value)
    except ValueError as e:
        raise CheckpointError(f"--temperature {text}: {e}") from None
    return list(dict.fromkeys(value + 0.0 for value in found))  # -0 is 0


def by_method(option: str, values: list[str], methods: list[str]) -> dict[str, str]:
    """What "METHOD=VALUE", or a value alone where one method drafts, says of each method. Raises CheckpointError."""
    drafting = [name for name in methods if name != PLAIN]
    found = {}
    for value in values:
        name, separator, rest = value.partition("=")
        if not separator:
            if len(drafting) != 1:
                raise CheckpointError(f"{option} {value}: of which method? write {option} METHOD={value}")
            name, rest = drafting[0], value
        if name not in drafting or name in found:
            raise CheckpointError(f"{option} {value}: {name} is " + ("named twice" if name in found else f"none of {', '.join(drafting)}"))
        found[name] = rest
    return found


def load_methods(o, methods: list[str]) -> dict[str, TextDecoder]:
    """Plain decoding and every method, sharing one target."""
    drafts, trees, rules = (by_method(f"--{name}", getattr(o, name), methods) for name in ("draft", "tree", "accept"))
    flags = given_flags(o, methods)
    for name, rule in rules.items():
        if rule not in RULES:
            raise CheckpointError(f"--accept {name}={rule}: choose from {', '.join(RULES)}")
    shared = {
        "device": o.device, "dtype": o.dtype, "max_seq_len": o.max_seq_len, "compile": o.compile, "kernels": o.kernels, "say": say,
    }
    models = {PLAIN: load(o.checkpoint, **shared)}
    if models[PLAIN].tokenizer is None or not models[PLAIN].tokenizer.has_template:
        raise CheckpointError(f"{o.checkpoint}: questions need a tokenizer and a chat template, this folder lacks them")
    for name in methods:
        if name != PLAIN:
            rule = rules.get(name, "equal")
            models[label(name, rule)] = load(
                o.checkpoint, name, draft=drafts.get(name), tree=read_tree(trees.get(name)), flags=flags[name], accept=rule,
                beside=models[PLAIN], **shared,
            )
    return models


class Evaluation:
    """One run: the answers, what is wrong with them, and what is written about them."""

    def __init__(self, o, models: dict[str, TextDecoder], sets: dict[str, list[dict]], book: Book):
        self.o, self.models, self.sets, self.book, self.out = o, models, sets, book, Path(o.out)
        self.temperatures = numbers(o.temperature)
        flags = given_flags(o, [method_of(name) for name in models])
        plain = models[PLAIN]
        asked_as = hashlib.sha256(f"{plain.tokenizer.template} {plain.decoder.state.stop_ids.tolist()}".encode()).hexdigest()[:16]
        self.who = {}  # of every method, what tells its answers and times from another's
        for name, model in models.items():
            drafter = model.decoder.drafter
            made_of = identity(drafter) + drafter.made_of
            self.who[name] = f"{identity(model.decoder.target)} {asked_as} {made_of} {drafter.shape} {flags[method_of(name)]}"
        target = models[PLAIN].decoder.target
        on_kernels = target.run_layers is not run_layers
        self.judge = Judge(o.checkpoint, target.embed.weight.dtype, str(target.embed.weight.device), on_kernels)

    def run(self) -> None:
        """Answer what is not answered yet, with the running figures on a live line."""
        methods = [*self.models]
        todo = [
            (name, question, temperature, order)
            for name, question, temperature, order in rounds(self.sets, self.temperatures, methods)
            if not all(self.book.has(name, question, method, temperature, self.who[method]) for method in methods)
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
        rows = [row for row in self._rows(self._answers(), []) if (row["set"], row["temperature"]) == ("mean", temperature)]
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
        """Tables, answers and differences of what there is so far; returns how many differences are errors."""
        answers = self._answers()
        self.book.write_fastchat(answers)  # whatever happens to what follows
        plain = {a.key: a for a in answers if a.method == PLAIN}
        differences = []
        for a in answers:
            base = plain.get((a.set, a.question, PLAIN, a.temperature))
            if a.method != PLAIN and base and bound_to_be_plain(a.method, a.temperature) and (found := self.judge.difference(base, a)):
                differences.append(found)
        rows = self._rows(answers, differences)
        if not rows:
            say("no answers yet")
            return 0
        text = markdown(rows, [*self.sets])
        answered = {(a.set, a.question) for a in answers if a.method == PLAIN}
        if left := sum(map(len, self.sets.values())) - len(answered):
            text += f"{left} questions have no answer: not asked yet, or too long for {self.models[PLAIN].decoder.max_seq_len} tokens.\n"
        for name, content in (("table.md", text), ("table.json", json.dumps(rows, indent=1) + "\n"), ("table.csv", as_csv(rows))):
            write_whole(self.out / name, content)
        listed = [asdict(d) | {"tie": d.tie, "gap": d.gap if math.isfinite(d.gap) else None} for d in differences]
        write_whole(self.out / "differences.json", json.dumps(listed, indent=1) + "\n")
        if any(row["method"] != PLAIN for row in rows):
            pictures.draw_table(rows, [*self.sets], self.out / "sets.png")
        lengths: dict[str, list[int]] = {}
        for a in answers:
            if a.method != PLAIN:
                name = a.method if len(self.temperatures) == 1 else f"{a.method}, T = {a.temperature:g}"
                lengths.setdefault(name, []).extend(a.lengths)
        if any(lengths.values()):
            pictures.draw_lengths({method: found for method, found in lengths.items() if found}, self.out / "lengths.png")
        print(text)
        errors = [d for d in differences if not d.tie]
        for d in errors[:10]:
            say(f"error: {d.method} leaves the plain text: {d.set} question {d.question}, temperature {d.temperature:g}, turn {d.turn + 1},"
                f" token {d.token}: {d.other} for {d.plain}, {d.gap:.4g} behind (a tie is up to {d.bound:.4g})")
        return len(errors)

    def observe(self) -> None:
        """The pictures of drafted trees, from a few questions answered again, greedily: with noise, what a drafter is sure of is
        not its probabilities."""
        observed: dict[str, pictures.Observed] = {}
        for method, model in self.models.items():
            if method == PLAIN:
                continue
            seen = observed[method] = pictures.Observed()
            model.decoder.observer, lag, model.decoder.lag = seen.see, model.decoder.lag, 0  # a late host sees steps that never count
            try:
                for questions in self.sets.values():
                    for question in questions[: max(1, self.o.observe)]:
                        first = {**question, "turns": question["turns"][:1]}
                        ask(model, first, min(128, self.o.max_new_tokens), 0.0, self.o.seed)
            finally:
                model.decoder.observer, model.decoder.lag = None, lag
        if not any(seen.best for seen in observed.values()):
            if self.o.show_tree:
                say("--show-tree: nothing was drafted")
            return
        pictures.draw_acceptance(observed, self.out / "acceptance.png")
        pictures.draw_calibration(observed, self.out / "calibration.png")
        if self.o.show_tree:
            method, seen = max(((m, s) for m, s in observed.items() if s.best), key=lambda item: len(item[1].best.accepted))

            def word(token: int) -> str:
                return self.models[method].tokenizer.piece(token).decode("utf-8", "replace")

            print(f"a tree of {method}, greedy; ● accepted:\n{pictures.text_tree(seen.best, word)}")
            pictures.draw_tree(seen.best, word, method, self.out / "tree.png")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, 1 with an error or a text that differs, 130 when interrupted."""
    o = parser().parse_args(argv)
    evaluation = None
    try:
        methods = list(dict.fromkeys(o.speculate.split(",")))
        for name in methods:
            known(name)
        if o.observe < 0:
            raise CheckpointError(f"--observe {o.observe}: must be at least 0")
        if o.limit is not None and o.limit < 1:
            raise CheckpointError(f"--limit {o.limit}: must be at least 1")
        numbers(o.temperature)  # mistakes show before anything is loaded
        Sampling(o.max_new_tokens)
        if o.threads is not None:
            if not 1 <= o.threads <= 1024:
                raise CheckpointError(f"--threads {o.threads}: must be 1 to 1024")
            torch.set_num_threads(o.threads)
        sets = read_sets(o.questions, o.limit)
        models = load_methods(o, methods)
        options = {
            "checkpoint": os.path.abspath(o.checkpoint), "max_new_tokens": o.max_new_tokens, "seed": o.seed, "dtype": o.dtype,
            "threads": torch.get_num_threads(), "torch": torch.__version__, "device": str(models[PLAIN].decoder.device),
            "max_seq_len": models[PLAIN].decoder.max_seq_len, "compile": o.compile, "kernels": o.kernels,
        }
        evaluation = Evaluation(o, models, sets, Book(Path(o.out), options))
        evaluation.run()
        errors = evaluation.report()
        if o.observe or o.show_tree:
            evaluation.observe()
        return int(errors > 0)
    except (CheckpointError, OSError, ValueError, RuntimeError) as e:  # torch raises RuntimeError when memory runs out
        say("error: " + " ".join(str(e).split()))
        so_far(evaluation)
        return 1
    except KeyboardInterrupt:
        say("stopped before the first question" if evaluation is None else "stopped (the same command goes on)")
        so_far(evaluation)
        return 130


def so_far(evaluation: Evaluation | None) -> None:
    """The table of a run that did not end."""
    if evaluation is None:
        return
    say("the table so far:")
    try:
        evaluation.report()
    except KeyboardInterrupt:
        say("stopped again: no table")
    except (CheckpointError, OSError, ValueError, RuntimeError) as e:
        say("error: no table: " + " ".join(str(e).split()))


if __name__ == "__main__":
    sys.exit(main())
