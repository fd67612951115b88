"""Statistics of requests: `--stats` of generate.py and its chat."""
from __future__ import annotations

import resource
from collections import Counter

import torch

from common.errors import counted
from engine.engine import Engine
from engine.request import Request
from llm import joint_speed

MAX_LISTED_TREES = 5  # tree shapes listed by --stats, most frequent first


def format_stats(requests: list[Request], engine: Engine) -> str:
    """Format prefill, steps by tree and by emitted tokens, and peak memory of requests of one batch."""
    seconds, _ = joint_speed(requests)
    lengths = [n for r in requests for n in r.accept_lengths]
    tree_counts = sum((r.trees for r in requests), Counter())
    listed = dict(tree_counts.most_common(MAX_LISTED_TREES))
    if others := tree_counts.total() - sum(listed.values()):
        listed["others"] = others
    trees = ", ".join(f"{n} x {name}" for name, n in listed.items())
    prompt, prefill = sum(len(r.prompt) for r in requests), max(r.prefill_seconds for r in requests)
    lines = [f"{counted(prompt, 'token')} in the prompt, prefill {prefill * 1e3:.0f} ms;"
             f" {counted(len(lengths), 'step')} ({trees or 'none'}) in {seconds:.2f} s;"
             f" peak memory {peak_memory(engine.device) / 1e9:.2f} GB", *engine.runner.fallbacks]
    counts = Counter(lengths if engine.drafter.shape.nodes > 1 else ())
    for n in range(1, max(counts, default=0) + 1):
        share = counts[n] / len(lengths)
        tokens, steps = counted(n, "token"), counted(counts[n], "step")
        lines.append(f"  {tokens:>9s} {steps:>11s} {share:6.1%} {'#' * round(40 * share)}")
    return "\n".join(lines)


def peak_memory(device: torch.device) -> int:
    """Return peak memory in bytes: of the CUDA allocator, or the resident set size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
