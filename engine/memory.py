"""Bytes: what is free, what was used."""
from __future__ import annotations

import resource
import sys

import torch


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, from torch's own reserve too; None where the system does not say."""
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: by the device's allocator on CUDA, by the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
