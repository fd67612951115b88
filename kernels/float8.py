"""KV caches in float8 (e4m3), for PyTorch and for our GPU kernels: half the memory of 16 bits.

Values are rounded to e4m3 (Micikevicius et al. 2022, FP8 Formats for Deep Learning) and clamped to 448. There
is no scale, as in vLLM by default. A scale per head and token changes little (docs/benchmarks.md, "Caches in
fp8").

Buffers are uint8, as PyTorch does not support indexing float8 on every device.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized import FP8_MAX
from model import KVCache, KVCaches


def to_bytes(x: Tensor) -> Tensor:
    """Round x to e4m3, ties to even, as uint8. NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert e4m3 bytes to another dtype."""
    return x.view(torch.float8_e4m3fn).to(dtype)


class Float8Cache(KVCache):
    """`KVCache` in float8: k, v [B, S, nkv, hd] as uint8."""

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        super().write(to_bytes(k), to_bytes(v), slots)

    def live(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return copies in `dtype`."""
        k, v = super().live(count, dtype)
        return from_bytes(k, dtype), from_bytes(v, dtype)


class Float8Caches(KVCaches):
    """`KVCaches` in float8."""

    Layer, dtype = Float8Cache, torch.uint8
