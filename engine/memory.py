"""Bytes: what is free, what was used, what a step reads."""
from __future__ import annotations

import re
import resource
import sys

import torch

from drafters.base import Drafter
from model import Transformer

OF_EXPERTS = re.compile(r"\.mlp\.(routed\.)?w_")  # names of parameters, where there are experts


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


def bytes_per_step(target: Transformer, drafter: Drafter) -> int:
    """Weight bytes that one step reads: the target's once, those of the drafter's network once per pass.

    Embedding tables are looked up, not read. A mixture's step reads the experts that a tree's rows choose on
    average, each as likely as any other.
    """
    def size(module, rows: int = 1) -> int:
        a, skip = module.args, () if module.lm_head is None else ("embed.",)  # tied, the table is the lm_head
        chosen = 1 - (1 - a.experts_per_token / a.num_experts) ** rows if a.num_experts else 1
        read = ((n, p.numel() * p.element_size()) for n, p in module.named_parameters())
        return int(sum(
            size * (chosen if OF_EXPERTS.search(n) else 1) for n, size in read if not n.startswith(skip)
        ))

    alone = drafter.parts or (drafter,)  # of two, each has passes of its own
    networks = sum(part.passes * size(part.network) for part in alone if part.network is not None)
    return size(target, drafter.shape.nodes) + networks


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: by the device's allocator on CUDA, by the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
