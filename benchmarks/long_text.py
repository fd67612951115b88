"""What long texts take at a published shape, by arithmetic: memory, bytes and time of a step, prefill.

    python benchmarks/long_text.py [--shape llama-3.1-8b] [--tokens 32768 131072] [--draft-window 2048]
        [--tree 60,7,10] [--bandwidth 3350] [--teraflops 989]

Nothing runs and nothing is measured. A step is taken to read each weight of the target once, those of the
head and its keys and values once in each draft pass, and all keys and values of the target once. Its time is
these bytes over the bandwidth, the least that it can take. Bandwidth (GB/s) and products (dense, bf16) are
those of an H100 SXM's data sheet unless others are given. Prints the table of docs/scaling.md.
"""
from __future__ import annotations

import sys

import bench  # first: it makes the modules below importable
import torch
from shapes import blank_models

from drafters.base import Drafter
from drafters.eagle import Eagle
from engine.memory import bytes_per_step
from kernels.float8 import Float8Caches
from model import KVCaches, ModelArgs
from tree import TreeShape

SCALE = 4  # bytes of a float32: in int8 each head of a slot has one beside its values
HOST_CHUNK, DEVICE_CHUNK = 64, 512  # rows of a pass over a prompt, see engine/body.py


def kv_bytes(args: ModelArgs, slots: int, kv: str) -> int:
    """Of the keys and values of all layers in so many slots. kv: bf16, int8 or fp8, which has no scales."""
    caches = KVCaches if kv == "bf16" else Float8Caches
    size = caches.bytes(args, 1, slots, torch.bfloat16)
    return size + (size // args.head_dim * SCALE if kv == "int8" else 0)


def layer_weights(target) -> int:
    """How many weights a pass over a prompt multiplies every token with: those of the layers."""
    return sum(p.numel() for p in target.layers.parameters())


def attention_flops(args: ModelArgs, tokens: int) -> int:
    """Of attention over a prompt: two products of each query with the keys and values before it."""
    return 2 * args.num_layers * args.num_heads * args.head_dim * tokens**2


def column(o, tokens: int) -> dict[str, str]:
    """What is said of texts of so many tokens, by the name of the row."""
    target, head = blank_models(o.shape, torch.bfloat16)
    drafter, args = Eagle(head, TreeShape.parse(o.tree)), target.args
    window, passes = min(o.draft_window, tokens), drafter.passes

    def gb(count: float) -> str:
        return f"{count / 1e9:,.2f} GB" if count > 1e8 else f"{count / 1e6:,.1f} MB"

    def step(count: float) -> str:
        return f"{count / 1e9:,.1f} GB, {count / o.bandwidth / 1e6:.2f} ms"

    whole, few = (kv_bytes(head.args, slots, "bf16") for slots in (tokens, window))
    plain, drafting = bytes_per_step(target, Drafter()), bytes_per_step(target, drafter)
    formats = {kv: kv_bytes(args, tokens, kv) for kv in ("bf16", "int8", "fp8")}
    products, attended = 2 * layer_weights(target) * tokens, attention_flops(args, tokens)
    group = args.num_heads // args.num_kv_heads
    return {
        **{f"keys and values of the target, {kv}": gb(count) for kv, count in formats.items()},
        "of the head, bf16": gb(whole),
        f"of the head with a window of {o.draft_window:,}": gb(few),
        **{f"plain step, {kv} keys and values": step(plain + count) for kv, count in formats.items()},
        f"step with {o.tree}, bf16": step(drafting + formats["bf16"] + passes * whole),
        "the same with the window": step(drafting + formats["bf16"] + passes * few),
        "the same, int8": step(drafting + formats["int8"] + passes * few),
        "prefill: products of the layers": f"{products / 1e12:,.0f} TFLOP",
        "prefill: attention": f"{attended / 1e12:,.0f} TFLOP",
        "prefill: time at the data sheet's rate": f"{(products + attended) / o.teraflops / 1e12:.1f} s",
        f"mask of a chunk of {HOST_CHUNK} rows, CPU kernels": gb(HOST_CHUNK * tokens),
        f"mask of a chunk of {HOST_CHUNK} rows, PyTorch": gb(HOST_CHUNK * group * tokens * 2),
        f"mask of a chunk of {DEVICE_CHUNK} rows, GPU kernels": gb(DEVICE_CHUNK**2),
        "for comparison: a mask of all rows": gb(tokens**2),
        "for comparison: logits of all rows": gb(tokens * args.vocab_size * 4),
    }


def table(o) -> str:
    """The rows as a table in Markdown, a column for each length."""
    columns = [column(o, tokens) for tokens in o.tokens]
    lines = ["| | " + " | ".join(f"{tokens:,} tokens" for tokens in o.tokens) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    lines += [f"| {name} | " + " | ".join(c[name] for c in columns) + " |" for name in columns[0]]
    return "\n".join(lines)


def options():
    """The parser of the command line."""
    p = bench.options(__doc__, "long-text")
    add = p.add_argument
    add("--shape", default="llama-3.1-8b", help="see benchmarks/shapes.py")
    add("--tokens", type=int, nargs="+", default=[32_768, 131_072])
    add("--draft-window", type=int, default=2048, metavar="N")
    add("--tree", default="60,7,10", metavar="T,D,K")
    add("--bandwidth", type=float, default=3350, metavar="GB/S")
    add("--teraflops", type=float, default=989)
    for name in ("--draft-window", "--bandwidth", "--teraflops"):
        p.within(name, 1, 1e9)
    p.refuse(lambda o: min(o.tokens) < 1, lambda o: f"--tokens {min(o.tokens)}: must be at least 1")
    return p


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return bench.run(options(), lambda o: print(table(o)), argv)


if __name__ == "__main__":
    sys.exit(main())
