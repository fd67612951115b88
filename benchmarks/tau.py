"""Acceptance length of heads by question set, tree, draft window and temperature.

    python benchmarks/tau.py --checkpoint DIR --questions mt_bench.jsonl gsm8k.jsonl ... [--draft HEAD ...]
        [--tree 12,3,4 60,7,10] [--draft-window 0 512] [--temperature 0 1] [--calibration]

Heads run as in generate.py: 16-bit heads in w8a8 on our CPU kernels. τ is the mean over all steps of a set,
`mean` the mean over sets. Writes benchmarks/results/NAME.json. With --calibration also NAME.png: acceptance
rate of nodes by their path probability (arXiv 2406.16858, section 3).
"""
from __future__ import annotations

import itertools
import math
import statistics
import sys
from pathlib import Path

import bench  # first: it makes the modules below importable
import ours
from bench import positive
from plots import picture

from checkpoint.load import read_config
from common.cli import within
from common.errors import InputError
from engine.drafting import read_tree
from engine.engine import Engine
from engine.sampling import Sampling
from tokens.dataset import read_prompts

BINS = 10  # of path probabilities


def node_outcomes(engine: Engine, ids: list[int], sampling: Sampling) -> tuple[list[int], list[tuple]]:
    """Decode a prompt. Return acceptance lengths, and the probability and outcome of each drafted node."""
    requests, outcomes = [], []
    for event in engine.run([ids], [sampling], requests, watch=True):
        if event.draft:
            nodes = enumerate(event.draft.scores[1:], 1)
            outcomes += [(math.exp(score), node in event.draft.path) for node, score in nodes]
    return requests[0].accept_lengths, outcomes


def calibration(outcomes: list[tuple[float, bool]]) -> list[dict]:
    """Return mean probability, accepted fraction and number of nodes of each bin of probability."""
    by_bin: dict[int, list] = {}
    for outcome in outcomes:
        by_bin.setdefault(min(int(outcome[0] * BINS), BINS - 1), []).append(outcome)
    return [
        {"predicted": statistics.fmean(p for p, _ in members), "nodes": len(members),
         "accepted": statistics.fmean(accepted for _, accepted in members)}
        for _, members in sorted(by_bin.items())
    ]


def plot(rows: list[dict], path: Path) -> None:
    """Draw the calibration of each row."""
    with picture(path, 4, 3.6) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="#bbb", linewidth=0.8)
        for row in rows:
            x, y = ([bin_[key] for bin_ in row["calibration"]] for key in ("predicted", "accepted"))
            label = f"{Path(row['head']).name}, T = {row['temperature']:g}"
            axes.plot(x, y, marker="o", markersize=3, label=label)
        axes.set(xlabel="path probability (draft head)", ylabel="acceptance rate")
        axes.legend()


def action(args) -> None:
    """Decode all questions with every head, tree and window. Print a row for each."""
    model, max_prompt = ours.load(args.checkpoint), args.max_seq_len - args.max_new_tokens
    sets = {Path(path).stem: map(model.encode, read_prompts(path)[: args.limit]) for path in args.questions}
    sets = {name: [ids for ids in prompts if len(ids) < max_prompt] for name, prompts in sets.items()}
    if empty := [name for name, prompts in sets.items() if not prompts]:
        raise InputError(f"{empty[0]}: no question and its answer fit in --max-seq-len {args.max_seq_len}")
    rows, record = [], bench.describe(args) | {"max_new_tokens": args.max_new_tokens}
    heads = args.draft or [f"{args.checkpoint}/eagle3"]
    for head, tree, window in itertools.product(heads, args.tree, args.draft_window):
        head_kind = read_config(head)["kind"]
        runner = model.runner(
            "eagle2" if head_kind == "eagle" else head_kind, read_tree(tree), draft=head, window=window,
            max_seq_len=args.max_seq_len,
        )
        for temperature in args.temperature:
            row = {"head": head, "tree": tree, "window": window, "temperature": temperature}
            outcomes = []
            for name, prompts in sets.items():
                lengths = []
                for seed, ids in enumerate(prompts):
                    sampling = Sampling(args.max_new_tokens, temperature, seed=seed)
                    accept_lengths, new_outcomes = node_outcomes(runner.engine, ids, sampling)
                    lengths.append(accept_lengths)
                    outcomes += new_outcomes
                row[name] = bench.tau(lengths)
            row["mean"] = statistics.fmean(row[name] for name in sets)
            rows.append(row | ({"calibration": calibration(outcomes)} if args.calibration else {}))
            bench.write(args.name, record | {"rows": rows})
    print(bench.table(record, row, [list(values.values())[: len(row)] for values in rows], digits=3))
    if args.calibration:
        plot(rows, bench.RESULTS / f"{args.name}.png")


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "tau")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target")
    add("--draft", nargs="+", metavar="HEAD", help="converted heads (default: CHECKPOINT/eagle3)")
    add("--questions", nargs="+", required=True, metavar="FILE",
        help="JSON lines; the first turn of each is the prompt")
    add("--limit", type=positive, help="maximum number of questions per file")
    add("--max-new-tokens", type=positive, default=128, help="maximum tokens of an answer (default 128)")
    add("--max-seq-len", type=positive, default=2048, help="maximum tokens of a sequence (default 2048)")
    add("--tree", nargs="+", default=["60,7,10"], metavar="T,D,K", help="trees (default 60,7,10)")
    add("--draft-window", nargs="+", type=within(0), default=[None], metavar="N",
        help="tokens that the head attends to; 0: all (default: as generate.py)")
    add("--temperature", nargs="+", type=float, default=[0.0], metavar="T", help="temperatures (default 0)")
    add("--calibration", action="store_true", help="draw predicted and measured acceptance")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
