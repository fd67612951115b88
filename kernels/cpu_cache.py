"""KV caches of the CPU operators: attention in one operator."""
from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from head import Eagle3Head
from model import Block, KVCache, KVCaches, ModelArgs, PassInputs, Transformer


def angles(ops, args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `model.rope_table` in one operator."""
    return ops.angles(positions, inv_freq.float(), args.rope_factor)


def head_norms(block: Block) -> tuple[Tensor | None, Tensor | None, float]:
    """Return the weights of the norms of q and k and their eps; None, None, 0.0 without them."""
    if block.q_norm is None:
        return None, None, 0.0
    return block.q_norm.scale, block.k_norm.scale, block.q_norm.eps


class CpuCache(KVCache):
    """A `KVCache` with attention in one operator, which reads the mask directly."""

    def attend(self, block: Block, qkv: Tensor, shared: PassInputs) -> Tensor:
        ops = self.backend.ops
        cos_sin = block.layer_cos_sin(shared.cos_sin(partial(angles, ops)))
        caches, scores = (self.k, self.v, shared.slots, shared.visible), (block.sinks, block.score_cap)
        return ops.attend(qkv, *cos_sin, *head_norms(block), *caches, block.window, *scores)


class CpuCaches(KVCaches):
    """`KVCaches` for the C++ operators."""

    Layer = CpuCache

    @classmethod
    def allocate(
        cls, args: ModelArgs, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str, backend
    ) -> CpuCaches:
        return super().allocate(args, batch, slots, dtype, device, backend)._bind(args.head_dim, backend)

    def _bind(self, head_dim: int, backend) -> CpuCaches:
        self.head_dim, self.backend = head_dim, backend
        self._network: tuple = None, None  # (model, its C++ Network)
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
        """Return the model with these caches as the C++ type Network (csrc/operators.cpp). Cached."""
        if self._network[0] is not model:
            args, tensors = model.args, (*model.fused.weights, *self.keys_and_values)
            layer_table = self.backend.ops.layer_table(*tensors, args.norm_eps)
            rope = model.inv_freq.float(), args.rope_factor
            embed = model.embed
            # The C++ type Table.
            table = embed.table if hasattr(embed, "table") else (embed.weight, None, None, None, False)
            self._network = model, (*table, *rope, layer_table, args.norm_eps)
        return self._network[1]

    def move(self, source: Tensor, destination: Tensor) -> None:
        self.backend.ops.move(self.table, self.head_dim, source, destination)
