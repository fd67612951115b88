"""Acceptance length of heads on question files, by tree, window and temperature. Nothing is timed.

    python benchmarks/tau.py --checkpoint DIR --questions mt_bench.jsonl gsm8k.jsonl ... [--draft HEAD ...]
        [--tree 12,3,4 60,7,10] [--draft-window 0 512] [--temperature 0 1]

Heads run as in generate.py: 16-bit heads in w8a8 on our CPU kernels. τ is over all steps of a set,
`mean` over the sets. Writes benchmarks/results/NAME.json.
"""
from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path

import bench  # first: it makes the modules below importable
import ours
from bench import positive

from checkpoint.load import read_config
from common.cli import within
from common.errors import InputError
from engine.drafting import read_tree
from tokens.dataset import read_prompts


def action(o) -> None:
    """Decode all questions with every head, tree and window. Print a row for each."""
    model, max_prompt = ours.load(o.checkpoint), o.max_seq_len - o.max_new_tokens
    sets = {Path(path).stem: map(model.encode, read_prompts(path)[: o.limit]) for path in o.questions}
    sets = {name: [ids for ids in prompts if len(ids) < max_prompt] for name, prompts in sets.items()}
    if empty := [name for name, prompts in sets.items() if not prompts]:
        raise InputError(f"{empty[0]}: no question and its answer fit in --max-seq-len {o.max_seq_len}")
    rows, record = [], bench.describe(o) | {"max_new_tokens": o.max_new_tokens}
    heads = o.draft or [f"{o.checkpoint}/eagle3"]
    for head, tree, window in itertools.product(heads, o.tree, o.draft_window):
        kind = read_config(head)["kind"]
        runner = model.runner(
            "eagle2" if kind == "eagle" else kind, read_tree(tree), draft=head, window=window,
            max_seq_len=o.max_seq_len,
        )
        for temperature in o.temperature:
            row = {"head": head, "tree": tree, "window": window, "temperature": temperature}
            row |= {
                name: bench.tau(
                    runner.decode(ids, o.max_new_tokens, temperature, seed).accept_lengths
                    for seed, ids in enumerate(prompts)
                ) for name, prompts in sets.items()
            }
            row["mean"] = statistics.fmean(row[name] for name in sets)
            rows.append(row)
            bench.write(o.name, record | {"rows": rows})
    print(bench.table(record, rows[0], [row.values() for row in rows], digits=3))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "tau")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target")
    add("--draft", nargs="+", metavar="HEAD", help="converted heads (default: CHECKPOINT/eagle3)")
    add("--questions", nargs="+", required=True, metavar="FILE")
    add("--limit", type=positive, help="questions of each file at most")
    add("--max-new-tokens", type=positive, default=128)
    add("--max-seq-len", type=positive, default=2048, help="tokens of a question and its answer")
    add("--tree", nargs="+", default=["60,7,10"], metavar="T,D,K")
    add("--draft-window", nargs="+", type=within(0), default=[None], metavar="N",
        help="tokens that the head attends to; 0: all (default: as generate.py)")
    add("--temperature", nargs="+", type=float, default=[0.0], metavar="T")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
