"""Replay of the choice between a tree and plain decoding on texts whose acceptance is known.

    python benchmarks/replay.py --checkpoint DIR --questions DATA_DIR --texts FILE [--set PRIOR=8 MEMORY=0.98]

Each question is answered with one tree throughout; how much was accepted from every token on is what a choice
would have met there. These texts are written to --texts, and read from there the next time. The engine's
choice then decides on them, step by step, where a step with the tree costs as many plain ones as --cost says,
give or take what a shared machine does: 2 % of noise, a disturbed step in 60, a slow moment of 3 to 10 steps
in 150. The seeds are fixed. Nothing is timed.

A line per cost: the speedups over plain decoding, over all texts, and the cells (median of a set's at one
temperature) below 0.98. --set tries other constants of the choice. Writes benchmarks/results/NAME.json.
"""
from __future__ import annotations

import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import bench  # first: it makes the modules below importable
import ours
from bench import positive

from common.cli import note
from common.errors import InputError
from tokens.dataset import read_prompts
from tree import TreeShape

BEFORE = 64  # tokens before an answer
PLAIN = 1.01  # plain steps that a plain step costs a decoder that may draft
LEAST = 0.98  # the aim of a cell


def record_texts(o) -> list[dict]:
    """Return the answers: set, temperature, and the tokens that a step emits at each of their tokens."""
    model, texts = ours.load(o.checkpoint), []
    runner = model.runner("eagle3", TreeShape.parse(o.tree))
    for file in sorted(Path(o.questions).glob("*.jsonl")):
        for temperature in (0.0, 1.0):
            for seed, question in enumerate(read_prompts(file)[: o.limit]):
                answer = runner.decode(model.encode(question), o.max_new_tokens, temperature, seed)
                # Within what a step emitted, a step would have emitted at least the rest of it.
                emits = [left for n in answer.accept_lengths for left in range(n, 0, -1)]
                if emits:
                    texts.append({"set": file.stem, "temperature": temperature, "emits": emits})
        note(f"{file.stem}: recorded")
    return texts


def moods(rng: random.Random) -> Iterator[float]:
    """Yield how long each next step takes, in times of an undisturbed one."""
    slow = 0
    while True:
        times = 1 + abs(rng.gauss(0, 0.02))
        if slow:
            slow, times = slow - 1, times * 1.3
        elif rng.random() < 1 / 150:
            slow = rng.randint(3, 10)
        yield times * (1.6 if rng.random() < 1 / 60 else 1)


def replay(texts: list[dict], choice: ours.Choice, cost: float, seed: int) -> list[float]:
    """Return the speedup of each text. One choice serves them all, as in a server."""
    rng = random.Random(seed)
    drafting, plain = moods(rng), moods(rng)
    speedups = []
    for text in texts:
        choice.begin(text["temperature"])
        at, seconds = 0, 0.0
        while at < len(text["emits"]):
            took = next(drafting)
            times, emitted = (took * PLAIN, took * cost), text["emits"][at]
            drafted = choice.step(BEFORE + at, times, emitted)
            at, seconds = at + (emitted if drafted else 1), seconds + times[drafted]
        speedups.append(sum(next(plain) for _ in text["emits"]) / seconds)
    return speedups


def action(o) -> None:
    """Record, replay, print a line per cost."""
    for setting in o.set:
        ours.set_constant(setting)
    shape, file = TreeShape.parse(o.tree), Path(o.texts)
    if not file.exists():
        file.write_text(json.dumps({"tree": o.tree, "texts": record_texts(o)}))
    kept = json.loads(file.read_text())
    if kept["tree"] != o.tree or not kept["texts"]:
        raise InputError(f"{file}: holds {len(kept['texts'])} texts of the tree {kept['tree']}; delete it")
    rows, record = [], bench.describe(o) | {"tree": o.tree, "set": o.set, "texts": len(kept["texts"])}
    for cost in o.cost:
        speedups, cells = [], defaultdict(list)
        for seed in range(o.repeat):
            choice = ours.Choice(Path(o.checkpoint) / "eagle3", shape, cost)
            found = replay(kept["texts"], choice, cost, seed)
            speedups += found
            for text, speedup in zip(kept["texts"], found):
                cells[text["set"], text["temperature"]].append(speedup)
        medians = [statistics.median(cell) for cell in cells.values()]
        rows.append({
            "plain steps a step": cost, "mean": statistics.fmean(speedups),
            "5 % of texts below": statistics.quantiles(speedups, n=20)[0], "least cell": min(medians),
            f"cells below {LEAST}": sum(median < LEAST for median in medians), "cells": len(medians),
        })
    bench.write(o.name, record | {"costs": rows})
    print(bench.table(record, rows[0], [row.values() for row in rows], digits=3))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "replay")
    add = p.add_argument
    add("--checkpoint", required=True, help="a converted target with an EAGLE-3 head and its calibration")
    add("--questions", required=True, help="a folder of question files, see docs/evaluating.md")
    add("--texts", required=True, metavar="FILE", help="the recorded texts; made if it does not exist")
    add("--tree", default="3,1,2", help="T,D,K (default 3,1,2)")
    add("--cost", type=float, nargs="+", default=[1.25, 1.42, 1.6], help="default 1.25 1.42 1.6")
    add("--limit", type=positive, default=16, help="questions of each set (default 16)")
    add("--max-new-tokens", type=positive, default=200, help="of an answer (default 200)")
    add("--repeat", type=positive, default=5, help="replays of each text (default 5)")
    add("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="other constants of the choice")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
