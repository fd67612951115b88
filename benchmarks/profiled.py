"""What one captured step does on a GPU, by a profile: its parts, its kernels, what the host asks for.

A replayed graph shows kernels and nothing else, and draft and verify pass run the same ones. So the step
that is measured runs two tiny kernels more, between draft and verify and between verify and the rest.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import bench  # noqa: F401  first: it makes the modules below importable
import torch
from torch import Tensor

import engine.step
from common.cli import note
from drafters.base import Proposal
from drafters.eagle import Eagle
from engine import saved_graph
from tree import Tree

MARK = "lshift"  # in the name of the kernel that `mark` runs, and of no other


class Kernel(NamedTuple):
    """A kernel, copy or fill that ran on the device, with its times in microseconds."""

    start: float
    end: float
    name: str


@torch.library.custom_op("eagle_bench::mark", mutates_args=())
def mark(tokens: Tensor) -> Tensor:
    """The same integers, by a kernel that a profile shows."""
    return tokens << 0


@mark.register_fake
def _(tokens: Tensor) -> Tensor:
    return torch.empty_like(tokens)


class MarkedEagle(Eagle):
    """A drafter whose trees come out of `mark`: what runs before it is the draft."""

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        (tokens, *rest), *others = super().propose(state, slots, noise)
        return Proposal(Tree(mark(tokens), *rest), *others)


def mark_verified() -> None:
    """Let every step of this process take the target's tokens out of `mark`: what runs before is the verify
    pass.
    """
    draw = engine.step.draw

    def marked(logits: Tensor, noise: Tensor | None, depth: Tensor | None = None) -> Tensor:
        return mark(draw(logits, noise, depth))

    engine.step.draw = marked
    saved_graph.VARIANT = "marked"  # graphs with marks and those without must not be taken for each other


def split(kernels: list[Kernel], rows: int) -> dict[str, float]:
    """The milliseconds of draft (of trees), verify and rest, gaps between kernels included; nothing if the
    marks are not all there, which a line says. kernels: in the order in which they began.
    """
    names = ("draft", "verify", "rest") if rows > 1 else ("verify", "rest")
    marks = [kernel.start for kernel in kernels if MARK in kernel.name]
    if len(marks) != len(names) - 1:
        note(f"draft, verify and rest: unknown, {len(marks)} marks in the profile of {rows} rows")
        return {}
    edges = [kernels[0].start, *marks, max(kernel.end for kernel in kernels)]
    return {name: (end - start) / 1e3 for name, start, end in zip(names, edges, edges[1:])}


def profile_step(step: Callable[[], object], rows: int) -> dict:
    """Profile one captured step over so many rows: what `split` gives, and the following. Nothing if the
    profiler sees no kernels, which a line says.

    kernels, busy     how many ran, and the sum of their milliseconds
    top               [name, how many, milliseconds] of each kind, those that took longest first
    launches, syncs   what the host asked of the driver
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
    events = profiled.events()
    names = [event.name for event in events]
    on_device = (e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation)
    kernels = sorted(Kernel(e.time_range.start, e.time_range.end, e.name) for e in on_device)
    if not kernels:
        note("the profiler shows no kernels: no draft, verify and rest")
        return {}
    counts, times = Counter(kernel.name for kernel in kernels), Counter()
    for kernel in kernels:
        times[kernel.name] += (kernel.end - kernel.start) / 1e3
    launches = ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernel")
    return split(kernels, rows) | {
        "kernels": len(kernels), "busy": sum(times.values()),
        "top": [[name, counts[name], ms] for name, ms in times.most_common()],
        "launches": sum(name.startswith(launches) for name in names),
        # The profiler waits once itself, at its end.
        "syncs": max(0, sum("Synchronize" in name for name in names) - 1),
    }
