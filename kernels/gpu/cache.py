"""KV caches of all layers in one tensor, so that the entries that a step commits are moved at once; and the
attention mask of our kernels: not a tensor [B, T, n], but what it is computed from.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import tree
from engine.graphs import materialize
from kernels.cpu_cache import head_norms
from kernels.gpu.attention import attend
from kernels.gpu.fallback import with_fallback
from kernels.kv_dtypes import Float8Cache, Float8Caches
from model import Block, KVCache, KVCaches, ModelArgs, PassInputs, apply_sliding_window, rope_table


class TreeMask(NamedTuple):
    """The arguments of `tree.tree_attention_mask`, and sliding windows.

    local [B, T, M]: which of the M slots after the first `length` each token attends to; the pass's own
    tokens are the last T of them. first [B, T]: the first committed slot that each token attends to; None:
    all of them.
    """

    slots: Tensor
    length: Tensor
    local: Tensor
    first: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the mask [B, T, n] bool."""
        visible = tree.tree_attention_mask(self.slots, self.length, self.local)
        return visible if self.first is None else visible & (self.slots >= self.first[..., None])

    def within(self, window: int) -> TreeMask:
        """Return the mask of layers with a sliding window, see `model.apply_sliding_window`."""
        first = self.length[:, None] + self.local.sum(-1) - window
        local = materialize(apply_sliding_window(self.local, window))
        return self._replace(local=local, first=materialize(first))


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
        """The layer's values [B, S, nkv, hd]."""
        return self.kv[self.layer, 1].transpose(1, 2)

    @with_fallback("attend", KVCache.attend)
    def attend(self, block: Block, qkv: Tensor, shared: PassInputs) -> Tensor:
        """Attend in one kernel, from wqkv to wo; in PyTorch with sinks, soft caps or a dense mask."""
        if block.sinks is not None or block.score_cap or not isinstance(shared.visible, TreeMask):
            return super().attend(block, qkv, shared)
        mask, angles = shared.mask(block.window), block.layer_cos_sin(shared.cos_sin(_angles))
        return attend(qkv, *angles, *head_norms(block), self.kv, self.layer, *mask[1:])


def _angles(args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return `model.rope_table`, computed once for all layers."""
    cos, sin = rope_table(args, inv_freq, positions)
    return materialize(cos), materialize(sin)


class LayerCaches(KVCaches):
    """The caches of all layers in one tensor."""

    Layer = LayerCache

    @classmethod
    def allocate(
        cls, args: ModelArgs, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str, backend
    ) -> LayerCaches:
        shape = (args.num_layers, 2, batch, args.num_kv_heads, slots, args.head_dim)
        return cls.from_tensor(torch.zeros(shape, dtype=cls.dtype or dtype, device=device))

    @classmethod
    def from_tensor(cls, kv: Tensor) -> LayerCaches:
        return cls(cls.Layer(kv, i) for i in range(len(kv)))

    def rows(self, first: int, count: int) -> LayerCaches:
        return self.from_tensor(self[0].kv.narrow(2, first, count))

    def move(self, source: Tensor, target: Tensor) -> None:
        kv, b = self[0].kv, torch.arange(len(source), device=source.device)[:, None]
        kv[:, :, b, :, target] = kv[:, :, b, :, source]

    def sequence(self, slot: int, length: int) -> list[Tensor]:
        return [layer[:, slot, :, :length] for layer in self[0].kv]


class Float8LayerCache(Float8Cache, LayerCache):
    """`LayerCache` in float8."""


class Float8LayerCaches(Float8Caches, LayerCaches):
    """`LayerCaches` in float8: kv [L, 2, B, nkv, S, hd] as bytes."""

    Layer = Float8LayerCache
