"""How well the choice between a tree and plain decoding does, replayed on texts whose acceptance is known.

    python benchmarks/replay.py --checkpoint DIR --questions DATA_DIR [--set PRIOR=8 MEMORY=0.98]

Each question is answered with one tree throughout; how much was accepted from every token on is what a choice
would have met there. `engine.switching.Switch` then decides on these texts, step by step, where a step with
the tree costs as many plain ones as --cost says, give or take what a shared machine does: 2 % of noise, a
disturbed step in 60, a slow moment of 3 to 10 steps in 150. The seeds are fixed. Nothing is timed.

A line per cost: the speedups over plain decoding that come out, over all texts, and the cells (median of a
set's at one temperature) below 0.98. --set tries other constants of engine/switching.py.
"""
from __future__ import annotations

import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import bench  # first: it makes the modules below importable
from bench import describe, write

from common.cli import note
from common.errors import InputError
from engine import switching
from engine.api import Drafting, load_target
from engine.calibration import SHORT, TEMPERATURES, Calibration
from engine.costs import Costs
from engine.runtime import Runtime
from engine.text_decoder import encode
from engine.tuning import Plan
from sampling.options import Sampling
from tokens.dataset import read_prompts
from tree import TreeShape

BEFORE = 64  # tokens before an answer
PLAIN = 1.01  # what a plain step costs a decoder that may draft
LEAST = 0.98  # the aim of a cell


class Text(NamedTuple):
    """An answer: its set and temperature, and how many tokens a step emits at each of its tokens."""

    questions: str
    temperature: float
    emits: list[int]


def record_texts(o, shape: TreeShape) -> tuple[list[Text], Calibration]:
    """The answers, and what is known of the head."""
    target = load_target(o.checkpoint, Runtime(), note)
    model = target.decoder(Drafting("eagle3", tree=shape))
    calibration = Calibration.read(model.decoder.drafter.folder)
    if calibration is None or shape not in calibration.taus[0.0]:
        raise InputError(f"{model.decoder.drafter.folder}: no calibration of the tree {shape.name}")
    texts = []
    for file in sorted(Path(o.questions).glob("*.jsonl")):
        for temperature in TEMPERATURES:
            for i, question in enumerate(read_prompts(file)[: o.limit]):
                sampling = Sampling(o.max_new_tokens, temperature, seed=i)
                answer = model.decoder.generate([encode(target.tokenizer, question)], sampling)[0]
                # Within what a step emitted, a step would have emitted at least the rest of it.
                emits = [left for n in answer.accept_lengths for left in range(n, 0, -1)]
                if emits:
                    texts.append(Text(file.stem, temperature, emits))
        note(f"{file.stem}: recorded")
    if not texts:
        raise InputError(f"{o.questions}: no .jsonl file whose answers have more than one token")
    return texts, calibration


def moods(rng: random.Random) -> Iterator[float]:
    """How many times what is usual each next step takes."""
    slow = 0
    while True:
        times = 1 + abs(rng.gauss(0, 0.02))
        if slow:
            slow, times = slow - 1, times * 1.3
        elif rng.random() < 1 / 150:
            slow = rng.randint(3, 10)
        yield times * (1.6 if rng.random() < 1 / 60 else 1)


def replay(
    texts: list[Text], calibration: Calibration, shape: TreeShape, cost: float, seed: int
) -> list[float]:
    """The speedup of each text; of one switch for all, as in a server."""
    costs = Costs({SHORT: {1: 1.0, shape.nodes: cost}}, {SHORT: {1: 0.0}}, {SHORT: {1: 0.0}})
    trees = (shape,)
    switch = switching.Switch(Plan(calibration, costs, 1, {False: trees, True: trees}))
    rng = random.Random(seed)
    drafting, plain = moods(rng), moods(rng)
    speedups = []
    for text in texts:
        switch.begin([text.temperature])
        at, seconds = 0, 0.0
        while at < len(text.emits):
            context, kind = BEFORE + at, switch.next(BEFORE + at)
            took = next(drafting) * (PLAIN if kind is None else cost)
            emitted = 1 if kind is None else text.emits[at]
            switch.time(kind, context, took)
            switch.record(kind, context, [emitted])
            at, seconds = at + emitted, seconds + took
        speedups.append(sum(next(plain) for _ in text.emits) / seconds)
    return speedups


def set_constants(settings: list[str]) -> None:
    """Change constants of engine/switching.py. Raises InputError on what is not one."""
    for setting in settings:
        name, _, value = setting.partition("=")
        before = getattr(switching, name, None)
        try:
            if not name.isupper() or not isinstance(before, (int, float)):
                raise ValueError
            setattr(switching, name, type(before)(value))
        except ValueError:
            raise InputError(f"--set {setting}: not NAME=NUMBER of engine/switching.py") from None


def run(o) -> None:
    """Record, replay, print a line per cost."""
    set_constants(o.set)
    shape = TreeShape.parse(o.tree)
    texts, calibration = record_texts(o, shape)
    result = describe(o.threads) | {"tree": shape.name, "set": o.set, "texts": len(texts), "costs": {}}
    print("| plain steps a step | mean | 5 % of texts below | least cell | cells below 0.98 |")
    print("|---" * 5 + "|")
    for cost in o.cost:
        all_speedups, cells = [], defaultdict(list)
        for seed in range(o.repeat):
            speedups = replay(texts, calibration, shape, cost, seed)
            all_speedups += speedups
            for text, speedup in zip(texts, speedups):
                cells[text.questions, text.temperature].append(speedup)
        medians = [statistics.median(cell) for cell in cells.values()]
        figures = {
            "mean": statistics.fmean(all_speedups), "low": statistics.quantiles(all_speedups, n=20)[0],
            "least": min(medians), "missed": sum(median < LEAST for median in medians),
        }
        result["costs"][cost] = figures
        mean, low, least, missed = figures.values()
        print(f"| {cost:g} | {mean:.3f} | {low:.3f} | {least:.3f} | {missed} of {len(cells)} |")
    write(o.name, result)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    p = bench.options(__doc__, "replay")
    add = p.add_argument
    add("--checkpoint", required=True, help="a converted target with an EAGLE-3 head")
    add("--questions", required=True, help="a folder of question files, see docs/evaluating.md")
    add("--tree", default="3,1,2", help="T,D,K (default 3,1,2)")
    add("--cost", type=float, nargs="+", default=[1.25, 1.42, 1.6], help="default 1.25 1.42 1.6")
    add("--limit", type=int, default=16, help="questions of each set (default 16)")
    add("--max-new-tokens", type=int, default=200, help="of an answer (default 200)")
    add("--repeat", type=int, default=5, help="replays of each text (default 5)")
    add("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="other constants of engine/switching.py")
    p.refuse(lambda o: min(o.cost) <= 1, lambda o: "--cost: must be above 1")
    for flag, least in (("--limit", 1), ("--max-new-tokens", 2), ("--repeat", 1)):
        p.within(flag, least, float("inf"))
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
