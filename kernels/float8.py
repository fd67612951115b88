"""Caches in float8 (e4m3): half the bytes of a 16-bit one, for PyTorch and for our GPU kernels.

Each number is rounded to the nearest of e4m3's (Micikevicius et al. 2022, FP8 Formats for Deep Learning): a
sign, 4 bits of exponent, 3 of mantissa, up to 448. There is no scale, as in vLLM by default (its page
"Quantized KV Cache"): each number has an exponent of its own. Larger numbers become 448. A scale for each
head of a token was tried and changes little (docs/benchmarks.md, "Caches in fp8").

Buffers are uint8: PyTorch indexes bytes on every device, float8 not.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized import FP8_MAX
from model import KVCache, KVCaches


def to_bytes(x: Tensor) -> Tensor:
    """Return x rounded to e4m3, ties to even, as bytes (uint8). NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of such bytes, in another dtype."""
    return x.view(torch.float8_e4m3fn).to(dtype)


class Float8Cache(KVCache):
    """`KVCache` in float8: k, v [B, S, nkv, hd] as bytes."""

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        super().write(to_bytes(k), to_bytes(v), slots)

    def live(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return copies in `dtype`."""
        k, v = super().live(count, dtype)
        return from_bytes(k, dtype), from_bytes(v, dtype)


class Float8Caches(KVCaches):
    """`KVCaches` in float8."""

    Layer, dtype = Float8Cache, torch.uint8
