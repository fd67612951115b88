"""KV caches of the CPU operators: attention in one operator, also over keys and values in int8."""
from __future__ import annotations

from functools import cached_property, partial

import torch
import torch.nn as nn
from torch import Tensor

from head import Eagle3Head
from model import Block, KVCache, KVCaches, ModelArgs, PassInputs, Transformer, lazy_zeros


def angles(ops, args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`model.rope_table` as one operator."""
    return ops.angles(positions, inv_freq.float(), args.rope_factor)


class CpuCache(KVCache):
    """A `KVCache` with attention in one operator, which reads the mask directly."""

    def attend(self, block: Block, qkv: Tensor, shared: PassInputs) -> Tensor:
        ops = self.backend.ops
        cos_sin = block.layer_cos_sin(shared.cos_sin(partial(angles, ops)))
        caches, scores = (self.k, self.v, shared.slots, shared.visible), (block.sinks, block.score_cap)
        return ops.attend(qkv, *cos_sin, *block.head_norms, *caches, block.window, *scores)


class CpuCaches(KVCaches):
    """`KVCaches` for the operators."""

    Layer = CpuCache

    @classmethod
    def allocate(
        cls, args: ModelArgs, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str, backend
    ) -> CpuCaches:
        return super().allocate(args, batch, slots, dtype, device, backend)._bind(args.head_dim, backend)

    def _bind(self, head_dim: int, backend) -> CpuCaches:
        self.head_dim, self.backend = head_dim, backend
        self._network: tuple = None, None  # a model, and its `network`
        for cache in self:
            cache.backend = backend
        return self

    def rows(self, first: int, count: int) -> CpuCaches:
        return super().rows(first, count)._bind(self.head_dim, self.backend)

    @property
    def keys_and_values(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys by layer, values by layer."""
        return [cache.k for cache in self], [cache.v for cache in self]

    @cached_property
    def table(self) -> Tensor:
        """The argument of csrc/operators.cpp: cache_table for these caches. Their memory must not move."""
        return self.backend.ops.cache_table(*self.keys_and_values)

    def network(self, model: Transformer | Eagle3Head) -> tuple:
        """Return a model, for these caches, as the C++ type Network (csrc/operators.cpp). Cached."""
        if self._network[0] is not model:
            args, tensors = model.args, (*model.fused.weights, *self.keys_and_values)
            layer_table = self.backend.ops.layer_table(*tensors, args.norm_eps)
            rope = model.inv_freq.float(), args.rope_factor
            embed = model.embed  # as the C++ type Table
            table = embed.table if hasattr(embed, "table") else (embed.weight, None, None, None, False)
            self._network = model, (*table, *rope, layer_table, args.norm_eps)
        return self._network[1]

    def move(self, source: Tensor, destination: Tensor) -> None:
        self.backend.ops.move(self.table, self.head_dim, source, destination)


class Int8Cache(CpuCache):
    """Keys and values in int8, with one scale per head and slot, see csrc/kv_int8.h.

    k, v: [B, blocks of slots, nkv, bytes of a block]; in memory heads precede blocks.
    """

    def __init__(self, shapes: list[tuple[int, ...]], device: torch.device | str):
        nn.Module.__init__(self)
        for name, shape in zip(("k", "v"), shapes):
            buffer = lazy_zeros(shape, torch.uint8, device).transpose(1, 2)
            self.register_buffer(name, buffer, persistent=False)


class Int8Caches(CpuCaches):
    """`CpuCaches` in int8."""

    @classmethod
    def allocate(cls, args, batch, slots, dtype, device, backend) -> Int8Caches:
        block_slots, *sizes = backend.ops.int8_block_sizes(args.head_dim)
        shapes = [(batch, args.num_kv_heads, -(-slots // block_slots), size) for size in sizes]
        return cls(Int8Cache(shapes, device) for _ in range(args.num_layers))._bind(args.head_dim, backend)

    def sequence(self, slot: int, length: int) -> list[Tensor]:
        return super().sequence(slot, -(-length // self.backend.ops.int8_block_sizes(self.head_dim)[0]))
