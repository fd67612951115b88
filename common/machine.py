"""CPUs and memory that this process may use, and PyTorch's threads."""
from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

_threads_set = False
CGROUP_ROOT, CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroups(root: Path = CGROUP_ROOT, own: Path = CGROUP_FILE) -> list[Path]:
    """Return the folders of this process's cgroups, [] if there are none. own: /proc/self/cgroup."""
    try:
        group = Path(own.read_text().rpartition("::")[2].strip("/\n"))
    except OSError:
        return []
    # In a container without its own cgroup namespace, only the root cgroup is root.
    return [root / folder for folder in (group, *group.parents)]


def processors(root: Path = CGROUP_ROOT, own: Path = CGROUP_FILE) -> int:
    """Return the number of processors that this process may use, at least 1.

    The number is limited by CPU affinity (taskset, cpuset) and by the CPU quota of cgroups, rounded up. root,
    own: see `cgroups`.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = (_cpu_quota(folder / "cpu.max") for folder in cgroups(root, own))
    return max(1, math.ceil(min([available, *quotas])))


def _cpu_quota(file: Path) -> float:
    """Return the CPU quota of a cgroup, in processors; infinite if it has none."""
    try:
        quota, period = map(int, file.read_text().split())
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf
    return quota / period


def use_threads(count: int | None = None, log: Callable[[str], None] = lambda line: None) -> None:
    """Set the number of threads of PyTorch and our kernels, at most `processors()`.

    count None: keep torch.get_num_threads(), or the number of an earlier call. `log` gets a line if `count`
    is larger than `processors()`: such threads would wait for each other.
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
    """Return the bytes that can still be allocated, including unused memory of PyTorch's allocator.

    None if unknown. On a CPU, it is limited by this process's cgroups (containers).
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
    """Return the bytes a cgroup may still use, including reclaimable page cache; None without a limit."""
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return max(0, limit - used + int(stat["inactive_file"]))
