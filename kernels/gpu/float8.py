"""e4m3 in registers: how our kernels read and write the bytes of a cache in float8 (`kernels.float8`).

GPUs of compute capability 8.9 and later have instructions for it. On older ones, and in Triton's interpreter,
the same is done bit by bit.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.here import INTERPRETED


def converts(device: torch.device) -> bool:
    """Return whether this device has an instruction for e4m3."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def from_bytes(x, CONVERTS: tl.constexpr):
    """The numbers of bytes x, as float16, which holds all of them.

    CONVERTS: by the device's instruction. Else a byte's exponent and mantissa go where those of a float16
    are, whose exponents are 8 larger; numbers without a leading one (subnormals) come out right too.
    """
    if CONVERTS:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    bits = x.to(tl.uint16)
    size = bits & 0x7F
    placed = ((bits & 0x80) << 8 | size << 7).to(tl.float16, bitcast=True) * 256.0
    return tl.where(size == 0x7F, float("nan"), placed).to(tl.float16)


@triton.jit
def to_bytes(x, CONVERTS: tl.constexpr):
    """x rounded to e4m3, ties to even, as bytes: `kernels.float8.to_bytes`."""
    x = x.to(tl.float32)
    if CONVERTS:  # what is too large becomes 448
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    # 3 of 23 bits of mantissa stay: add half of the last one, except for a tie that is even already.
    whole = size.to(tl.uint32, bitcast=True)
    normal = ((whole + 0x7FFFF + (whole >> 20 & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9, like those of float32 from 2^14 on: that sum rounds correctly.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
    byte = tl.where(size < 0.015625, small, normal)
    return (tl.where(x != x, 0x7F, byte) | bits >> 24 & 0x80).to(tl.uint8)


@triton.jit
def loaded(x, dtype: tl.constexpr, CONVERTS: tl.constexpr):
    """Convert values loaded from a cache of any dtype to another dtype."""
    if x.dtype == tl.uint8:
        return from_bytes(x, CONVERTS).to(dtype)
    return x.to(dtype)


@triton.jit
def stored(x, dtype: tl.constexpr, CONVERTS: tl.constexpr):
    """Convert x to the dtype of a cache, float8 as bytes."""
    if dtype == tl.uint8:
        return to_bytes(x, CONVERTS)
    return x.to(dtype)
