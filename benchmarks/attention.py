"""What context costs: all layers of a target, one pass over so many rows, on the CPU kernels.

    python benchmarks/attention.py --checkpoint checkpoints/smollm2-135m --isa avx512bf16 avx2

A pass verifies a tree of that many nodes (1 row: plain decoding) over caches that hold a context of random
keys and values. Its matrix products are the same at any context: what a longer one adds is attention.
Instruction sets, rows and contexts take turns; figures are medians in milliseconds. Raw figures go to
benchmarks/results/NAME.json.
"""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import bench  # first: it makes the modules below importable
import torch
import torch.nn as nn
from bench import describe, table_head, write
from torch import Tensor

from checkpoint.loading import load_model
from common.cli import note
from common.dtypes import KV_DTYPES
from common.errors import InputError
from kernels import cpu
from model import Transformer
from tree import visible_slots


def ancestors(rows: int) -> Tensor:
    """Which nodes each node of a binary tree sees: itself and those above it [1, rows, rows]."""
    seen = torch.eye(rows, dtype=torch.bool)
    for node in range(1, rows):
        seen[node] |= seen[(node - 1) // 2]
    return seen[None]


def caches_of(target: Transformer, slots: int) -> nn.ModuleList:
    """A cache of random values for each layer."""
    caches, a = target.caches(1, slots), target.args
    for cache in caches:
        width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        qkv = torch.randn(1, slots, width, dtype=target.embed.weight.dtype)
        zero = torch.zeros(1, slots, a.head_dim // 2)
        own = torch.arange(slots)[None]  # each row sees its own slot: they are only stored
        seen = torch.eye(slots, dtype=torch.bool)[None]
        ops = target.backend.ops
        ops.attend(qkv, zero + 1, zero, None, None, 0.0, cache.k, cache.v, own, seen)
    return caches


def verify_pass(target: Transformer, caches: nn.ModuleList, rows: int, context: int) -> Callable[[], object]:
    """A call of all layers on a tree of so many rows behind a context of so many tokens."""
    own = torch.arange(context, context + rows)[None]
    seen = ancestors(rows)
    positions = context + seen.sum(-1) - 1
    visible = visible_slots(torch.arange(context + rows), torch.tensor([context]), seen)
    tokens = torch.randint(0, target.args.vocab_size, (1, rows))
    return lambda: target(tokens, positions, own, visible, caches)


@torch.no_grad()
def run(o) -> None:
    """Measure, print, write. Raises InputError."""
    passes = {}
    for isa in o.isa or [None]:
        backend = cpu.CpuBackend.load(isa, note)
        name = backend.name
        target, _ = load_model(o.checkpoint, "cpu", torch.bfloat16)
        if not backend.prepare(target):
            raise InputError(f"{o.checkpoint}: has layers that the CPU kernels do not take")
        for kv in o.kv:
            target.Caches = backend.caches["int8" if kv == "int8" else "auto"]
            caches = caches_of(target, max(o.context) + max(o.rows))
            for rows in o.rows:
                for context in o.context:
                    passes[name, kv, rows, context] = verify_pass(target, caches, rows, context)
    times: dict[tuple, list[float]] = {key: [] for key in passes}
    for repeat in range(o.repeat + 1):  # the first one warms up
        for (isa, *size), call in passes.items():
            with cpu.CpuBackend.load(isa).threads():
                call()  # of another instruction set the processor's caches hold the weights
                began = time.perf_counter()
                call()
                if repeat:
                    times[(isa, *size)].append(time.perf_counter() - began)
    medians = {key: statistics.median(t) * 1e3 for key, t in times.items()}
    record = describe(o.threads) | {"checkpoint": o.checkpoint, "rows": []}
    table_head(record, *(f"{n} tokens" for n in o.context))
    for name, kv, rows in dict.fromkeys(key[:3] for key in passes):
        row = " | ".join(f"{medians[name, kv, rows, n]:.1f}" for n in o.context)
        print(f"| {name}, kv {kv}, {rows} rows | {row} |")
    record["rows"] = [dict(zip(("isa", "kv", "rows", "context"), key), ms=ms) for key, ms in medians.items()]
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "attention")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target")
    add("--isa", nargs="+", metavar="NAME", help="instruction sets of our CPU kernels (default: the best)")
    add("--kv", nargs="+", choices=[kv for kv in KV_DTYPES if kv != "fp8"], default=["auto"],
        help="keys and values: auto (bf16, the default), int8, or both")
    add("--rows", nargs="+", type=int, default=[1, 4, 8, 12], metavar="T")
    add("--context", nargs="+", type=int, default=[128, 1024, 4096], metavar="N")
    add("--repeat", type=int, default=15)
    p.refuse(
        lambda o: min(*o.rows, *o.context, o.repeat) < 1,
        lambda o: "--rows, --context and --repeat must be at least 1",
    )
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
