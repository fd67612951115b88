"""What heads of other shapes and kinds cost here, and the tau that makes them as fast as today's.

    python benchmarks/head_shapes.py --checkpoint checkpoints/smollm2-135m [--tree 5,2,2 8,2,4] [--repeat 3]

Drafting costs a head's first pass of a step, which finds its weights far away, and a pass for each further
level; a head that drafts a block has none of these but the Markov head's. Both are timed by what also
chooses trees (`engine.costs`), on heads with untrained weights, quantised as at loading; shapes take turns.
tau: today's head's, from its calibration.json, times the step with another head over the step with today's:
what the other has to be accepted for. Raw figures go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
from bench import describe, table_head, write

from checkpoint.loading import load_head, load_model
from common.cli import note
from common.errors import InputError
from drafters.dflash import DFlash
from drafters.eagle import Eagle
from drafters.network import HeadDrafter
from drafters.p_eagle import PEagle
from engine.api import Target, load_target
from engine.calibration import SHORT, Calibration
from engine.costs import Costs, measure
from model import Transformer
from networks.head import Head
from training.new_head import Shape, new_head
from tree import TreeShape

TODAY = "today's"
KINDS = {"eagle3": Eagle, "p-eagle": PEagle, "dflash": DFlash, "dspark": DFlash}
# By name: the kind, the draft vocabulary, the shape.
SHAPES = {
    "EAGLE-3, 16,384 draft ids": ("eagle3", 16384, Shape()),
    "EAGLE-3, 6,144 draft ids": ("eagle3", 6144, Shape()),
    "EAGLE-3, 2,048 draft ids": ("eagle3", 2048, Shape()),
    "EAGLE-3, two layers": ("eagle3", 10240, Shape(num_layers=2)),
    "EAGLE-3, width 384": (
        "eagle3", 10240, Shape(hidden_size=384, intermediate_size=1024, num_heads=6, num_kv_heads=2)
    ),
    "EAGLE-3, width 384, 6,144 draft ids": (
        "eagle3", 6144, Shape(hidden_size=384, intermediate_size=1024, num_heads=6, num_kv_heads=2)
    ),
    "P-EAGLE": ("p-eagle", 10240, Shape()),
    "P-EAGLE, Markov head of rank 32": ("p-eagle", 10240, Shape(markov_rank=32)),
    "P-EAGLE, two layers": ("p-eagle", 10240, Shape(num_layers=2)),
    "DFlash": ("dflash", 10240, Shape(states=3)),
    "DFlash, two layers": ("dflash", 10240, Shape(states=3, num_layers=2)),
    "DSpark": ("dspark", 10240, Shape(states=3, markov_rank=64, confidence=True)),
    "DSpark, two layers": ("dspark", 10240, Shape(states=3, num_layers=2, markov_rank=64, confidence=True)),
}


def weights(head: Head) -> int:
    """How many numbers the head's own matrices hold."""
    return sum(t.numel() for t in head.own_state().values() if t.ndim > 1)


def made(
    target: Target, lender: Transformer, kind: str, draft_vocab: int, shape: Shape, tree: TreeShape
) -> tuple[int, HeadDrafter]:
    """Weights and drafter of a new head on the target's kernels. lender: the target as it was loaded."""
    head = new_head(lender, kind, torch.arange(draft_vocab), shape, seed=0)
    head = head.to(target.model.embed.weight.dtype).requires_grad_(False)
    head.use_target(target.model)
    return weights(head), on_kernels(target, kind, head, tree)


def on_kernels(target: Target, kind: str, head: Head, tree: TreeShape) -> HeadDrafter:
    """The drafter of a head as `engine.api` makes it."""
    target.put_on_kernels(head, int8=True)
    return KINDS[kind](head, tree)


def median(costs: list[Costs]) -> Costs:
    """The medians of what was measured several times."""
    def of(several: list[dict[int, dict[int, float]]]) -> dict[int, dict[int, float]]:
        return {
            n: {rows: statistics.median(one[n][rows] for one in several) for rows in by_rows}
            for n, by_rows in several[0].items()
        }

    parts = zip(*((c.verify, c.read, c.level, c.texts) for c in costs))
    return Costs(*map(of, map(list, parts)))


def run(o) -> None:
    """Measure all shapes in turns; print a row of each."""
    target = load_target(o.checkpoint, say=note)
    if not target.model.whole:
        raise InputError(f"{o.checkpoint}: does not run on our CPU kernels here; costs would be others")
    folder = Path(o.checkpoint) / "eagle3"
    known = Calibration.read(folder)
    if known is None:
        raise InputError(f"{folder}: no calibration.json; evaluate.py --calibrate makes one")
    trees = [TreeShape.parse(name) for name in o.tree]
    largest = max(trees, key=lambda tree: (tree.window, tree.nodes))
    lender, _ = load_model(o.checkpoint)
    head = load_head(folder, target.model)
    drafters = {TODAY: (weights(head), on_kernels(target, "eagle3", head, largest))}
    drafters |= {name: made(target, lender, *what, largest) for name, what in SHAPES.items()}
    found: dict[str, list[Costs]] = {name: [] for name in drafters}
    for turn in range(o.repeat):
        for name, (_, drafter) in drafters.items():
            note(f"  {turn + 1}/{o.repeat} {name}")
            found[name].append(measure(target.model, drafter, False, (SHORT,)))
    costs = {name: median(several) for name, several in found.items()}
    # The target's pass is the same for all.
    verify = median([c for several in found.values() for c in several]).verify
    record = describe(o.threads) | {"context": SHORT, "rows": []}
    table_head(record, "million weights", "first pass", "level", *(
        column for name in o.tree for column in (f"step {name}", f"tau needed ({name})")
    ))
    for name, cost in costs.items():
        cost = Costs(verify, cost.read, cost.level)
        row = {"head": name, "weights": drafters[name][0], **asdict(cost), "trees": {}}
        passes = (f"{by_rows[SHORT][4] * 1e3:.2f}" for by_rows in (cost.read, cost.level))
        figures = [f"{row['weights'] / 1e6:.1f}", *passes]
        for tree in trees:
            today = Costs(verify, costs[TODAY].read, costs[TODAY].level).step(tree, SHORT)
            step = cost.step(tree, SHORT)
            needed = known.tau(tree, 0.0) * step / today
            row["trees"][tree.name] = {"step": step, "tau": needed}
            figures += [f"{step * 1e3:.2f}", f"{needed:.2f}"]
        record["rows"].append(row)
        print("|", " | ".join([name, *figures]), "|", flush=True)
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "head-shapes")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    add("--tree", nargs="+", default=["5,2,2", "8,2,4"], metavar="T,D,K")
    add("--repeat", type=int, default=3)
    p.within("--repeat", 1, float("inf"))
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
