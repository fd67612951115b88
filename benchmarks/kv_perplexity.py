"""What caches of keys and values in int8 and fp8 cost in quality: perplexity of a text read through them.

    python benchmarks/kv_perplexity.py --checkpoint checkpoints/smollm2-135m --text docs/*.md

The text is read in windows, 64 tokens a pass as prompts are, on the CPU kernels; for fp8 by PyTorch, which
also reads it with the model's own caches. Besides perplexity: how often the likeliest next token is that of
the first line, and the mean KL divergence from it in nats.
"""
from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import bench  # first: it makes the modules below importable
import torch
from torch import Tensor

from common.cli import dtype, note
from common.dtypes import KV_DTYPES
from common.errors import InputError
from engine.api import load_target
from engine.runtime import Runtime
from kernels.backend import backend_of
from model import Transformer

CHUNK = 64  # tokens of a pass
PYTORCH = "PyTorch"  # in the place of an instruction set


def read(target: Transformer, windows: Tensor) -> Iterator[Tensor]:
    """The log-probabilities [CHUNK, V] after each token of windows [N, length], pass by pass."""
    length = windows.shape[1]
    slots = torch.arange(length)
    for window in windows:
        caches = target.caches(1, length)
        for first in range(0, length, CHUNK):
            own = slots[None, first : first + CHUNK]
            visible = slots[: first + CHUNK] <= own[..., None]
            with backend_of(target).threads():
                x, _ = target(window[own], own, own, visible, caches)
                logits = target.logits(x)[0]
            yield logits.log_softmax(-1)


@torch.no_grad()
def run(o) -> None:
    """Measure, print, write. Raises InputError."""
    text = "\n".join(Path(file).read_text(encoding="utf-8") for file in o.text)
    on_kernels = [(isa, kv) for isa in o.isa or [None] for kv in o.kv if kv != "fp8"]
    runtimes = [Runtime("cpu", o.dtype, isa=isa, kv=kv) for isa, kv in on_kernels]
    if "fp8" in o.kv:
        runtimes += [Runtime("cpu", o.dtype, compile=False, kv=kv) for kv in ("auto", "fp8")]
    models, names = [], []
    for runtime in runtimes:
        target = load_target(o.checkpoint, runtime, note)
        if target.tokenizer is None:
            raise InputError(f"{o.checkpoint}: has no tokenizer")
        backend = backend_of(target.model)
        names.append((backend.name if backend.row_invariant else PYTORCH, runtime.kv))
        models.append(target)
    ids = torch.tensor(models[0].tokenizer.encode(text))
    length = o.window // CHUNK * CHUNK
    count = min(o.windows, (len(ids) - 1) // length)
    if not count:
        raise InputError(
            f"--text: has {len(ids)} tokens, a window {length}; give more text or a smaller --window"
        )
    windows, following = ids[: count * length].view(count, length), ids[1 : count * length + 1].split(CHUNK)
    loss, same, apart = ([0.0] * len(models) for _ in range(3))
    readers = [read(target.model, windows) for target in models]
    for after in following:
        first = None
        for i, reader in enumerate(readers):
            found = next(reader)
            first = found if first is None else first
            loss[i] -= float(found.gather(1, after[:, None]).sum())
            same[i] += float((found.argmax(-1) == first.argmax(-1)).sum())
            apart[i] += float((first.exp() * (first - found)).sum())
    tokens = count * length
    record = bench.describe(o.threads) | {"checkpoint": o.checkpoint, "tokens": tokens, "window": length}
    print(f"| {tokens:,} tokens in windows of {length:,} | perplexity | same next token | KL |")
    print("|---|---|---|---|")
    rows = []
    for i, (isa, kv) in enumerate(names):
        row = {"perplexity": math.exp(loss[i] / tokens), "same": same[i] / tokens, "kl": apart[i] / tokens}
        print(f"| {isa}, kv {kv} | {row['perplexity']:.3f} | {row['same']:.1%} | {row['kl']:.5f} |")
        rows.append({"isa": isa, "kv": kv, **row})
    record["rows"] = rows
    bench.write(o.name, record)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "kv_perplexity")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target")
    add("--text", nargs="+", required=True, metavar="FILE", help="files to read, one after the other")
    add("--kv", nargs="+", choices=KV_DTYPES, default=[*KV_DTYPES])
    add("--isa", nargs="+", metavar="NAME", help="instruction sets of our CPU kernels (default: the best)")
    add("--dtype", type=dtype, help="bf16 or fp32; default: as stored")
    add("--window", type=int, default=2048, metavar="N", help="tokens (default 2048)")
    add("--windows", type=int, default=8, metavar="N", help="at most so many (default 8)")
    p.refuse(lambda o: o.window < CHUNK or o.windows < 1,
             lambda o: f"--window must be at least {CHUNK}, --windows at least 1")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
