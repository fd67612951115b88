"""Throughput at batch sizes 1 to 56: plain decoding, drafting, and transformers.

    python benchmarks/batches.py --checkpoint DIR --questions FILE... [--transformers DIR]

A batch of size N decodes N times --each questions, but at least --least. Answers end at a stop id, or at a
random limit between half of --max-new-tokens and all of it. Our engine uses continuous batching, with as many
slots as the largest batch. transformers decodes padded batches, one after the other, in the first round only.

tokens/s: all output tokens / the time from the first prompt to the last token, prefill included. All programs
decode the same questions in a round, and other questions in the next. The table has medians over the rounds.
"steps": ratio of speeds without prefill; only on CPUs. Drafted output is compared with plain output.
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


def transformers_peer(folder: str, stop_ids: list[int]) -> Callable:
    """Return transformers with the interface of `ours.SlotBatch.answer`."""
    from hugging_face import HuggingFace, as_llama

    peer = HuggingFace(as_llama(ours.plain_modules(folder)), stop_ids)

    def answer(prompts: list[list[int]], sampling: list[Sampling], batch_size: int) -> tuple:
        ids, start_time = [], time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            batch = slice(first, first + batch_size)
            ids += peer.decode_batch(prompts[batch], [s.max_new_tokens for s in sampling[batch]])[0]
        return ids, time.perf_counter() - start_time, 0.0, Counter()

    return answer


def round_questions(
    args, questions: list[list[int]], turn: int, batch: int
) -> tuple[list[list[int]], list[Sampling]]:
    """Return the questions of a round at this batch size, and their sampling options."""
    first, half = turn * max(args.each * max(args.batch), args.least), args.max_new_tokens // 2
    numbers = range(first, first + max(args.each * batch, args.least))
    limits = [args.max_new_tokens - n * 37 % (half + 1) for n in numbers]
    sampling = [Sampling(limit, args.temperature, seed=n) for limit, n in zip(limits, numbers)]
    return [questions[n % len(questions)] for n in numbers], sampling


def summarize(cells: list[dict], batch: int) -> dict:
    """Return a row of the table: median speeds and ratios, τ, tree frequencies, equal outputs."""
    own = {(cell["round"], cell["who"]): cell for cell in cells if cell["batch"] == batch}
    drafted = [cell for (_, who), cell in own.items() if who == DRAFTED]

    def rate(who: str) -> float | None:
        rates = [cell["rate"] for (_, name), cell in own.items() if name == who]
        return statistics.median(rates) if rates else None

    def ratio(key: str, other: str) -> float | None:
        pairs = [(c, own[c["round"], other]) for c in drafted if (c["round"], other) in own]
        return statistics.median(a[key] / b[key] for a, b in pairs) if pairs else None

    pairs = [pair for c in drafted for pair in zip(c["ids"], own[c["round"], PLAIN]["ids"], strict=True)]
    trees = sum((Counter(cell["trees"]) for cell in drafted), Counter())
    # Without the first token, which prefill samples.
    after_first = sum(len(ids) - 1 for cell in drafted for ids in cell["ids"])
    return {
        "batch": batch, **{who: rate(who) for who in (PLAIN, DRAFTED, PEER)},
        "÷ plain": ratio("rate", PLAIN), "steps": None if bench.CUDA else ratio("step_rate", PLAIN),
        "÷ peer": ratio("rate", PEER),
        "τ": after_first / max(trees.total(), 1),
        "steps by tree": ", ".join(f"{name} {k / trees.total():.0%}" for name, k in trees.most_common()),
        "texts equal": f"{sum(a == b for a, b in pairs)}/{len(pairs)}",
    }


def action(args) -> None:
    """Answer all batches in all rounds. Print the table."""
    model = ours.load(args.checkpoint, isa=args.isa)
    files = [read_prompts(file) for file in args.questions]
    mixed = [file[i] for i in range(max(map(len, files))) for file in files if i < len(file)]
    questions = [ids for ids in map(model.encode, mixed) if len(ids) + args.max_new_tokens < args.max_seq_len]
    if not questions:
        raise InputError(f"no question and its answer fit in --max-seq-len {args.max_seq_len}")
    size, tree = (max(args.batch), args.max_seq_len), args.tree and read_tree(args.tree)
    contenders = {PLAIN: model.slot_batch("none", None, *size).answer}
    contenders[DRAFTED] = model.slot_batch(args.speculate, tree, *size).answer
    if args.transformers:
        contenders[PEER] = transformers_peer(args.transformers, model.stop_ids)
    for answer in contenders.values():  # warmup
        answer([[i + 1] for i in range(max(args.batch))], [Sampling(4)] * max(args.batch), max(args.batch))
    record = bench.describe(args) | {"checkpoint": args.checkpoint, "speculate": args.speculate, "cells": []}
    for turn in range(args.rounds):
        for i, batch in enumerate(args.batch):
            for name in bench.rotate_left(contenders, turn + i):
                if name == PEER and turn:
                    continue
                asked = round_questions(args, questions, turn, batch)
                ids, seconds, prefill_seconds, trees = contenders[name](*asked, batch)
                tokens = sum(map(len, ids))
                record["cells"].append({
                    "round": turn, "batch": batch, "who": name, "ids": ids, "trees": trees,
                    "rate": tokens / seconds, "step_rate": (tokens - len(ids)) / (seconds - prefill_seconds),
                })
                log_stderr(f"  round {turn + 1}/{args.rounds}, batch {batch}, {name}:"
                           f" {tokens / seconds:.1f} tokens/s")
        bench.write(args.name, record)
    rows = [summarize(record["cells"], batch) for batch in args.batch]
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
    add("--each", type=positive, default=2, help="answers per batch slot (default 2)")
    add("--least", type=positive, default=6, help="minimum number of answers (default 6)")
    add("--rounds", type=positive, default=3, help="rounds (default 3)")
    add("--max-new-tokens", type=positive, default=96, help="maximum tokens of an answer (default 96)")
    add("--max-seq-len", type=positive, default=512, help="maximum tokens of prompt and answer (default 512)")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default 0)")
    add("--speculate", choices=[name for name in METHODS if name != "none"], default="eagle3",
        help="drafting method (default eagle3)")
    add("--tree", metavar="T,D,K", help="tree (default: sized by the cost model)")
    add("--transformers", metavar="DIR", help="unquantized target for transformers")
    add("--isa", help="instruction set of the kernels (default: the best)")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
