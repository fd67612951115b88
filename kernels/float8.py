"""Caches in float8 (e4m3): half the bytes of a 16-bit one, for PyTorch and for our GPU kernels.

Each number is rounded to the nearest of e4m3's (Micikevicius et al. 2022, FP8 Formats for Deep Learning): a
sign, 4 bits of exponent, 3 of mantissa, up to 448. There is no scale, as in vLLM by default (its page
"Quantized KV Cache"): each number has an exponent of its own. What is larger than 448 becomes 448. A scale
for each head of a token was tried and changes little (docs/benchmarks.md, "Caches in fp8").
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from model import KVCache, ModelArgs

MOST = 448.0  # the largest number of e4m3


def to_bytes(x: Tensor) -> Tensor:
    """x rounded to e4m3, ties to even, as bytes (uint8). NaN stays NaN."""
    return x.clamp(-MOST, MOST).to(torch.float8_e4m3fn).view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of such bytes, in another dtype."""
    return x.view(torch.float8_e4m3fn).to(dtype)


class InFloat8:
    """What makes a cache class one in float8; it is named before that class.

    Buffers are uint8: PyTorch indexes bytes on every device, float8 not. `dtype`, the model's, changes
    nothing.
    """

    @classmethod
    def of_layers(
        cls, layers: int, batch: int, slots: int, args: ModelArgs, dtype: torch.dtype,
        device: torch.device | str
    ) -> nn.ModuleList:
        """As `KVCache.of_layers`."""
        return super().of_layers(layers, batch, slots, args, torch.uint8, device)

    @classmethod
    def bytes(cls, batch: int, slots: int, args: ModelArgs, dtype: torch.dtype) -> int:
        """As `KVCache.bytes`."""
        return super().bytes(batch, slots, args, torch.uint8)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """As `KVCache.write`."""
        super().write(to_bytes(k), to_bytes(v), slots)

    def live(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `KVCache.live`: copies in `dtype`."""
        k, v = super().live(count, dtype)
        return from_bytes(k, dtype), from_bytes(v, dtype)


class Float8Cache(InFloat8, KVCache):
    """`KVCache` in float8: k, v [B, S, nkv, hd] as bytes."""
