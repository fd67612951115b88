"""What one exchange among ranks takes: microseconds to hand on the states of T rows and add them up.

    torchrun --nproc-per-node 2 benchmarks/exchange.py --hidden 576 --rows 1 8 60

Prints one line of JSON, from rank 0: microseconds by rows, medians. A pass over a target of L layers has
2 L such exchanges and one of tokens and scores.
"""
from __future__ import annotations

import json
import sys

import bench  # first: it makes the modules below importable
import torch
from bench import median_seconds

from kernels.tp import joined, own_device

REPEAT = 200


def run(o) -> None:
    """Time exchanges of every size."""
    device = own_device(o.device)
    dtype = torch.bfloat16
    with joined(device) as ranks:
        took = {}
        for rows in o.rows:
            x = torch.ones(1, rows, o.hidden, dtype=dtype, device=device)
            took[rows] = median_seconds(lambda x=x: ranks.sum(x), device, REPEAT) * 1e6
        if ranks.rank == 0:
            print(json.dumps({"ranks": ranks.count, "hidden": o.hidden, "microseconds": took}), flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "exchange", threads=1)
    p.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    p.add_argument("--hidden", type=int, default=576, help="numbers of a row's state (default 576)")
    p.add_argument("--rows", type=int, nargs="+", default=[1, 8, 60], metavar="T")
    p.refuse(lambda o: min(o.hidden, *o.rows) < 1, lambda o: "--hidden and --rows must be at least 1")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
