"""Which devices run our Triton kernels, and properties of those devices.

Triton comes with a CUDA build of PyTorch. For tests, its interpreter (TRITON_INTERPRET=1 in the environment
before anything is imported) runs the kernels on a CPU, slowly.
"""
from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
# Importing Triton is slow, so it is imported only where a GPU or the interpreter can run it.
HAS_TRITON = (INTERPRETED or torch.cuda.is_available()) and find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Return whether our kernels run on this device: an NVIDIA GPU of compute capability 8.0 or later."""
    if not HAS_TRITON:
        return False
    if device.type == "cuda":  # tensor cores with bfloat16
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return INTERPRETED and device.type == "cpu"


class Gpu(NamedTuple):
    """Properties of a device."""

    capability: tuple[int, int]
    shared_memory: int  # bytes that a program may use
    multiprocessors: int


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of a device, or those that we interpret for."""
    if INTERPRETED:
        return Gpu((8, 0), 1 << 30, 4)
    found = torch.cuda.get_device_properties(device)
    return Gpu((found.major, found.minor), found.shared_memory_per_block_optin, found.multi_processor_count)
