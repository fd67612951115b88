"""Whether this machine can have a GPU at all, as far as that is known before torch is there."""
from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import sys
from pathlib import Path

from common.errors import InputError

DRIVERS = ("libcuda.so.1", "nvcuda.dll")  # of NVIDIA, on Linux and on Windows
AMD = Path("/dev/kfd")  # where the driver of AMD's GPUs is asked


@functools.cache
def why_no_gpu() -> str | None:
    """Why PyTorch finds no GPU here; None where only PyTorch can tell."""
    try:
        build = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if build.endswith("+cpu") or sys.platform == "darwin":
        return f"PyTorch {build} is built without CUDA"
    if not AMD.exists() and not any(map(_loads, DRIVERS)):
        return f"there is no driver of a GPU ({DRIVERS[0]})"
    return None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def check_gpu(device: str | None, offload: int | str | None = None) -> None:
    """Raise InputError if --device or --offload asks for a GPU where there is none."""
    asked = f"--device {device}" if (device or "").startswith("cuda") else f"--offload {offload}"
    if (offload or asked.startswith("--device")) and (why := why_no_gpu()):
        raise InputError(f"{asked}: needs a GPU, and {why}; leave it out")
