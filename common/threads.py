"""Processors that this process may use, PyTorch's threads, and a parallel map."""
from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")
MAX_WORKERS = 8  # of `parallel_map`: each holds a result, such as a tensor
_is_set = False  # whether `use_threads` was called


CGROUP_ROOT, CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroups(mounted: Path = CGROUP_ROOT, own: Path = CGROUP_FILE) -> list[Path]:
    """Return the folders of this process's cgroups, [] without Linux. own: the file that names them."""
    try:
        group = Path(own.read_text().rpartition("::")[2].strip("/\n"))
    except OSError:
        return []
    # In a container without a namespace of its own only the top is mounted.
    return [mounted / folder for folder in (group, *group.parents)]


def processors(mounted: Path = CGROUP_ROOT, own: Path = CGROUP_FILE) -> int:
    """Return the number of processors that this process may use, at least 1.

    That is its CPU affinity (taskset, a container's cpuset), limited by the CPU quota of its cgroups, rounded
    up. mounted, own: as for `cgroups`.
    """
    on = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([on, *(_cpu_quota(folder / "cpu.max") for folder in cgroups(mounted, own))])))


def _cpu_quota(file: Path) -> float:
    """Return the CPU quota of a cgroup, in processors; infinite if it has none."""
    try:
        quota, period = map(int, file.read_text().split())
    except (OSError, ValueError):  # "max"
        return math.inf
    return quota / period


def use_threads(count: int | None = None, log: Callable[[str], None] = lambda line: None) -> None:
    """Give PyTorch and our kernels `count` threads, but no more than `processors`.

    More threads than processors wait for each other. `log` gets a line if `count` is too large. None:
    PyTorch's number, unless an earlier call has decided.
    """
    import torch

    global _is_set
    if count is None and _is_set:
        return
    requested, limit, _is_set = count or torch.get_num_threads(), processors(), True
    torch.set_num_threads(min(requested, limit))
    if count is not None and count > limit:
        log(f"--threads {count}: this process may use fewer processors; it runs with {limit}")


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield function(item) for each item in order, computed by PyTorch's number of threads or MAX_WORKERS.

    One more result waits. PyTorch computes each call, and the caller's work in between, with one thread.
    """
    import torch

    count, waiting = torch.get_num_threads(), deque[Future[Result]]()
    workers = min(count, MAX_WORKERS)
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(count)
