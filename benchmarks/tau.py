"""Acceptance length of heads on question files: first turns, each tree and temperature. Nothing is timed.

    python benchmarks/tau.py --checkpoint DIR --questions mt_bench.jsonl gsm8k.jsonl ... [--draft HEAD ...]
        [--tree 12,3,4 60,7,10] [--temperature 0 1]

tau is over all steps of a set, `mean` the mean over the sets. Raw figures go to benchmarks/results/NAME.json
with date, device and torch version.
"""
from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
from bench import describe, write

from checkpoint.loading import load_head, load_model
from common.errors import InputError
from engine.text_decoder import encode
from kernels.choose import choose_backend
from tokens.dataset import read_prompts
from tokens.tokenizer import Tokenizer
from training.validate import acceptance
from tree import TreeShape


def prompts_of(path: str, o, longest: int) -> list[list[int]]:
    """The first turns of a question file as ids, those whose answers fit in `longest` tokens.

    Raises InputError if there are none.
    """
    tokenizer = Tokenizer.load(o.checkpoint)
    prompts = [encode(tokenizer, prompt) for prompt in read_prompts(path)[: o.limit]]
    fitting = [ids for ids in prompts if len(ids) + o.max_new_tokens <= longest]
    if not fitting:
        raise InputError(f"{path}: no question and its answer fit in the model's {longest} tokens")
    return fitting


def run(o) -> None:
    """Decode all questions with every head; print a row per head."""
    target, config = load_model(o.checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    heads = {folder: load_head(folder, target) for folder in o.draft or [str(Path(o.checkpoint) / "eagle3")]}
    if target.embed.weight.device.type == "cpu":
        choose_backend("cpu").prepare(target, *heads.values())
    trees = [(tree, TreeShape.parse(tree)) for tree in o.tree]
    sets = {Path(path).stem: prompts_of(path, o, target.args.max_seq_len) for path in o.questions}
    record = describe(o.threads) | {"max_new_tokens": o.max_new_tokens, "rows": []}
    print("head", "tree", "T", *sets, "mean", sep="\t")
    for folder, (tree, shape), temperature in itertools.product(heads, trees, o.temperature):
        figures = {}
        for name, prompts in sets.items():
            tau = acceptance(
                target, heads[folder], prompts, config["stop_ids"], shape, o.max_new_tokens, temperature
            )
            if tau is None:
                raise InputError(f"{name}: no answer has more than one token: there is no acceptance length")
            figures[name] = {"tau": tau, "prompts": len(prompts)}
        figures["mean"] = {"tau": statistics.fmean(figure["tau"] for figure in figures.values())}
        record["rows"].append({"head": folder, "tree": tree, "temperature": temperature, **figures})
        taus = (f"{figure['tau']:.3f}" for figure in figures.values())
        print(folder, tree, temperature, *taus, sep="\t", flush=True)
        write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "tau")
    add = p.add_argument
    add("--checkpoint", required=True)
    add("--draft", nargs="+", metavar="HEAD", help="converted heads (default: CHECKPOINT/eagle3)")
    add("--questions", nargs="+", required=True)
    add("--limit", type=int)
    p.within("--limit", 1, float("inf"))
    add("--max-new-tokens", type=int, default=128)
    add("--tree", nargs="+", default=["60,7,10"], metavar="T,D,K")
    add("--temperature", nargs="+", type=float, default=[0.0], metavar="T")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
