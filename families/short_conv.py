"""Short convolutions in a hybrid with attention: LFM2 and LFM2.5, dense and MoE.

A convolution layer reads the last few tokens of each path only. Their inputs are cached by slot, as keys and
values are, so tree nodes need no states.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import Flag, whole
from families.experts import SigmoidArgs, SigmoidBlock
from families.mixed import MixedCaches
from model import KVCaches, Linear, PassInputs, TargetBlock, Transformer, lazy_zeros


@dataclass(frozen=True)
class ShortConvArgs(SigmoidArgs):
    """The shape of a target with short convolutions."""

    conv_layers: tuple[whole(0, 1), ...] = ()  # 1: a convolution, 0: attention
    conv_taps: whole(1, 64) = 3  # tokens that it reads
    conv_bias: Flag = False

    shardable = False

    def constraints(self) -> list[tuple[str, bool, str]]:
        each = ("conv_layers", len(self.conv_layers) == self.num_layers, f"a list of {self.num_layers}")
        return [*super().constraints(), each]


class ConvCache(nn.Module):
    """The inputs of a layer's convolution [B, S, H] by cache slot."""

    def __init__(self, batch: int, slots: int, width: int, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.register_buffer("inputs", lazy_zeros((batch, slots, width), dtype, device), persistent=False)

    def attend(self, block: ConvBlock, projected: Tensor, shared: PassInputs) -> Tensor:
        """Outputs of `w_in` [B, T, 3 H] -> the input of `wo` [B, T, H]."""
        b, c, x = projected.chunk(3, dim=-1)
        rows = torch.arange(len(x), device=x.device)[:, None]
        self.inputs.index_put_((rows, shared.slots), b * x)
        taps, total = block.taps.float(), 0.0 if block.conv_bias is None else block.conv_bias.float()
        for back, (slots, exists) in enumerate(shared.cached("taps", _tap_slots, shared, taps.shape[1])):
            inputs = torch.where(exists[..., None], self.inputs[rows, slots], 0)
            total = total + inputs.float() * taps[:, -1 - back]
        return c * total.to(c.dtype)


def _tap_slots(shared: PassInputs, taps: int) -> list[tuple[Tensor, Tensor]]:
    """Return the slots [B, T] of each token and of the tokens before it on its path, and whether they exist.

    The slots that a token sees are in ascending order of positions (`model.apply_sliding_window`).
    """
    visible = shared.visible if isinstance(shared.visible, Tensor) else shared.visible.dense()
    index = visible.cumsum(-1)  # of each slot on the path, from 1
    return [(((index == index[..., -1:] - back) & visible).long().argmax(-1), shared.positions >= back)
            for back in range(taps)]


class ConvCaches(KVCaches):
    """The caches of all convolutions."""

    def move(self, source: Tensor, target: Tensor) -> None:
        rows = torch.arange(len(source), device=source.device)[:, None]
        for cache in self:
            cache.inputs.index_put_((rows, target), cache.inputs[rows, source])


class ConvBlock(SigmoidBlock):
    """A layer with a short convolution in place of attention."""

    def __init__(self, args: ShortConvArgs, layer: int = 0):
        super().__init__(args, layer)
        self.standard, H = False, args.hidden_size
        del self.wqkv, self.wo, self.q_norm, self.k_norm
        self.q_norm = self.k_norm = None
        self.w_in, self.w_out = (Linear(H, n * H, bias=args.conv_bias) for n in (3, 1))
        self.taps = nn.Parameter(torch.zeros(H, args.conv_taps))
        self.conv_bias = nn.Parameter(torch.zeros(H)) if args.conv_bias else None

    wqkv = property(lambda self: self.w_in)  # backends use the names of attention layers
    wo = property(lambda self: self.w_out)


class ShortConv(Transformer):
    """A target with short convolutions."""

    Args, cpu_only_part = ShortConvArgs, "short convolutions"

    def make_layer(self, layer: int) -> TargetBlock:
        return (ConvBlock if self.args.conv_layers[layer] else SigmoidBlock)(self.args, layer)

    def caches(self, batch: int, slots: int, device: torch.device | str | None = None) -> MixedCaches:
        embed, layers = self.embed, self.args.conv_layers
        where = embed.dtype, device or embed.device
        args = replace(self.args, num_layers=layers.count(0))
        convs = (ConvCache(batch, slots, args.hidden_size, *where) for _ in range(layers.count(1)))
        groups = self.Caches.allocate(args, batch, slots, *where, self.backend), ConvCaches(convs)
        return MixedCaches(groups, [(kind, layers[:i].count(kind)) for i, kind in enumerate(layers)])
