"""The number of processors that this process may use, and of PyTorch's threads."""
from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

_decided = False  # whether `use_threads` was called


def processors(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of processors that this process may use, at least 1.

    They are those that it may run on (taskset, a container's cpuset), and no more than the share of time that
    its cgroups allow, rounded up (a container's CPU quota). cgroups: where they are mounted. own: the file
    that names those of this process.
    """
    on = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(on, _quota(cgroups, own))))


def _quota(cgroups: Path, own: Path) -> float:
    """Return the least share of processors that a cgroup of this process, or one above it, allows."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return math.inf
    shares = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):  # in a container without a namespace only the top is mounted
            old = cgroups / "cpu" / folder  # version 1
            files = [old / "cpu.cfs_quota_us", old / "cpu.cfs_period_us"] if controllers else []
            shares.append(_share(*(files or [cgroups / folder / "cpu.max"])))
    return min(shares)


def _share(*files: Path) -> float:
    """Return the share of a cgroup whose files hold a quota and a period, infinite where it has none."""
    try:
        quota, period = map(int, " ".join(file.read_text() for file in files).split())
    except (OSError, ValueError):  # "max"
        return math.inf
    return quota / period if quota > 0 else math.inf


def use_threads(count: int | None = None, say: Callable[[str], None] = lambda line: None) -> None:
    """Give PyTorch and our kernels `count` threads, but no more than `processors`.

    More threads than processors wait for each other. `say` prints it if `count` is too large. None: PyTorch's
    number, unless an earlier call has decided.
    """
    import torch

    global _decided
    if count is None and _decided:
        return
    wanted, most, _decided = count or torch.get_num_threads(), processors(), True
    torch.set_num_threads(min(wanted, most))
    if count is not None and count > most:
        say(f"--threads {count}: this process may use fewer processors; it runs with {most}")
