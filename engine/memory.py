"""Bytes: what is free, what was used."""
from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from common.threads import cgroups


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, from torch's own reserve too; None where the system does not say.

    On a CPU no more than this process's cgroups allow (a container's limit).
    """
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return min([free, *(left for folder in cgroups() if (left := left_in(folder)) is not None)])


def left_in(cgroup: Path) -> int | None:
    """Bytes that a cgroup may still use, where pages of files give way; None without a limit."""
    try:
        most, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max"
        return None
    return max(0, most - used + int(stat["inactive_file"]))


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: by the device's allocator on CUDA, by the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
