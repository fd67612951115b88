"""What a GPU gives: memory bandwidth, the cost of a small kernel in a graph, products of a model's layers.

    python benchmarks/probe.py --shape llama-3.1-8b

launch    a graph of 1,000 kernels that each add one to a number: of PyTorch, of Triton, and of Triton with
          programmatic launch, where a kernel starts before the one ahead of it has ended
products  bf16 rows times each weight of the shape's layers; several copies of a weight take turns, so that
          they come from memory and not from a cache. GB/s count the weight only

Raw figures go to benchmarks/results/NAME.json. With --device cpu the launches are left out.
"""
from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import bench  # first: it makes the modules below importable
import torch
import torch.nn.functional as F
from bench import captured, describe, median_seconds, write
from shapes import shape_of

from common.cli import note, positive
from common.errors import first_line
from model import ModelArgs

KERNELS = 1000
COPIES_OF = 2**29  # bytes that the copies of a weight take together: more than any cache


def about(device: str) -> dict[str, object]:
    """Versions, and what the GPU says of itself."""
    found: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.device(device).type != "cuda":
        return found
    p = torch.cuda.get_device_properties(device)
    found |= {
        "driver": driver(), "cuda": torch.version.cuda, "multiprocessors": p.multi_processor_count,
        "memory, GB": p.total_memory / 1e9, "L2, MB": p.L2_cache_size / 1e6,
        "compute capability": f"{p.major}.{p.minor}",
    }
    return found


def driver() -> str | None:
    """The version of the driver, as nvidia-smi says it."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


def launches(device: str) -> dict[str, float]:
    """Microseconds of a small kernel in a graph, by kind. A kind that does not run here is left out."""
    x = torch.zeros(1, device=device)

    def triton_kernel(early: bool) -> None:
        from tiny_kernels import add_one

        add_one(x, early)

    kinds: dict[str, Callable[[], object]] = {
        "PyTorch": lambda: x.add_(1), "Triton": partial(triton_kernel, False),
        "Triton, programmatic": partial(triton_kernel, True),
    }
    found = {}
    for name, kernel in kinds.items():
        try:
            replay = captured(partial(times, KERNELS, kernel), device)
            found[name] = median_seconds(replay, device) / KERNELS * 1e6
        except Exception as e:  # a kind is there or not, and libraries raise what they like
            note(f"{name}: left out ({first_line(e)})")
    return found


def times(count: int, call: Callable[[], object]) -> None:
    """Call so many times."""
    for _ in range(count):
        call()


def layers_of(args: ModelArgs) -> dict[str, tuple[int, int]]:
    """The weights [N, K] of one layer, and the lm_head."""
    width = args.num_heads * args.head_dim
    return {
        "qkv": (width + 2 * args.num_kv_heads * args.head_dim, args.hidden_size),
        "o": (args.hidden_size, width), "gate_up": (2 * args.intermediate_size, args.hidden_size),
        "down": (args.hidden_size, args.intermediate_size), "lm_head": (args.vocab_size, args.hidden_size),
    }


def product_rates(args: ModelArgs, rows: list[int], device: str) -> dict[str, list[float]]:
    """By layer, bytes of its weight per second in a product with each number of rows."""
    rates = {}
    for name, (outputs, inputs) in layers_of(args).items():
        size = 2 * outputs * inputs
        copies = max(1, min(64, COPIES_OF // size))
        weights = torch.randn(copies, outputs, inputs, device=device).bfloat16()
        rates[name] = []
        for count in rows:
            x = torch.randn(count, inputs, device=device).bfloat16()

            def products(x=x, weights=weights) -> None:
                for weight in weights:
                    F.linear(x, weight)

            seconds = median_seconds(captured(products, device), device) / copies
            rates[name].append(size / seconds)
    return rates


@torch.no_grad()
def run(o) -> None:
    """Measure, print, write. Raises InputError."""
    bench.use(o.device)
    args = shape_of(o.shape)[0]
    record = describe(o.threads) | {"about": about(o.device), "shape": o.shape, "rows": o.rows}
    print(record["device"])
    for name, value in record["about"].items():
        print(f"  {name:20} {value:.1f}" if isinstance(value, float) else f"  {name:20} {value}")
    record["gigabytes_per_second"] = {k: v / 1e9 for k, v in bench.memory_rates(o.device).items()}
    print("memory, GB/s:", ", ".join(f"{k} {v:.0f}" for k, v in record["gigabytes_per_second"].items()))
    if torch.device(o.device).type == "cuda":
        record["microseconds_per_kernel"] = launches(o.device)
        for name, microseconds in record["microseconds_per_kernel"].items():
            print(f"a small kernel in a graph, {name}: {microseconds:.2f} us")
        write(o.name, record)
    rates = product_rates(args, o.rows, o.device)
    record["products"] = {name: [rate / 1e9 for rate in row] for name, row in rates.items()}
    print(f"| {o.shape}, bf16, GB/s | {' | '.join(f'{rows} rows' for rows in o.rows)} |")
    print("|---" * (len(o.rows) + 1) + "|")
    for name, row in record["products"].items():
        print(f"| {name} | {' | '.join(f'{rate:.0f}' for rate in row)} |")
    write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "probe")
    add = p.add_argument
    add("--shape", default="llama-3.1-8b", help="whose layers are multiplied (see benchmarks/shapes.py)")
    add("--rows", nargs="+", type=positive, default=[1, 8, 16, 32, 60, 128, 200], metavar="M")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
