"""Losslessness, tau and speed on the first turns of a FastChat question file (MT-bench, say).

    python benchmarks/first_turns.py --checkpoint DIR --questions question.jsonl --equality
    python benchmarks/first_turns.py --checkpoint DIR --questions question.jsonl --speed [--transformers]
    python benchmarks/first_turns.py ... --speed --trees 8,2,3 12,3,4 16,3,4
    python benchmarks/first_turns.py ... --coupling

--equality  EAGLE-3 text against plain text, in float32 and the stored dtype, batches of 16, greedy and at
            temperature 1 with seeds
--speed     tokens per second in the stored dtype, batch 1, compiled: every question is decoded plainly, with
            each tree and (--transformers) by `generate` of transformers, in turns; medians and ratios
--coupling  tau at temperature 1 with coupled drafting on and off

Raw figures go to benchmarks/results/NAME.json with date, device and torch version.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import bench  # first: it makes the modules below importable
from bench import Decoded, describe, pooled_tau, write

from common.cli import note
from engine.api import Drafting, load_target
from engine.runtime import Runtime
from engine.text_decoder import Result, TextDecoder, encode
from sampling.options import Sampling
from tokens.dataset import read_prompts
from tree import TreeShape

PARTS = ("equality", "speed", "coupling")


def decode(model: TextDecoder, prompts: list[str], settings: list[Sampling]) -> list[Result]:
    """Decode all prompts, as many at a time as the decoder takes; results in order."""
    results, batch = [], model.decoder.batch
    for i in range(0, len(prompts), batch):
        job = model.job(prompts[i : i + batch], settings[i : i + batch])
        job.finish()
        results += job.results()
        note(f"  {len(results)}/{len(prompts)}")
    return results


def tau_of(results: list[Result]) -> float:
    """The acceptance length over all steps."""
    return pooled_tau(result.accept_lengths for result in results)


def equality(o, prompts: list[str], shape: TreeShape | None) -> dict:
    """Whether texts are equal, compiled as users run it unless --no-compile."""
    batch, record = min(16, len(prompts)), {}
    for dtype in ("fp32", None):
        target = load_target(o.checkpoint, Runtime(dtype=dtype, compile=o.compile), note)
        plain, fast = (target.decoder(d, batch=batch) for d in (Drafting(), Drafting("eagle3", tree=shape)))
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            settings = [Sampling(o.max_new_tokens, temperature, seed=i) for i in range(len(prompts))]
            expected, results = decode(plain, prompts, settings), decode(fast, prompts, settings)
            differ = [i for i, (a, b) in enumerate(zip(expected, results)) if a.ids != b.ids]
            name = f"{dtype or 'as stored'}, {name}"
            record[name] = {
                "equal": len(prompts) - len(differ), "of": len(prompts), "differ": differ,
                "tau": tau_of(results),
            }
            note(f"{name}: {record[name]}")
    return record


def speed(o, prompts: list[str], shape: TreeShape | None) -> dict:
    """Tokens per second of every contender: medians over the questions, and medians of ratios."""
    target = load_target(o.checkpoint, Runtime(compile=o.compile), note)
    trees = {f"eagle3 {spec}": TreeShape.parse(spec) for spec in o.trees} or {"eagle3": shape}
    draftings = {"plain": Drafting()} | {name: Drafting("eagle3", tree=tree) for name, tree in trees.items()}
    contenders = {name: bench.contender_of(target.decoder(drafting)) for name, drafting in draftings.items()}
    if o.transformers:
        from hugging_face import HuggingFace, as_llama

        unpacked = load_target(o.checkpoint, Runtime(compile=False), note)
        contenders["transformers"] = HuggingFace(as_llama(unpacked.model), target.config["stop_ids"]).decode
    ids = [encode(target.tokenizer, prompt) for prompt in prompts]
    rows = [_row(answers) for answers in bench.time_in_turns(contenders, ids, o.max_new_tokens)]
    record = {}
    for name in contenders:
        speeds = [row["tokens_per_second"] for row in rows]
        record[name] = {"tokens_per_second": statistics.median(speed[name] for speed in speeds)}
        for base in ("plain", "transformers"):
            if base in contenders and base != name:
                ratios = [speed[name] / speed[base] for speed in speeds]
                record[name][f"times_{base}"] = statistics.median(ratios)
        if name in trees:
            record[name] |= {
                "tau": pooled_tau(row["accept_lengths"][name] for row in rows),
                "texts_equal": sum(row["equal"][name] for row in rows), "of": len(rows),
            }
    return {**record, "rows": rows}


def _row(answers: dict[str, Decoded]) -> dict:
    """The raw figures of one question."""
    ours = {name: answer for name, answer in answers.items() if name != "transformers"}
    return {
        "tokens_per_second": {name: answer.tokens_per_second for name, answer in answers.items()},
        "equal": {name: answer.ids == answers["plain"].ids for name, answer in ours.items()},
        "accept_lengths": {name: answer.accept_lengths for name, answer in ours.items()},
    }


def coupling(o, prompts: list[str], shape: TreeShape | None) -> dict:
    """tau at temperature 1, the same seeds, coupled drafting on and off."""
    batch, record = min(16, len(prompts)), {}
    settings = [Sampling(o.max_new_tokens, 1.0, seed=i) for i in range(len(prompts))]
    target = load_target(o.checkpoint, Runtime(compile=o.compile), note)
    for name, coupled in (("coupled", True), ("uncoupled", False)):
        model = target.decoder(Drafting("eagle3", tree=shape, coupled=coupled), batch=batch)
        record[name] = {"tau": tau_of(decode(model, prompts, settings))}
        note(f"{name}: {record[name]}")
    return record


def run(o) -> None:
    """Measure the parts asked for; print and write them."""
    prompts = read_prompts(o.questions)[: o.limit]
    shape = TreeShape.parse(o.tree) if o.tree else None
    record = describe(o.threads) | {
        "questions": Path(o.questions).name, "count": len(prompts), "max_new_tokens": o.max_new_tokens,
        "tree": o.tree or "default",
    }
    for name, part in zip(PARTS, (equality, speed, coupling)):
        if getattr(o, name):
            record[name] = part(o, prompts, shape)
            print(name, json.dumps({k: v for k, v in record[name].items() if k != "rows"}, indent=1))
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "first_turns")
    add = p.add_argument
    add("--checkpoint", required=True)
    add("--questions", required=True)
    add("--limit", type=int)
    p.within("--limit", 1, float("inf"))
    add("--max-new-tokens", type=int, default=128)
    add("--tree", metavar="T,D,K", help="default: the device's default tree")
    add("--trees", nargs="+", default=[], metavar="T,D,K", help="with --speed: these instead of --tree")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--transformers", action="store_true", help="with --speed: time transformers too")
    for part in PARTS:
        add(f"--{part}", action="store_true")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
