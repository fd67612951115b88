"""Launch options and counters that our kernels share.

TORCHINDUCTOR_ENABLE_PDL=1 in the environment, which torch.compile reads too, enables programmatic dependent
launch (compute capability 9.0 and later): a kernel is set up early and waits, before it reads or writes what
others do, until the kernel before it has ended.
"""
from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import gpu_of

MAX_COUNTERS = 1 << 16


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the launch arguments of a kernel that calls `wait_for_previous`."""
    enabled = os.environ.get("TORCHINDUCTOR_ENABLE_PDL") == "1" and gpu_of(device).capability >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if enabled else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait for the kernel before this one and let the next one be set up. The first call of every kernel."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


_counters: dict[torch.device, Tensor] = {}


def arrival_counters(device: torch.device, count: int) -> Tensor:
    """Return at least `count` zeros [n] int32. A kernel that uses them leaves zeros.

    They are allocated at the first call on a device, before any capture, and never again: captured graphs
    keep their address. Kernels that follow each other on one stream share them. Raises ValueError if there
    are fewer than `count`.
    """
    if device not in _counters:
        _counters[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    if count > MAX_COUNTERS:
        raise ValueError(f"{count} groups of programs in one kernel, at most {MAX_COUNTERS}")
    return _counters[device]
