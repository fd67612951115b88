"""Whether drafting is ever slower than plain decoding: sets of questions, temperatures, lengths of context.

    python benchmarks/floor.py --checkpoint DIR --questions DATA_DIR [--context 0 4096] [--isa avx2]

Each question is answered plainly and with EAGLE-3 on the trees that were chosen here, both at once: whoever
has fewer tokens takes the next step, so that both meet the same moods of the machine. A cell is the median of
a set's speedups: the plain answer's decoding time over EAGLE's, whose text is the same.
--context N puts other questions of the set before a question, up to N tokens; 0 asks the question alone.

The cells, texts that differ, and which trees were taken go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import bench  # first: it makes the modules below importable
from bench import describe, pooled_tau, write

from common.cli import note
from common.errors import InputError
from engine.api import Drafting, Target, load_target
from engine.decoder import Decoder
from engine.run import Output, Run
from engine.runtime import Runtime
from engine.text_decoder import encode
from sampling.options import Sampling
from tokens.dataset import read_prompts


def prompts_of(target: Target, questions: list[str], count: int, context: int) -> Iterator[list[int]]:
    """The first `count` questions as ids, each after the same others, of `context` tokens at most."""
    before, used = "", 0
    others = questions[count:] or questions
    while context:
        text = others[used % len(others)] + "\n\n"
        if len(encode(target.tokenizer, before + text + max(questions[:count], key=len))) > context:
            break
        before, used = before + text, used + 1
    yield from (encode(target.tokenizer, before + question) for question in questions[:count])


def answer_at_once(
    decoders: tuple[Decoder, ...], prompt: list[int], sampling: Sampling
) -> list[tuple[Output, float]]:
    """The answer of each decoder, and the seconds that it took after the first token.

    What the cache holds of the prompt, from the question before, is not read again.
    """
    runs = [Run(decoder, [prompt], [sampling], reuse=True) for decoder in decoders]
    steps, seconds = [iter(run) for run in runs], [0.0] * len(runs)
    for run, step in zip(runs, steps):
        while not run.ids[0]:
            next(step)
    left = [*range(len(runs))]
    while left:
        i = min(left, key=lambda i: len(runs[i].ids[0]))
        began = time.perf_counter()
        if next(steps[i], None) is None:
            left.remove(i)
        seconds[i] += time.perf_counter() - began
    return [(run.outputs()[0], took) for run, took in zip(runs, seconds)]


def run(o) -> None:
    """Fill in the cells."""
    files = sorted(Path(o.questions).glob("*.jsonl"))
    if not files:
        raise InputError(f"{o.questions}: has no .jsonl files")
    target = load_target(o.checkpoint, Runtime(isa=o.isa), note)
    length = {"max_seq_len": max(o.context) + 1024 + o.max_new_tokens}
    fast, plain = (target.decoder(drafting, **length) for drafting in (Drafting("eagle3"), Drafting()))
    record = describe(o.threads) | {"checkpoint": o.checkpoint, "tokens": o.max_new_tokens, "cells": []}
    for temperature in o.temperature:
        for model in (fast, plain):
            model.warm_up(Sampling(8, temperature))
    for context in o.context:
        for file in files:
            for temperature in o.temperature:  # the caches hold what stands before the questions of a set
                cell = {"set": file.stem, "context": context, "temperature": temperature}
                cell |= measure(o, target, (fast.decoder, plain.decoder), file, context, temperature)
                record["cells"].append(cell)
                note(f"  {cell}")
    print_table(record, [file.stem for file in files])
    write(o.name, record)


def print_table(record: dict, sets: list[str]) -> None:
    """A row for each context and temperature."""
    print(f"| {record['device']}, {record['isa']}: context, temperature | {' | '.join(sets)} | least |")
    print("|---" * (len(sets) + 2) + "|")
    rows: dict[tuple, list[float]] = {}
    for cell in record["cells"]:
        rows.setdefault((cell["context"], cell["temperature"]), []).append(cell["speedup"])
    for (context, temperature), ratios in rows.items():
        cells = " | ".join(f"{ratio:.2f}" for ratio in (*ratios, min(ratios)))
        print(f"| {context}, {temperature:g} | {cells} |")


def measure(
    o, target: Target, decoders: tuple[Decoder, Decoder], file: Path, context: int, temperature: float
) -> dict:
    """One cell."""
    ratios, equal, lengths, trees = [], 0, [], Counter()
    for i, prompt in enumerate(prompts_of(target, read_prompts(file), o.limit, context)):
        sampling = Sampling(o.max_new_tokens, temperature, seed=i)
        (fast, seconds), (plain, plain_seconds) = answer_at_once(decoders, prompt, sampling)
        equal += fast.ids == plain.ids
        if fast.accept_lengths:
            ratios.append(plain_seconds / seconds)
            lengths.append(fast.accept_lengths)
        trees.update(decoders[0].trees_taken())
    if not ratios:
        raise InputError(f"{file}: no answer has more than one token: nothing to time")
    return {
        "speedup": statistics.median(ratios), "speedups": ratios, "tau": pooled_tau(lengths),
        "trees": dict(trees), "texts_equal": equal, "of": i + 1,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    p = bench.options(__doc__, "floor")
    add = p.add_argument
    add("--checkpoint", required=True, help="a converted target with an EAGLE-3 head")
    add("--questions", required=True, help="a folder of question files, see docs/evaluating.md")
    add("--limit", type=int, default=4, help="questions of each set (default 4)")
    add("--context", type=int, nargs="+", default=[0, 4096], help="tokens before an answer (default 0 4096)")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="default 0 1")
    add("--max-new-tokens", type=int, default=96, help="of an answer (default 96)")
    add("--isa", help="of the kernels (default: the best)")
    p.refuse(lambda o: min(o.context) < 0, lambda o: "--context: must be 0 or more tokens")
    for flag, least in (("--limit", 1), ("--max-new-tokens", 2)):
        p.within(flag, least, float("inf"))
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
