"""Throughput at batch sizes 1 to 56: plain decoding, drafting, and transformers.

    python benchmarks/batches.py --checkpoint DIR --questions FILE... [--transformers DIR]

A batch of N decodes --each times N questions, at least --least. Answers end at a stop id, or at a random
limit between half of --max-new-tokens and all of it. Our engine uses continuous batching, with as many slots
as the largest batch. transformers decodes padded batches, one after the other, in the first round only.

tokens/s: all output tokens / the time from the first prompt to the last token, prefill included. All programs
decode the same questions in a round, and other questions in the next. The table has medians over the rounds.
"steps" is the ratio without prefill, on a CPU only. Drafted output is compared with plain output.
Writes benchmarks/results/NAME.json after every round.
"""
from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import bench  # first: it makes the modules below importable
import ours
from bench import positive
from ours import Sampling

from common.cli import log_stderr
from common.errors import InputError
from engine.drafting import read_tree
from extensions import METHODS
from tokens.dataset import read_prompts

PLAIN, DRAFTED, PEER = "plain", "drafted", "transformers"


def peer_of(folder: str, stop_ids: list[int]) -> Callable:
    """Return transformers as a contender, like `ours.SlotBatch.answer`."""
    from hugging_face import HuggingFace, as_llama

    peer = HuggingFace(as_llama(ours.plain_modules(folder)), stop_ids)

    def answer(prompts: list[list[int]], sampling: list[Sampling], together: int) -> tuple:
        ids, began = [], time.perf_counter()
        for first in range(0, len(prompts), together):
            some = slice(first, first + together)
            ids += peer.decode_together(prompts[some], [one.max_new_tokens for one in sampling[some]])[0]
        return ids, time.perf_counter() - began, 0.0, Counter()

    return answer


def round_of(o, questions: list[list[int]], turn: int, batch: int) -> tuple[list[list[int]], list[Sampling]]:
    """Return the questions of a round at this batch size, and their sampling options."""
    begin, half = turn * max(o.each * max(o.batch), o.least), o.max_new_tokens // 2
    numbers = range(begin, begin + max(o.each * batch, o.least))
    limits = [o.max_new_tokens - n * 37 % (half + 1) for n in numbers]
    sampling = [Sampling(limit, o.temperature, seed=n) for limit, n in zip(limits, numbers)]
    return [questions[n % len(questions)] for n in numbers], sampling


def summarize(cells: list[dict], batch: int) -> dict:
    """Return a row of the table: medians of rates and ratios, tokens a step, shares of trees, equal texts."""
    own = {(cell["round"], cell["who"]): cell for cell in cells if cell["batch"] == batch}
    drafted = [cell for (_, who), cell in own.items() if who == DRAFTED]

    def rate(who: str) -> float | None:
        some = [cell["rate"] for (_, name), cell in own.items() if name == who]
        return statistics.median(some) if some else None

    def ratio(key: str, other: str) -> float | None:
        pairs = [(c, own[c["round"], other]) for c in drafted if (c["round"], other) in own]
        return statistics.median(a[key] / b[key] for a, b in pairs) if pairs else None

    pairs = [pair for c in drafted for pair in zip(c["ids"], own[c["round"], PLAIN]["ids"], strict=True)]
    trees = sum((Counter(cell["trees"]) for cell in drafted), Counter())
    after_first = sum(len(ids) - 1 for cell in drafted for ids in cell["ids"])  # which comes with the prompt
    return {
        "batch": batch, **{who: rate(who) for who in (PLAIN, DRAFTED, PEER)},
        "÷ plain": ratio("rate", PLAIN), "steps": None if bench.CUDA else ratio("step_rate", PLAIN),
        "÷ peer": ratio("rate", PEER),
        "τ": after_first / max(trees.total(), 1),
        "steps by tree": ", ".join(f"{name} {k / trees.total():.0%}" for name, k in trees.most_common()),
        "texts equal": f"{sum(a == b for a, b in pairs)}/{len(pairs)}",
    }


def action(o) -> None:
    """Answer all batches in all rounds. Print the table."""
    model = ours.load(o.checkpoint, isa=o.isa)
    files = [read_prompts(file) for file in o.questions]
    mixed = [of[i] for i in range(max(map(len, files))) for of in files if i < len(of)]
    questions = [ids for ids in map(model.encode, mixed) if len(ids) + o.max_new_tokens < o.max_seq_len]
    if not questions:
        raise InputError(f"no question and its answer fit in --max-seq-len {o.max_seq_len}")
    size, tree = (max(o.batch), o.max_seq_len), o.tree and read_tree(o.tree)
    contenders = {PLAIN: model.slot_batch("none", None, *size).answer}
    contenders[DRAFTED] = model.slot_batch(o.speculate, tree, *size).answer
    if o.transformers:
        contenders[PEER] = peer_of(o.transformers, model.stop_ids)
    for answer in contenders.values():
        answer([[i + 1] for i in range(max(o.batch))], [Sampling(4)] * max(o.batch), max(o.batch))  # warm
    record = bench.describe(o) | {"checkpoint": o.checkpoint, "speculate": o.speculate, "cells": []}
    for turn in range(o.rounds):
        for i, batch in enumerate(o.batch):
            for name in bench.rotate_left(contenders, turn + i):
                if name == PEER and turn:
                    continue
                ids, seconds, reading, trees = contenders[name](*round_of(o, questions, turn, batch), batch)
                tokens = sum(map(len, ids))
                record["cells"].append({
                    "round": turn, "batch": batch, "who": name, "ids": ids, "trees": trees,
                    "rate": tokens / seconds, "step_rate": (tokens - len(ids)) / (seconds - reading),
                })
                log_stderr(f"  round {turn + 1}/{o.rounds}, batch {batch}, {name}:"
                           f" {tokens / seconds:.1f} tokens/s")
        bench.write(o.name, record)
    rows = [summarize(record["cells"], batch) for batch in o.batch]
    print(bench.table(record, rows[0], [row.values() for row in rows]))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "batches")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with an EAGLE-3 head")
    add("--questions", required=True, nargs="+", metavar="FILE",
        help="JSON lines; the first turn of each is the prompt")
    add("--batch", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 56], metavar="N",
        help="batch sizes (default 1 2 4 8 16 32 56)")
    add("--each", type=positive, default=2, help="answers per slot (default 2)")
    add("--least", type=positive, default=6, help="minimum number of answers (default 6)")
    add("--rounds", type=positive, default=3, help="rounds (default 3)")
    add("--max-new-tokens", type=positive, default=96, help="maximum tokens of an answer (default 96)")
    add("--max-seq-len", type=positive, default=512, help="maximum tokens of prompt and answer (default 512)")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default 0)")
    add("--speculate", choices=[name for name in METHODS if name != "none"], default="eagle3")
    add("--tree", metavar="T,D,K", help="tree (default: sized by the cost model)")
    add("--transformers", metavar="DIR", help="unquantized target for transformers")
    add("--isa", help="instruction set of the kernels (default: the best)")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
