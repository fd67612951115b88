"""Compare the choice of the tree with the best fixed tree of each text, on simulated texts.

    python benchmarks/choice.py --checkpoint DIR [--set PRIOR=8 MARGIN=1.05]

Times of steps and acceptance are those of this machine and head: a warm-up and the head's calibration. Each
start warms up a tuner and decodes texts, easy and hard as they occur; a step takes what the warm-up found,
give or take what a shared machine does: 5 % of noise, a disturbed step in 40, a slow while of 5 to 60 steps
in 150. Seeds are fixed; nothing else is timed. --set tries other constants of engine/autotune.py. Writes
benchmarks/results/NAME.json: by temperature, the speed over plain decoding's and over the best tree's.
"""
from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator

import bench  # first: it makes the modules below importable
import ours
from bench import positive

LENGTH = 96  # tokens of a text


def moods(rng: random.Random) -> Iterator[float]:
    """Yield how long each next step takes, in times of an undisturbed one."""
    slow = 0
    while True:
        times = 1 + abs(rng.gauss(0, 0.05))
        if slow:
            slow, times = slow - 1, times * 1.35
        elif rng.random() < 1 / 150:
            slow = rng.randint(5, 60)
        yield times * (1.6 if rng.random() < 1 / 40 else 1)


def emitted(rng: random.Random, tau: float, most: int) -> int:
    """Draw the tokens of a step: each further one with one probability, so that the mean is tau."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(most)) < tau else (low, middle)
    count = 1
    while count < most and rng.random() < low:
        count += 1
    return count


def start(choice: ours.Choice, temperature: float, texts: int, seed: int) -> list[tuple[float, float]]:
    """Return the speed of each text over plain decoding's and over that of the best tree for it."""
    rng, speeds = random.Random(seed), []
    mood = moods(rng)
    usual = statistics.fmean(next(moods(random.Random(i))) for i in range(1000))

    def step(ease: float) -> tuple[int, float]:
        tree = choice.next()
        count = emitted(rng, choice.tau(tree, ease), tree.window) if tree else 1
        return count, choice.took(tree, count, choice.seconds[tree] * next(mood) / usual)

    choice.begin(temperature, lambda: step(1.0))
    for _ in range(texts):
        ease, tokens, seconds = rng.choice(choice.eases), 0, 0.0
        choice.begin(temperature)
        while tokens < LENGTH:
            count, took = step(ease)
            tokens, seconds = tokens + count, seconds + took
        best = max(choice.tau(tree, ease) / t for tree, t in choice.seconds.items())
        speeds.append((tokens / seconds * choice.seconds[None], tokens / seconds / best))
    return speeds


def action(o) -> None:
    """Simulate all starts. Print a row for each temperature."""
    for setting in o.set:
        ours.set_constant(setting)
    rows = []
    for temperature in (0.0, 1.0):
        seconds = ours.load(o.checkpoint).times(temperature)
        found = [
            pair for seed in range(o.starts)
            for pair in start(ours.Choice(o.checkpoint, seconds), temperature, o.texts, seed)
        ]
        plain, best = zip(*found)
        rows.append({
            "temperature": temperature, "over plain": statistics.fmean(plain),
            "over the best tree": statistics.fmean(best), "least over plain": min(plain),
        })
    record = bench.describe(o) | {"set": o.set, "starts": o.starts, "texts": o.texts, "rows": rows}
    bench.write(o.name, record)
    print(bench.table(record, rows[0], [row.values() for row in rows], digits=3))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "choice")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    add("--starts", type=positive, default=200, help="simulated processes (default 200)")
    add("--texts", type=positive, default=8, help="of each (default 8)")
    add("--set", nargs="+", default=[], metavar="NAME=NUMBER", help="other constants of the choice")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
