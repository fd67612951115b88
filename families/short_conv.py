"""Short convolutions beside attention: LFM2 and LFM2.5, dense and MoE. Definitions only.

A convolution layer reads the last few tokens of each path only. Their inputs are in a cache by slot, as keys
and values are, so a tree needs no state.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import Flag, number, whole
from families.experts import Experts, MixtureArgs
from families.mixed import MixedCaches
from families.norms import invariant, ordered_sum
from model import MLP, KVCaches, Linear, PassInputs, TargetBlock, Transformer, lazy_zeros


@dataclass(frozen=True)
class ShortConvArgs(MixtureArgs):
    """The shape of a target with short convolutions."""

    conv_layers: tuple[whole(0, 1), ...] = ()  # 1: a convolution, 0: attention
    conv_taps: whole(1, 64) = 3  # tokens that it reads
    conv_bias: Flag = False
    dense_layers: whole(0, 10_000) = 0  # the first layers, with an MLP of `dense_size` in place of experts
    router_factor: number(above=0, high=1e6) = 1.0  # of the weights of experts

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

    A token sees one slot for each position up to its own, in ascending order (`model.apply_sliding_window`).
    """
    visible = shared.visible if isinstance(shared.visible, Tensor) else shared.visible.dense()
    rank = visible.cumsum(-1)
    return [(((rank == rank[..., -1:] - back) & visible).long().argmax(-1), shared.positions >= back)
            for back in range(taps)]


class ConvCaches(KVCaches):
    """The caches of all convolutions."""

    def move(self, source: Tensor, target: Tensor) -> None:
        rows = torch.arange(len(source), device=source.device)[:, None]
        for cache in self:
            cache.inputs.index_put_((rows, target), cache.inputs[rows, source])


class SigmoidExperts(Experts):
    """Experts with independent scores; a bias changes which are chosen, but not their weights."""

    own_routing = True

    def __init__(self, args: ShortConvArgs):
        super().__init__(args)
        self.factor, self.score_bias = args.router_factor, nn.Parameter(torch.zeros(args.num_experts))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = invariant(torch.sigmoid, self.router(tokens).float())
        chosen = (scores + self.score_bias.float()).topk(self.used, dim=-1).indices
        weight = scores.gather(-1, chosen)
        if self.renormalize:
            weight = weight / (ordered_sum(weight) + 1e-6)[:, None]
        return weight * self.factor, chosen


class AttentionBlock(TargetBlock):
    """A layer with attention."""

    def __init__(self, args: ShortConvArgs, layer: int = 0):
        if layer < args.dense_layers:
            args = replace(args, num_experts=0, intermediate_size=args.dense_size)
        super().__init__(args, layer)
        self.standard = not args.num_experts

    def make_mlp(self, args: ShortConvArgs) -> nn.Module:
        return SigmoidExperts(args) if args.num_experts else MLP(args)


class ConvBlock(AttentionBlock):
    """A layer with a short convolution in place of attention."""

    def __init__(self, args: ShortConvArgs, layer: int = 0):
        super().__init__(args, layer)
        self.standard, H = False, args.hidden_size
        del self.wqkv, self.wo, self.q_norm, self.k_norm
        self.q_norm = self.k_norm = None
        self.w_in, self.w_out = (Linear(H, n * H, bias=args.conv_bias) for n in (3, 1))
        self.taps = nn.Parameter(torch.zeros(H, args.conv_taps))
        self.conv_bias = nn.Parameter(torch.zeros(H)) if args.conv_bias else None

    wqkv = property(lambda self: self.w_in)  # names of attention layers
    wo = property(lambda self: self.w_out)


class ShortConv(Transformer):
    """A target with short convolutions."""

    Args = ShortConvArgs

    def make_layer(self, layer: int) -> TargetBlock:
        return (ConvBlock if self.args.conv_layers[layer] else AttentionBlock)(self.args, layer)

    def caches(self, batch: int, slots: int, device: torch.device | str | None = None) -> MixedCaches:
        embed, layers = self.embed, self.args.conv_layers
        where = embed.dtype, device or embed.device
        args = replace(self.args, num_layers=layers.count(0))
        convs = (ConvCache(batch, slots, args.hidden_size, *where) for _ in range(layers.count(1)))
        groups = self.Caches.allocate(args, batch, slots, *where, self.backend), ConvCaches(convs)
        return MixedCaches(groups, [(kind, layers[:i].count(kind)) for i, kind in enumerate(layers)])
