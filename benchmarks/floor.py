"""Minimum speedup of drafting over plain decoding, over question sets, temperatures and context lengths.

    python benchmarks/floor.py --checkpoint DIR --questions DATA_DIR [--context 0 4096] [--isa avx2]

Each question is decoded with and without drafting (--speculate) concurrently: the run with fewer tokens does
the next step, so that both have the same machine load. A cell is the median speedup of a set. --context N
prepends other questions of the set, up to N tokens.

Writes speedups, numbers of equal outputs and tree sizes to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import bench  # first: it makes the modules below importable
import ours
from bench import positive
from ours import Model, Runner, Sampling

from common.cli import log_stderr
from common.errors import InputError
from tokens.dataset import read_prompts


def prompts_of(model: Model, questions: list[str], count: int, context: int) -> list[list[int]]:
    """Encode the first `count` questions, each after the same other questions (up to `context` tokens)."""
    others, measured = questions[count:] or questions, questions[:count]
    prefix, prefix_questions = "", 0
    while context:
        longer = prefix + others[prefix_questions % len(others)] + "\n\n"
        if len(model.encode(longer + max(measured, key=len))) > context:
            break
        prefix, prefix_questions = longer, prefix_questions + 1
    return [model.encode(prefix + question) for question in measured]


def decode_concurrently(
    runners: list[Runner], prompt: list[int], sampling: Sampling
) -> list[tuple[list[int], list[int], float]]:
    """Return each runner's ids, tokens by step, and seconds after the first token."""
    steps = [runner.passes([prompt], [sampling]) for runner in runners]
    ids, lengths, seconds = [[] for _ in runners], [[] for _ in runners], [0.0] * len(runners)
    for i, runner in enumerate(runners):
        while not ids[i]:
            ids[i] += next(steps[i])[0]
        seconds[i] = runner.since_first()
    unfinished = [*range(len(runners))]
    while unfinished:
        i = min(unfinished, key=lambda i: len(ids[i]))
        start_time = time.perf_counter()
        emitted = next(steps[i], None)
        seconds[i] += time.perf_counter() - start_time
        if emitted is None:
            unfinished.remove(i)
        elif emitted[0]:
            ids[i] += emitted[0]
            lengths[i].append(len(emitted[0]))
    return [*zip(ids, lengths, seconds)]


def measure(args, runners: list[Runner], prompts: list[list[int]], temperature: float) -> dict:
    """Measure a cell of the table. Raise InputError if no answer can be timed."""
    ratios, equal, lengths, trees = [], 0, [], Counter()
    for i, prompt in enumerate(prompts):
        sampling = Sampling(args.max_new_tokens, temperature, seed=i)
        (drafted, steps, seconds), (plain, _, plain_seconds) = decode_concurrently(runners, prompt, sampling)
        equal += drafted == plain
        if steps:
            ratios.append(plain_seconds / seconds)
            lengths.append(steps)
        trees += runners[0].trees()
    return {
        "tau": bench.tau(lengths), "speedup": statistics.median(ratios), "speedups": ratios,
        "trees": dict(trees), "texts_equal": equal, "of": len(prompts),
    }


def action(args) -> None:
    """Measure all cells. Print a row for each context and temperature."""
    files = sorted(Path(args.questions).glob("*.jsonl"))
    if not files:
        raise InputError(f"{args.questions}: has no .jsonl files")
    model = ours.load(args.checkpoint, isa=args.isa)
    longest = min(model.longest, max(args.context) + 1024 + args.max_new_tokens)
    runners = [model.runner(method, max_seq_len=longest) for method in (args.speculate, "none")]
    for runner in runners:
        for temperature in args.temperature:
            runner.warm_up(temperature)
    record = bench.describe(args) | {"checkpoint": args.checkpoint, "speculate": args.speculate,
                                  "tokens": args.max_new_tokens, "cells": []}
    for context in args.context:
        for file in files:  # all temperatures of a set in a row, to reuse its cached prefix
            prompts = prompts_of(model, read_prompts(file), args.limit, context)
            for temperature in args.temperature:
                cell = {"set": file.stem, "context": context, "temperature": temperature}
                record["cells"].append(cell | measure(args, runners, prompts, temperature))
                log_stderr(f"  {record['cells'][-1]}")
    bench.write(args.name, record)
    rows: dict[tuple, list[float]] = {}
    for cell in record["cells"]:
        rows.setdefault((cell["context"], cell["temperature"]), []).append(cell["speedup"])
    heads = ["context", "temperature", *(file.stem for file in files), "minimum"]
    print(bench.table(record, heads, [[*key, *cells, min(cells)] for key, cells in rows.items()]))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "floor")
    add = p.add_argument
    add("--checkpoint", required=True, help="a converted target with an EAGLE-3 head")
    add("--questions", required=True, help="a folder of question files, see docs/evaluating.md")
    add("--speculate", default="eagle3", help="drafting method, see generate.py (default eagle3)")
    add("--limit", type=positive, default=4, help="questions of each set (default 4)")
    add("--context", type=int, nargs="+", default=[0, 4096], help="context tokens (default 0 4096)")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0],
        help="sampling temperatures (default 0 1)")
    add("--max-new-tokens", type=positive, default=96, help="maximum tokens of an answer (default 96)")
    add("--isa", help="instruction set of the kernels (default: the best)")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
