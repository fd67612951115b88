"""A run of evaluate.py: load methods, answer questions, check losslessness, write the table."""
from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from checkpoint.convert import converted_folder
from checkpoint.load import read_config_if_converted
from common.errors import counted
from common.hashes import seed_of
from common.writing import digest, write_text
from engine.conversion import check_draft, convert_if_needed
from engine.drafting import DraftOptions
from engine.sampling import Sampling
from engine.step import step_of
from engine.target import Runtime, load_target
from evaluation.answers import PLAIN, Answer, AnswerStore, check_options, rotate_left
from evaluation.lossless import Difference, Judge
from evaluation.methods import ask, load_contenders
from evaluation.table import format_table, summarize
from kernels.tp import Ranks

RECORD_VERSION = 2  # format version of the output folder; other versions are rejected
MAX_PRINTED_ERRORS = 10  # differences.json has all of them


class Evaluation:
    """State of a run: engines by method, question sets, stored answers."""

    def __init__(
        self, args, runtime: Runtime, draftings: dict[str, DraftOptions], sets: dict[str, list[dict]],
        log: Callable[[str], None], ranks: Ranks | None = None,
    ):
        """Load the target and the drafter of each method. args: options of evaluate.py.

        ranks: of a sharded target. Raises InputError, ValueError, OSError or RuntimeError.
        """
        self.args, self.sets, self.log = args, sets, log
        for drafting in draftings.values():
            check_draft(args.checkpoint, drafting)
        args.checkpoint = converted_folder(args.checkpoint, log)
        model_length = read_config_if_converted(args.checkpoint, args.max_seq_len)["max_seq_len"]
        # Do not choose it by free memory, as generate.py does: a resumed run must have the same length.
        args.max_seq_len = args.max_seq_len or min(2048, model_length)
        options = {  # everything that answers and timings depend on, except methods and questions
            "figures": RECORD_VERSION, "checkpoint": os.path.abspath(args.checkpoint), "seed": args.seed,
            "max_new_tokens": args.max_new_tokens, "max_seq_len": args.max_seq_len,
            "dtype": args.dtype, "kernels": args.kernels, "compile": args.compile, "kv": args.kv,
            "device": torch.device(runtime.device_name).type, "threads": torch.get_num_threads(),
            "ranks": ranks.count if ranks else 1, "torch": torch.__version__,
        }
        check_options(Path(args.out), options)
        for name, drafting in draftings.items():
            folder, drafting = convert_if_needed(args.checkpoint, drafting, log)
            draftings[name] = drafting.resolve(folder, log)
        target = load_target(args.checkpoint, runtime, log, ranks)
        self.contenders = load_contenders(target, draftings, args.max_seq_len)
        embed, batch_invariant = target.model.embed, step_of(target.model).batch_invariant
        self.judge = Judge(args.checkpoint, embed.dtype, str(embed.device), batch_invariant, ranks, args.kv)
        self.store = AnswerStore(Path(args.out), options)
        if ranks:  # all ranks must answer the same remaining questions
            ranks.check_equal(f"the answers so far, {sorted(map(repr, self.store.answers))}", embed.device)

    def answer(self) -> None:
        """Answer, with all methods, every question for which an answer of any method is missing."""
        rounds = [
            (name, question, temperature, methods)
            for name, question, temperature, methods in self._rounds()
            if not all(self._find(name, question, method, temperature) for method in methods)
        ]
        for temperature in self.args.temperature if rounds else ():
            for engine, _ in self.contenders.values():
                engine.warm_up(Sampling(8, temperature, seed=self.args.seed), exhaustive=True)
                ask(engine, {"turns": ["Hello"]}, Sampling(16, temperature, seed=self.args.seed))
        with tqdm(rounds, desc="questions", unit="question", disable=not rounds) as bar:
            for name, question, temperature, methods in bar:
                self.store.drop_answers(name, question, temperature)
                for method in methods:
                    self._ask(name, question, method, temperature)

    def _ask(self, name: str, question: dict, method: str, temperature: float) -> None:
        """Answer one question with one method and store the answer."""
        (engine, fingerprint), id = self.contenders[method], question["question_id"]
        sampling = Sampling(self.args.max_new_tokens, temperature, seed=seed_of(self.args.seed, name, id))
        turns = ask(engine, question, sampling)
        if len(turns) < len(question["turns"]):
            self.log(
                f"{name} question {id}: turn {len(turns) + 1} does not fit in {engine.max_seq_len} tokens"
                + ("" if turns else "; the question is skipped")
            )
        if turns:
            fields = name, id, question["category"], method, temperature, sampling.seed
            self.store.add(Answer(*fields, digest(question["turns"], fingerprint), turns))

    def _rounds(self) -> Iterator[tuple[str, dict, float, list[str]]]:
        """Yield (set name, question, temperature, methods in the order of this round).

        Sets alternate, so that an interrupted run has answers of all sets. The order of the methods rotates
        with the questions, so that thermal and load drift affects all of them.
        """
        for i in range(max(map(len, self.sets.values()))):
            for name, questions in self.sets.items():
                for temperature in self.args.temperature if i < len(questions) else ():
                    yield name, questions[i], temperature, rotate_left(self.contenders, i)

    def _find(self, name: str, question: dict, method: str, temperature: float) -> Answer | None:
        return self.store.find(name, question, method, temperature, self.contenders[method].fingerprint)

    def _answers(self) -> Iterator[Answer]:
        """Yield the stored answers of this run's methods and questions; the folder may have others."""
        for name, question, temperature, methods in self._rounds():
            yield from filter(None, (self._find(name, question, method, temperature) for method in methods))

    def report(self) -> int:
        """Write and print the results so far. Returns the number of answers that are not lossless."""
        answers = [*self._answers()]
        plain = {(a.set, a.question, a.temperature): a for a in answers if a.method == PLAIN}
        pairs = ((plain.get((a.set, a.question, a.temperature)), a) for a in answers)
        differences = [d for d in (self.judge.difference(p, a) for p, a in pairs if p) if d]
        rows = summarize(answers, [*self.sets], [*self.contenders], differences)
        if not rows:
            self.log("no answers yet")
            return 0
        self._write_tables(rows, differences, len({key[:2] for key in plain}))
        errors = [d for d in differences if not d.tie]
        for d in errors[:MAX_PRINTED_ERRORS]:
            self.log(f"error: {d.method} differs from plain decoding: {d.set} question {d.question},"
                     f" temperature {d.temperature:g}, turn {d.turn + 1}, token {d.token}: {d.other}, plain:"
                     f" {d.plain}; logit gap {d.gap:.4g}, tolerance {d.bound:.4g}")
        return len(errors)

    def _write_tables(self, rows: list[dict], differences: list[Difference], answered: int) -> None:
        """Write table.md, table.json and differences.json; print the table.

        answered: number of questions with a plain answer.
        """
        out, note = self.store.folder, ""
        if unanswered := sum(map(len, self.sets.values())) - answered:
            note = f"{counted(unanswered, 'question')} without an answer: not run yet, or too long.\n"
        listed = [
            asdict(d) | {"tie": d.tie, "gap": d.gap if math.isfinite(d.gap) else None} for d in differences
        ]
        write_text(out / "table.md", format_table(rows) + note)
        write_text(out / "table.json", json.dumps(rows, indent=1) + "\n")
        write_text(out / "differences.json", json.dumps(listed, indent=1) + "\n")
        print(format_table(rows) + note + f"details: {out / 'table.json'}")
