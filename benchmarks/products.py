"""The products of one pass alone, ours and PyTorch's: every linear layer of a checkpoint's target once, over
so many rows.

    python benchmarks/products.py --checkpoint checkpoints/smollm2-135m

All layers one after the other, so that weights come from memory and not from a cache; the ways and row counts
take turns; medians of milliseconds. `whole` multiplies by bf16 weights, `int8pack` is
torch._weight_int8pack_mm. On CUDA ours are the Triton kernels, each way compiled. Raw figures go to
benchmarks/results/NAME.json.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from bench import describe, write  # first: it makes the modules below importable

from checkpoint.loading import load_model
from common.cli import run_command
from common.errors import InputError
from engine.runtime import check_device
from kernels.cpu import load_kernels
from kernels.packed import PackedLinear
from kernels.quantized import QuantizedLinear


def weights_of(checkpoint: str, device: str) -> list[torch.Tensor]:
    """Every matrix a pass reads, in bf16; of a tied lm_head the table. Raises InputError on a quantised
    checkpoint.
    """
    target, config = load_model(checkpoint, device, torch.bfloat16)
    if "quantization" in config:
        raise InputError(f"{checkpoint}: is quantised; name the checkpoint before quantisation")
    return [
        m.weight for name, m in target.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"
    ] + [target.lm_rows]


def int8pack(weight: torch.Tensor) -> Callable:
    """PyTorch's own product with int8 weights."""
    layer = QuantizedLinear.of(weight, "int8")
    q, scale = layer.weight.data, layer.scale.data.flatten().to(torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x, q, scale)


def ways(weights: list[torch.Tensor], device: str) -> dict[str, list[Callable]]:
    """By name, a product for every matrix."""
    def quantised(mode: str, group: int = 0) -> list[Callable]:
        layers = [QuantizedLinear.of(w, mode, group) for w in weights]
        if device == "cpu":
            return [PackedLinear(layer, torch.bfloat16) for layer in layers]
        return [torch.compile(layer, dynamic=False) for layer in layers]

    found: dict[str, list[Callable]] = {"PyTorch whole": [lambda x, w=w: F.linear(x, w) for w in weights]}
    found["PyTorch int8pack"] = [int8pack(w) for w in weights]
    if device == "cpu":
        linears = [nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta") for w in weights]
        for linear, w in zip(linears, weights):
            linear.weight = nn.Parameter(w, requires_grad=False)
        found["ours whole"] = [PackedLinear(linear, torch.bfloat16) for linear in linears]
    found["ours int8"] = quantised("int8")
    if device == "cpu":
        found["ours w8a8"] = quantised("w8a8")
    if all(w.shape[1] % 64 == 0 for w in weights):
        found["ours int4"] = quantised("int4", 64)
    return found


@torch.no_grad()
def run(o) -> None:
    """Measure, print, write. Raises InputError."""
    if min(o.rows) < 1 or o.repeat < 1 or o.threads < 1:
        raise InputError("--rows, --repeat and --threads must be at least 1")
    torch.set_num_threads(o.threads)
    check_device(o.device)
    weights = weights_of(o.checkpoint, o.device)
    if o.device == "cpu":
        load_kernels(lambda line: print(line, file=sys.stderr))
    products, times = ways(weights, o.device), {}
    inputs = {
        rows: [torch.randn(1, rows, w.shape[1], dtype=torch.bfloat16, device=o.device) for w in weights]
        for rows in o.rows
    }
    for repeat in range(o.repeat + 1):  # the first is for warming up
        for rows, given in inputs.items():
            for name, layers in products.items():
                flat = [x[0] for x in given] if name.endswith("int8pack") else given
                settle(o.device)
                began = time.perf_counter()
                for layer, x in zip(layers, flat):
                    layer(x)
                settle(o.device)
                if repeat:
                    times.setdefault((name, rows), []).append(time.perf_counter() - began)
    record = describe(o.threads) | {"checkpoint": o.checkpoint, "rows": o.rows, "milliseconds": {}}
    print(
        f"| {record['device']}, {o.threads} threads, ms | " + " | ".join(
            f"{rows} rows" for rows in o.rows
        ) + " |"
    )
    print("|---" * (len(o.rows) + 1) + "|")
    for name in products:
        middle = [statistics.median(times[name, rows]) * 1e3 for rows in o.rows]
        record["milliseconds"][name] = middle
        print(f"| {name} | " + " | ".join(f"{ms:.1f}" for ms in middle) + " |")
    write(o.name, record)


def settle(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True, help="converted target")
    p.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64], metavar="T")
    p.add_argument("--repeat", type=int, default=15)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--name", default="products", help="of the file under benchmarks/results")
    o = p.parse_args(argv)
    return run_command(lambda: run(o), OSError)


if __name__ == "__main__":
    sys.exit(main())
