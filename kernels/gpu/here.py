"""Devices on which our kernels for GPUs run, and properties of those.

They are written in Triton, which a CUDA build of PyTorch brings. Triton's interpreter (TRITON_INTERPRET=1 in
the environment, before anything is imported) runs them on a CPU, slowly: for tests.
"""
from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
# Importing Triton takes time, which is only spent where it can be of use.
CAN = (INTERPRETED or torch.cuda.is_available()) and find_spec("triton") is not None


def capable(device: torch.device) -> bool:
    """Return whether our kernels can run on this device: a GPU of compute capability 8.0 or later."""
    if not CAN:
        return False
    if device.type == "cuda":  # they are written for tensor cores that know bfloat16
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return INTERPRETED and device.type == "cpu"


@cache
def is_blackwell(device: torch.device) -> bool:
    """Return whether a device is of compute capability 10.0 or later."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (10, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have."""
    return 1 << 30 if INTERPRETED else torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def programs_at_once(device: torch.device) -> int:
    """Return the number of programs that keep this device busy: one for each of its multiprocessors."""
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
