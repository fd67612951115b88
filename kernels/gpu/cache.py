"""The caches of all layers as one tensor, so that one kernel moves what a step commits."""
from __future__ import annotations

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch import Tensor

from engine.draft import once
from kernels.float8 import Float8Cache, Float8Caches
from kernels.gpu.attention import attend
from kernels.gpu.launch import begin, options
from kernels.gpu.parts import on_kernel
from kernels.gpu.sight import Sight
from model import Block, KVCache, KVCaches, ModelArgs, Pass, rope_table


class LayerCache(KVCache):
    """The cache of one layer in kv [L, 2, B, nkv, S, hd], which all layers share."""

    def __init__(self, kv: Tensor, layer: int):
        nn.Module.__init__(self)
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

    @on_kernel("attend", KVCache.attend)
    def attend(self, block: Block, qkv: Tensor, shared: Pass) -> Tensor:
        """Attend in one kernel, from wqkv to wo; with sinks or a dense mask by the definition."""
        if block.sinks is not None or not isinstance(shared.visible, Sight):
            return super().attend(block, qkv, shared)
        sight, angles = shared.seen(block.window), block.layer_angles(shared.angles(_angles))
        return attend(qkv, *angles, *block.head_norms, self.kv, self.layer, *sight[1:])


def _angles(args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return `model.rope_table`, computed once for all layers."""
    cos, sin = rope_table(args, inv_freq, positions)
    return once(cos), once(sin)


class LayerCaches(KVCaches):
    """The caches of all layers in one tensor."""

    Layer = LayerCache

    @classmethod
    def of(
        cls, args: ModelArgs, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str, backend
    ) -> LayerCaches:
        shape = (args.num_layers, 2, batch, args.num_kv_heads, slots, args.head_dim)
        return cls._over(torch.zeros(shape, dtype=cls.dtype or dtype, device=device))

    @classmethod
    def _over(cls, kv: Tensor) -> LayerCaches:
        return cls(cls.Layer(kv, i) for i in range(len(kv)))

    def rows(self, first: int, count: int) -> LayerCaches:
        return self._over(self[0].kv.narrow(2, first, count))

    @on_kernel("move", KVCaches.move)
    def move(self, source: Tensor, target: Tensor) -> None:
        move_slots(self[0].kv, source, target)

    def sequence(self, place: int, slots: int) -> list[Tensor]:
        return [layer[:, place, :, :slots] for layer in self[0].kv]


class Float8LayerCache(Float8Cache, LayerCache):
    """`LayerCache` in float8."""


class Float8LayerCaches(Float8Caches, LayerCaches):
    """`LayerCaches` in float8: kv [L, 2, B, nkv, S, hd] as bytes."""

    Layer = Float8LayerCache


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
