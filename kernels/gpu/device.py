"""Which devices run our Triton kernels, properties of those devices, and products in fp8.

Triton comes with a CUDA build of PyTorch. For tests, its interpreter (TRITON_INTERPRET=1 in the environment
before anything is imported) runs the kernels on a CPU, slowly.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import first_line
from kernels.quantized import QuantizedLinear, quantize_rowwise, rowwise_scales

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
# Importing Triton is slow, so it is imported only where a GPU or the interpreter can run it.
HAS_TRITON = (INTERPRETED or torch.cuda.is_available()) and find_spec("triton") is not None
FP8_DEVICES: set[torch.device] = set()  # filled by `detect_fp8`: GPUs on which torch._scaled_mm works


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


def detect_fp8(device: torch.device, log: Callable[[str], None]) -> None:
    """Add a GPU to FP8_DEVICES if torch._scaled_mm works on it. Log the error if it should but does not."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) < (8, 9):
        return
    try:
        q = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
        one, rows = torch.ones((), device=device), torch.ones(16, 1, device=device)
        for scales, dtype in (((rows, rows.t()), torch.bfloat16), ((one, one), torch.float32)):
            torch._scaled_mm(q, q.t(), *scales, out_dtype=dtype, use_fast_accum=True)
        FP8_DEVICES.add(device)
    except RuntimeError as e:
        log(f"fp8 matmuls fall back to float32 without tensor cores ({first_line(e)})")


def fp8_product(layer: QuantizedLinear, x: Tensor, float32: bool) -> Tensor:
    """Return x [..., K] @ W^T + bias of a layer in fp8, with x rounded to fp8; float32: in float32."""
    tokens = x.flatten(0, -2)
    scale = rowwise_scales(tokens, "fp8")
    q = quantize_rowwise(tokens, scale, "fp8")
    on_tensor_cores = x.device in FP8_DEVICES and all(n % 16 == 0 for n in layer.weight.shape)
    multiply = partial(torch._scaled_mm, q, layer.weight.t(), use_fast_accum=True)
    if on_tensor_cores and x.dtype == torch.bfloat16 and not float32:
        y = multiply(scale, layer.scale.t(), out_dtype=torch.bfloat16)
    elif on_tensor_cores:  # float32 results need one scale for all tokens
        one = torch.ones((), device=x.device)
        y = multiply(one, one, out_dtype=torch.float32) * scale * layer.scale.t()
    else:
        y = q.float() @ layer.weight.float().t() * scale * layer.scale.t()
    y = y if layer.bias is None else y + layer.bias
    return y.to(torch.float32 if float32 else x.dtype).view(*x.shape[:-1], -1)
