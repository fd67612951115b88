"""Acceptance length of heads on question files: greedy, first turns, one tree. Quick, because nothing is
timed.

    python benchmarks/tau.py --checkpoint checkpoints/smollm2-135m --questions mt_bench.jsonl gsm8k.jsonl ... [--draft HEAD ...]

Raw figures go to benchmarks/results/NAME.json with date, device and torch version.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from bench import describe, write  # first: it makes the modules below importable

from checkpoint.loading import load_head, load_model
from common.cli import run_command
from kernels.cpu import load_kernels
from kernels.packed import pack
from tokens.dataset import read_prompts
from tokens.tokenizer import Tokenizer
from training.validate import acceptance
from tree import TreeShape


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--draft", nargs="+", metavar="HEAD", help="converted heads (default: CHECKPOINT/eagle3)")
    p.add_argument("--questions", nargs="+", required=True)
    p.add_argument("--limit", type=int)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--tree", default="60,7,10", metavar="T,D,K")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--name", default="tau", help="of the file under benchmarks/results")
    o = p.parse_args(argv)
    torch.set_num_threads(o.threads)
    return run_command(lambda: measure(o), OSError, ValueError)


def measure(o) -> None:
    """Decode all questions with every head; print a row per head."""
    target, config = load_model(o.checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    heads = {folder: load_head(folder, target) for folder in o.draft or [str(Path(o.checkpoint) / "eagle3")]}
    if target.embed.weight.device.type == "cpu":
        load_kernels()
        pack(target, *heads.values())
    tokenizer = Tokenizer.load(o.checkpoint)
    shape = TreeShape.parse(o.tree)
    sets = {}
    for path in o.questions:
        chats = [
            tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in read_prompts(path)[: o.limit]
        ]
        sets[Path(path).stem] = [
            ids for ids in chats if len(ids) + o.max_new_tokens <= target.args.max_seq_len
        ]
    record = describe(o.threads) | {"tree": o.tree, "max_new_tokens": o.max_new_tokens, "heads": {}}
    print("head", *sets, "mean", sep="\t")
    for folder, head in heads.items():
        found = {}
        for name, prompts in sets.items():
            found[name] = {
                "tau": acceptance(target, head, prompts, config["stop_ids"], shape, o.max_new_tokens),
                "prompts": len(prompts)
            }
        found["mean"] = {"tau": sum(f["tau"] for f in found.values()) / len(found)}
        record["heads"][folder] = found
        print(folder, *(f"{f['tau']:.3f}" for f in found.values()), sep="\t", flush=True)
        write(o.name, record)


if __name__ == "__main__":
    sys.exit(main())
