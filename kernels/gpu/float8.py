"""Conversion between e4m3 caches (`kernels.kv_dtypes`) and registers.

GPUs of compute capability 8.9 and later have instructions for it. Older ones, and Triton's interpreter,
compute the same bit by bit.
"""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_cache(x, dtype: tl.constexpr, E4M3: tl.constexpr):
    """Convert values loaded from a cache, of any dtype; bytes (uint8) are e4m3.

    Bit by bit: move exponent and mantissa to those of a float16, which represents every e4m3 number and whose
    exponents are 8 larger. Subnormal numbers come out right, too.
    """
    if x.dtype != tl.uint8:
        y = x
    elif E4M3:
        y = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        y = ((bits & 0x80) << 8 | magnitude << 7).to(tl.float16, bitcast=True) * 256.0
        y = tl.where(magnitude == 0x7F, float("nan"), y)
    return y.to(dtype)


@triton.jit
def to_cache(x, dtype: tl.constexpr, E4M3: tl.constexpr):
    """Convert x to the dtype of a cache. To bytes: e4m3, ties to even, larger numbers to 448."""
    if dtype != tl.uint8:
        y = x
    elif E4M3:
        y = x.to(tl.float32).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        x = x.to(tl.float32)
        sign = x.to(tl.uint32, bitcast=True) >> 24 & 0x80
        magnitude = tl.minimum(tl.abs(x), 448.0)
        # Keep 3 of 23 mantissa bits: add half of the last one, except for a tie that is already even.
        bits = magnitude.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
        # Below 2^-6, e4m3's steps are 2^-9, like those of float32 from 2^14 on: that sum rounds correctly.
        subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
        byte = tl.where(magnitude < 0.015625, subnormal, normal)
        y = tl.where(x != x, 0x7F, byte) | sign
    return y.to(dtype)
