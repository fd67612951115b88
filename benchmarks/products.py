"""Time of the matrix products of a pass, ours and PyTorch's, for 1 to 64 tokens.

    python benchmarks/products.py --checkpoint checkpoints/smollm2-135m --isa avx2 avx512
    python benchmarks/products.py --shape llama-3.1-8b

All linear layers of a target run in order, so that weights are read from memory, not from a cache. Products
and token counts alternate; the table has medians in milliseconds. "PyTorch whole" and "whole" have bf16
weights, "PyTorch int8pack" is torch._weight_int8pack_mm; our CPU products are named by instruction set. On a
GPU our products are Triton kernels, and all layers of a product are one CUDA graph. A product that fails is
skipped. Writes benchmarks/results/NAME.json.
"""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import bench  # first: it makes the modules below importable
import ours
import torch
import torch.nn.functional as F
from bench import positive, synchronize
from torch import Tensor, nn

from common.cli import log_stderr
from common.errors import InputError, first_line
from kernels.choose import choose_backend
from kernels.cpu import CpuBackend
from kernels.packed import PackedLinear
from kernels.quantized import QuantizedLinear
from kernels.stored import int4_kind
from quantize import DEFAULT_GROUP

PAUSE = 0.02  # seconds until idle threads of PyTorch's products stop spinning


def weights_of(args) -> list[Tensor]:
    """Return every matrix that a pass reads, in bf16. Raise InputError on a quantized checkpoint."""
    target = ours.plain_modules(args.checkpoint, args.shape, dtype="bf16", device=args.device)
    linears = [m for name, m in target.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    if len(linears) < target.args.num_layers:
        raise InputError(f"{args.checkpoint}: is quantized; pass the checkpoint before quantization")
    return [linear.weight for linear in linears] + [target.output_layer.weight]


def int8pack(weight: Tensor) -> Callable:
    """Return PyTorch's product with int8 weights."""
    layer = QuantizedLinear.from_weight(weight, None, "int8")
    q, scale = layer.weight.data, layer.scale.data.flatten().to(torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x[0], q, scale)


def unquantized(backend: CpuBackend, weight: Tensor) -> PackedLinear:
    """Return our CPU product with bf16 weights."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return PackedLinear(backend, linear, torch.bfloat16)


def products_of(weights: list[Tensor], args) -> dict[str, list[Callable]]:
    """Return, by backend and weight format, one callable per layer."""
    on_cpu = weights[0].device.type == "cpu"
    modes = {mode: mode for mode in (("int8", "w8a8") if on_cpu else ("int8", "fp8"))}
    if all(w.shape[1] % DEFAULT_GROUP == 0 for w in weights):
        modes["4 bits"] = int4_kind(DEFAULT_GROUP)
    products = {
        "PyTorch whole": [partial(F.linear, weight=w) for w in weights],
        "PyTorch int8pack": [int8pack(w) for w in weights],
    }
    if not on_cpu:
        for name, mode in modes.items():
            layers = [QuantizedLinear.from_weight(w, None, mode) for w in weights]
            choose_backend(weights[0].device).prepare(nn.ModuleList(layers))
            products[f"ours {name}"] = layers
        return products
    for isa in args.isa or [None]:
        backend = CpuBackend.load(isa, log_stderr)
        products[f"{backend.name} whole"] = [unquantized(backend, w) for w in weights]
        for name, mode in modes.items():
            layers = [QuantizedLinear.from_weight(w, None, mode) for w in weights]
            products[f"{backend.name} {name}"] = [PackedLinear(backend, x, torch.bfloat16) for x in layers]
    return products


def multiply(layers: list[Callable], inputs: list[Tensor]) -> None:
    """Call each layer once, in order."""
    for layer, x in zip(layers, inputs):
        layer(x)


@torch.no_grad()
def action(args) -> None:
    """Time all products, alternating. Print the table."""
    weights = weights_of(args)
    device, products, calls = weights[0].device, products_of(weights, args), {}
    for name, product in products.items():
        for rows in args.rows:
            inputs = [torch.randn(1, rows, w.shape[1], dtype=w.dtype, device=device) for w in weights]
            try:
                call = ours.captured(partial(multiply, product, inputs), device)
                call()  # warmup; unsupported products fail here
                calls[name, rows] = call
            except RuntimeError as e:
                log_stderr(f"{name}, {rows} tokens: skipped ({first_line(e)})")
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(args.repeat):
        for (name, rows), call in calls.items():
            synchronize(device)
            time.sleep(PAUSE)
            start_time = time.perf_counter()
            call()
            synchronize(device)
            times[name, rows].append(time.perf_counter() - start_time)
    medians = {key: statistics.median(t) * 1e3 for key, t in times.items()}
    table = {name: [medians.get((name, rows)) for rows in args.rows] for name in products}
    record = bench.describe(args) | {"checkpoint": args.checkpoint or args.shape, "rows": args.rows}
    columns = ["ms", *(f"{n} tokens" for n in args.rows)]
    print(bench.table(record, columns, [[k, *v] for k, v in table.items()]))
    bench.write(args.name, record | {"milliseconds": table})


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "products")
    bench.add_model(p)
    p.add_argument("--isa", nargs="+", metavar="NAME",
                   help="instruction sets of our CPU kernels (default: the best)")
    p.add_argument("--rows", nargs="+", type=positive, default=[1, 8, 16, 32, 64], metavar="T",
                   help="numbers of tokens (default 1 8 16 32 64)")
    p.add_argument("--repeat", type=positive, default=15, help="timings of each product (default 15)")
    p.add_argument("--device", help="device (default: cuda if available, else cpu)")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    sys.exit(main())
