"""CPUs and memory that this process may use, PyTorch's threads, and returning freed memory."""
from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable
from pathlib import Path

_threads_set = False


CGROUP_ROOT, CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroups(mounted: Path = CGROUP_ROOT, own: Path = CGROUP_FILE) -> list[Path]:
    """Return the folders of this process's cgroups, [] without Linux. own: the file that names them."""
    try:
        group = Path(own.read_text().rpartition("::")[2].strip("/\n"))
    except OSError:
        return []
    # In a container without its own cgroup namespace, only the root cgroup is mounted.
    return [mounted / folder for folder in (group, *group.parents)]


def processors(mounted: Path = CGROUP_ROOT, own: Path = CGROUP_FILE) -> int:
    """Return the number of processors that this process may use, at least 1.

    That is its CPU affinity (taskset, a container's cpuset), limited by the CPU quota of its cgroups, rounded
    up. mounted, own: as for `cgroups`.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_cpu_quota(folder / "cpu.max") for folder in cgroups(mounted, own))
    return max(1, math.ceil(min([affinity, *quotas])))


def _cpu_quota(file: Path) -> float:
    """Return the CPU quota of a cgroup, in processors; infinite if it has none."""
    try:
        quota, period = map(int, file.read_text().split())
    except (OSError, ValueError):  # "max"
        return math.inf
    return quota / period


def use_threads(count: int | None = None, log: Callable[[str], None] = lambda line: None) -> None:
    """Give PyTorch and our kernels `count` threads, but no more than `processors`.

    More threads than processors wait for each other. `log` gets a line if `count` is too large. count None:
    PyTorch's number, unless an earlier call has set it.
    """
    import torch

    global _threads_set
    if count is None and _threads_set:
        return
    requested, limit = count or torch.get_num_threads(), processors()
    _threads_set = True
    torch.set_num_threads(min(requested, limit))
    if count is not None and count > limit:
        log(f"--threads {count}: more than the usable processors; using {limit}")


def free_memory(device) -> int | None:
    """Return the bytes that can still be allocated, PyTorch's reserve included; None if unknown.

    On a CPU at most what this process's cgroups (a container's limit) allow.
    """
    if device.type == "cuda":
        import torch

        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return min([free, *(left for folder in cgroups() if (left := cgroup_free_memory(folder)) is not None)])


def cgroup_free_memory(cgroup: Path) -> int | None:
    """Return the bytes a cgroup may still use, reclaimable page cache included; None without a limit."""
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max"
        return None
    return max(0, limit - used + int(stat["inactive_file"]))


def return_freed_memory() -> None:
    """Return free heap memory to the operating system (`malloc_trim`); a no-op without glibc.

    Not `mallopt(M_MMAP_THRESHOLD)`: every larger tensor would be mapped and zeroed anew in each step.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
