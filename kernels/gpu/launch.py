"""Launch options of our kernels, and memory that they share.

TORCHINDUCTOR_ENABLE_PDL=1 in the environment, which torch.compile's kernels read too, enables programmatic
dependent launch: a kernel is set up early and waits, before it touches memory, until the one before it has
ended. Compute capability 9.0 and later have it. Its gain has not been measured.
"""
from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.here import INTERPRETED


@cache
def early(device: torch.device) -> bool:
    """Return whether kernels on this device are set up early."""
    asked = os.environ.get("TORCHINDUCTOR_ENABLE_PDL") == "1" and not INTERPRETED
    return asked and torch.cuda.get_device_capability(device) >= (9, 0)


def options(device: torch.device) -> dict[str, bool]:
    """Return the arguments of a kernel that calls `begin`, and of its launch."""
    return {"EARLY": True, "launch_pdl": True} if early(device) else {"EARLY": False}


@triton.jit
def begin(EARLY: tl.constexpr):
    """Wait for the kernel before this one, and let the next one be set up: first in every kernel."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


_arrived: dict[torch.device, Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` zeros [n] int32, which a kernel leaves as zeros. Raises ValueError if there are fewer.

    They are made at the first call on a device, which no capture precedes, and never again: a captured graph
    keeps their address. Kernels that follow each other on one stream share them.
    """
    if device not in _arrived:
        _arrived[device] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    if count > len(_arrived[device]):
        raise ValueError(f"{count} groups of programs in one kernel, at most {len(_arrived[device])}")
    return _arrived[device]
