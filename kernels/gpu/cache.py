"""The caches of all layers as one tensor, so that one kernel moves what a step commits."""
from __future__ import annotations

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch import Tensor

from kernels.float8 import InFloat8
from kernels.gpu.launch import begin, options
from model import KVCache, ModelArgs


class LayerCache(nn.Module):
    """The cache of one layer in kv [L, 2, B, nkv, S, hd], which all layers share."""

    def __init__(self, kv: Tensor, layer: int):
        super().__init__()
        self.register_buffer("kv", kv, persistent=False)
        self.layer = layer

    @property
    def k(self) -> Tensor:
        """The layer's keys [B, S, nkv, hd], as `KVCache` has them."""
        return self.kv[self.layer, 0].transpose(1, 2)

    @property
    def v(self) -> Tensor:
        """Its values, likewise."""
        return self.kv[self.layer, 1].transpose(1, 2)

    @staticmethod
    def rows(caches: nn.ModuleList, first: int, count: int) -> nn.ModuleList:
        """As `KVCache.rows`; the layers share one tensor here too."""
        kv = caches[0].kv.narrow(2, first, count)
        return nn.ModuleList(type(cache)(kv, i) for i, cache in enumerate(caches))

    @staticmethod
    def take(caches: nn.ModuleList, place: int, slots: int) -> list[Tensor]:
        """As `KVCache.take`."""
        return [caches[0].kv[:, :, place, :, :slots].clone()]

    @staticmethod
    def put(caches: nn.ModuleList, place: int, taken: list[Tensor]) -> None:
        """As `KVCache.put`."""
        caches[0].kv[:, :, place, :, : taken[0].shape[3]] = taken[0]

    write, live = KVCache.write, KVCache.live
    bytes = KVCache.bytes

    @classmethod
    def of_layers(
        cls, layers: int, batch: int, slots: int, args: ModelArgs, dtype: torch.dtype,
        device: torch.device | str
    ) -> nn.ModuleList:
        """As `KVCache.of_layers`."""
        shape = (layers, 2, batch, args.num_kv_heads, slots, args.head_dim)
        kv = torch.zeros(shape, dtype=dtype, device=device)
        return nn.ModuleList(cls(kv, i) for i in range(layers))


class Float8LayerCache(InFloat8, LayerCache):
    """`LayerCache` in float8: kv [L, 2, B, nkv, S, hd] as bytes."""


@triton.jit
def move_kernel(kv, source, target, S, W, plane_size, HEAD: tl.constexpr, HEADS: tl.constexpr,
                WINDOW: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """One head of one sequence, keys or values of one layer: kv [L * 2, B * HEADS, S, HEAD], where a plane
    has plane_size numbers.
    """
    begin(EARLY)
    pair, plane = tl.program_id(0), tl.program_id(1)
    w, d = tl.arange(0, WINDOW), tl.arange(0, WIDTH)
    b = pair // HEADS
    here = kv + plane.to(tl.int64) * plane_size + pair.to(tl.int64) * S * HEAD
    mask = (w < W)[:, None] & (d < HEAD)[None]
    from_ = tl.load(source + b * W + w, mask=w < W, other=0)[:, None]
    to = tl.load(target + b * W + w, mask=w < W, other=0)[:, None]
    moved = tl.load(here + from_ * HEAD + d[None], mask=mask)
    tl.debug_barrier()  # all is read before anything is written
    tl.store(here + to * HEAD + d[None], moved, mask=mask)


@torch.library.custom_op("eagle_gpu::move", mutates_args=("kv",))
def move_slots(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the entries at slots `source` [B, W] of all layers of kv [L, 2, B, nkv, S, hd] to slots
    `target`.
    """
    L, _, B, nkv, S, hd = kv.shape
    W = source.shape[1]
    move_kernel[(B * nkv, 2 * L)](
        kv, source.contiguous(), target.contiguous(), S, W, kv.stride(1), HEAD=hd, HEADS=nkv,
        WINDOW=triton.next_power_of_2(W), WIDTH=triton.next_power_of_2(hd), num_warps=4,
        **options(kv.device),
    )


@move_slots.register_fake
def _(kv, source, target):
    return None


def move(caches: nn.ModuleList, source: Tensor, target: Tensor) -> None:
    """`model.move` as one kernel."""
    move_slots(caches[0].kv, source, target)
