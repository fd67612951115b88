"""Matrix products alone, ours and PyTorch's: every linear layer of a target once, over so many rows.

    python benchmarks/products.py --checkpoint checkpoints/smollm2-135m --isa avx2 avx512
    python benchmarks/products.py --shape llama-3.1-8b

All layers are multiplied one after the other, so that weights come from memory and not from a cache. The
products and the row counts take turns; figures are medians in milliseconds. "PyTorch whole" and "whole"
multiply by bf16 weights, "PyTorch int8pack" is torch._weight_int8pack_mm; on a CPU ours are named by their
instruction set. On CUDA ours are the Triton kernels, and the layers of a product are one captured graph; a
product that this GPU or PyTorch does not have is left out. Raw figures go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import bench  # first: it makes the modules below importable
import torch
import torch.nn as nn
import torch.nn.functional as F
from bench import describe, settle, table_head, write
from shapes import random_models

from checkpoint.loading import load_model
from common.cli import note
from common.errors import InputError, first_line
from kernels.choose import choose_backend
from kernels.cpu import CpuBackend
from kernels.packed import PackedLinear
from kernels.quantized import QuantizedLinear

PAUSE = 0.02  # seconds, in which the threads of PyTorch's products stop waiting at full speed for more
INT8PACK = "PyTorch int8pack"  # takes inputs without a batch dimension


def weights_of(checkpoint: str | None, shape: str | None, device: str) -> list[torch.Tensor]:
    """Every matrix that a pass of a checkpoint reads, or one of a shape with random weights, in bf16.

    The embedding table is one if it serves as lm_head. Raises InputError on a quantised checkpoint.
    """
    if shape:
        target, _ = random_models(shape, torch.bfloat16, device, None)
    else:
        target, config = load_model(checkpoint, device, torch.bfloat16)
        if "quantization" in config:
            raise InputError(f"{checkpoint}: is quantised; name the checkpoint before quantisation")
    linears = [m for name, m in target.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    return [linear.weight for linear in linears] + [target.lm_rows]


def int8pack(weight: torch.Tensor) -> Callable:
    """PyTorch's own product with int8 weights."""
    layer = QuantizedLinear.of(weight, "int8")
    q, scale = layer.weight.data, layer.scale.data.flatten().to(torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x, q, scale)


def unquantised(backend: CpuBackend, weight: torch.Tensor) -> PackedLinear:
    """Our CPU product with bf16 weights."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return PackedLinear(backend, linear, torch.bfloat16)


class Product(NamedTuple):
    """One kind of product: what takes rows of x for each matrix."""

    layers: list[Callable]


def products_of(weights: list[torch.Tensor], device: str, isas: list[str | None]) -> dict[str, Product]:
    """By name, a product with every matrix. isas: instruction sets of our CPU kernels, None for the best."""
    modes = {"int8": 0, "w8a8": 0}
    if all(w.shape[1] % 64 == 0 for w in weights):
        modes |= {"int4": 64, "w4a8": 64}
    products = {
        "PyTorch whole": Product([lambda x, w=w: F.linear(x, w) for w in weights]),
        INT8PACK: Product([int8pack(w) for w in weights]),
    }
    if device != "cpu":
        for mode in ("int8", "int4", "fp8"):
            if mode in modes or mode == "fp8":
                layers = [QuantizedLinear.of(w, mode, modes.get(mode, 0)) for w in weights]
                choose_backend(device).prepare(nn.ModuleList(layers))
                products[f"ours {mode}"] = Product(layers)
        return products
    for isa in isas:
        backend = CpuBackend.load(isa, note)
        name = backend.name
        products[f"{name} whole"] = Product([unquantised(backend, w) for w in weights])
        for mode, group in modes.items():
            layers = [QuantizedLinear.of(w, mode, group) for w in weights]
            products[f"{name} {mode}"] = Product([PackedLinear(backend, la, torch.bfloat16) for la in layers])
    return products


def multiply(layers: list[Callable], inputs: list[torch.Tensor]) -> None:
    """Each layer once, in order."""
    for layer, x in zip(layers, inputs):
        layer(x)


def calls_of(products: dict[str, Product], weights: list[torch.Tensor], o) -> dict[tuple[str, int], Callable]:
    """By name and rows, a call of all layers. What fails on a GPU is taken out of `products`, and said so."""
    calls = {}
    for rows in o.rows:
        batched = [torch.randn(1, rows, w.shape[1], dtype=torch.bfloat16, device=o.device) for w in weights]
        for name, product in [*products.items()]:
            inputs = [x[0] for x in batched] if name == INT8PACK else batched
            try:
                calls[name, rows] = bench.captured(partial(multiply, product.layers, inputs), o.device)
            except RuntimeError as e:
                note(f"{name}, {rows} rows: left out ({first_line(e)})")
                del products[name]
    return {(name, rows): call for (name, rows), call in calls.items() if name in products}


@torch.no_grad()
def run(o) -> None:
    """Measure, print, write. Raises InputError."""
    bench.use(o.device)
    weights = weights_of(o.checkpoint, o.shape, o.device)
    products = products_of(weights, o.device, o.isa or [None])
    calls = calls_of(products, weights, o)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for repeat in range(o.repeat + 1):  # the first one warms up
        for (name, rows), call in calls.items():
            settle(o.device)
            time.sleep(PAUSE)
            began = time.perf_counter()
            call()
            settle(o.device)
            if repeat:
                times[name, rows].append(time.perf_counter() - began)
    record = describe(o.threads) | {
        "checkpoint": o.checkpoint or o.shape, "rows": o.rows, "milliseconds": {}
    }
    table_head(record, *(f"{rows} rows" for rows in o.rows))
    for name in products:
        medians = [statistics.median(times[name, rows]) * 1e3 for rows in o.rows]
        record["milliseconds"][name] = medians
        print(f"| {name} | {' | '.join(f'{ms:.1f}' for ms in medians)} |")
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "products")
    add = p.add_argument
    bench.add_model(p, "converted target")
    add("--isa", nargs="+", metavar="NAME", help="instruction sets of our CPU kernels (default: the best)")
    add("--rows", nargs="+", type=int, default=[1, 8, 16, 32, 64], metavar="T")
    add("--repeat", type=int, default=15)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.refuse(lambda o: min(*o.rows, o.repeat) < 1, lambda o: "--rows and --repeat must be at least 1")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
