"""What layers in the host's memory cost on a GPU: a step with more and more of them, plain and drafted.

    python benchmarks/offload.py --shape llama-3.1-8b --modes int4 --layers 0 8 16 32

GB/s      of copies from pinned memory to the GPU, measured first
floor     the milliseconds that the offloaded layers' bytes take at that rate: no step can be faster
step      of each number of rows, see step.py; 1 row is plain decoding

Models have random weights. Layers move to the host's memory when the whole model has been made on the GPU: it
has to fit there once. Raw figures go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import argparse
import gc
import sys

import bench  # first: it makes the modules below importable
import torch
from bench import describe, write
from profiled import mark_verified
from step import TREES, HeldStep, Limit, bandwidth, measure, models_for

from common.cli import count, note
from common.errors import InputError, first_line
from kernels.modes import MODES
from kernels.offload import CudaStreams, offload

COPIED = 1 << 28  # bytes


def copy_rate(device: torch.device) -> float:
    """Bytes per second that come from pinned memory to this GPU. Raises InputError if it is none."""
    if device.type != "cuda":
        raise InputError(f"--device {device}: layers are offloaded from a GPU")
    streams = CudaStreams(device)
    source, target = streams.pinned(COPIED), torch.empty(COPIED, dtype=torch.uint8, device=device)

    def copy() -> None:
        streams.copy(target, source)
        streams.copies.synchronize()

    return COPIED / bench.median_seconds(copy, device)


def run(o) -> None:
    """Measure every mode and number of layers; print a line for each. Raises InputError if nothing fits."""
    device = torch.device(o.device)
    limit = Limit(o.limit)
    bench.use(o.device, o.compile)
    rate, roof = copy_rate(device), bandwidth(device)
    mark_verified()
    record = describe(o.threads) | {"model": o.shape, "bytes_per_second": rate, "rows": []}
    print(f"{o.shape} on {record['device']}: {rate / 1e9:.1f} GB/s from the host's memory")
    print(f"{'mode':>6} {'layers':>6} {'GB':>6} {'floor':>8} " + " ".join(f"{n:>5} rows" for n in o.rows))
    for mode in o.modes:
        for layers in o.layers:
            if not limit.fits():
                note(f"left out: {mode}, {layers} layers: no time (--limit {o.limit:g})")
                continue
            with limit.one():
                row = measured(o, mode, layers, roof)
            if row is None:
                continue
            row["floor"] = row["offloaded"] / rate * 1e3
            steps = " ".join(f"{row['steps'].get(n, float('nan')):10.2f}" for n in o.rows)
            gigabytes = row["offloaded"] / 1e9
            print(f"{mode:>6} {layers:6d} {gigabytes:6.2f} {row['floor']:8.2f} {steps}", flush=True)
            record["rows"].append(row)
            write(o.name, record)
            gc.collect()
    if not record["rows"]:
        raise InputError("nothing could be measured; see above")


def measured(o, mode: str, layers: int, roof: float) -> dict | None:
    """Milliseconds of a step by rows, with so many layers offloaded; None, said, if memory does not do."""
    try:
        target, head = models_for(o, mode, None)
        if layers:
            offload(target, layers)
        held = [HeldStep(target, head, TREES[rows], 1, o.context, o.compile) for rows in o.rows]
        for one in held:
            one.warm_up([o.context])
        found = measure(held, o.context, o.repeat, roof)
    except (ValueError, torch.OutOfMemoryError) as e:
        note(f"left out: {mode}, {layers} layers: {first_line(e)}")
        return None
    offloaded = layers * target.offloaded.bytes if layers else 0
    return {
        "mode": mode, "layers": layers, "offloaded": offloaded, "context": o.context,
        "steps": {row["rows"]: row["step"] for row in found},
    }


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "offload")
    add = p.add_argument
    add("--shape", default="llama-3.1-8b", help="a published shape, see benchmarks/shapes.py")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--modes", nargs="+", default=["int4"], choices=("none", *MODES), help="quantisation of both models")
    add("--layers", nargs="+", type=count, default=[0, 8, 16, 32], metavar="N", help="offloaded; 0: none")
    add("--rows", nargs="+", type=int, default=[1, 60], choices=TREES, metavar="T", help="tree sizes")
    add("--context", type=int, default=128, metavar="N")
    add("--repeat", type=int, default=8)
    add("--limit", type=float, default=float("inf"), metavar="SECONDS", help="begin nothing after that")
    p.refuse(lambda o: min(o.context, o.repeat) < 1, lambda o: "--context and --repeat must be at least 1")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.set_defaults(checkpoint=None, dtype=None)
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
