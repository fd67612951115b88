"""Mamba-2 layers (arXiv 2405.21060) in a hybrid with attention: Granite 4 H.

A Mamba-2 layer is computed as Gated DeltaNet (`families.hybrid`) without the delta rule: u = b v. Keys are B,
queries C, values x, step sizes dt. Tree nodes need no states either.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.schema import Flag
from families.hybrid import DeltaBlock, Hybrid, HybridArgs, PathTokens
from families.norms import invariant, ordered_sum
from families.variants import Variant, VariantArgs, VariantBlock
from model import Linear, RMSNorm, TargetBlock


@dataclass(frozen=True)
class MambaArgs(VariantArgs, HybridArgs):
    """The shape of a target with Mamba-2 layers, marked in `delta_layers`. Key heads are groups."""

    mamba: Flag = False

    shardable = False


class MambaTokens(PathTokens):
    """Tokens on paths, see `MambaBlock.split_mixed`."""

    delta_rule = False


class MambaBlock(DeltaBlock):
    """A Mamba-2 layer. `w_in` computes C, B and x, the gate, and the steps."""

    Norm, Tokens = RMSNorm, MambaTokens

    def __init__(self, args: MambaArgs, layer: int = 0):
        super().__init__(args, layer)
        self.residual_factor, values = args.residual_factor, self.widths[1]
        self.widths = *self.widths[:3], 0
        self.w_in = Linear(args.hidden_size, sum(self.widths), bias=False)
        self.conv_bias = nn.Parameter(torch.zeros(args.delta_width))
        self.out_scale = nn.Parameter(torch.ones(values))
        self.skip = nn.Parameter(torch.ones(self.value_heads))

    def rates(self, step: Tensor, decay: Tensor) -> Tensor:
        step = invariant(F.softplus, step.float() + self.step_bias.float())
        return torch.cat((-invariant(torch.exp, self.log_decay.float()) * step, step), -1)

    def split_mixed(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return C and B [..., nv, dk] and x [..., nv, dv], in float32."""
        keys, groups = self.key_heads * self.key_dim, self.value_heads // self.key_heads
        *c_and_b, x = mixed.float().split((keys, keys, self.widths[1]), dim=-1)
        c, b = (one.unflatten(-1, (self.key_heads, -1)).repeat_interleave(groups, dim=-2) for one in c_and_b)
        return c, b, x.unflatten(-1, (self.value_heads, -1))

    def add_skip(self, out: Tensor, mixed: Tensor) -> Tensor:
        """Add the skip connection to outputs [B, T, nv, dv]. mixed: outputs of `convolve`."""
        return out + self.skip.float()[:, None] * self.split_mixed(mixed)[2]

    def gate_output(self, out: Tensor, gate: Tensor) -> Tensor:
        """Gate outputs [B, T, nv, dv], and norm each group -> the input of `wo`."""
        x = out.to(gate.dtype).float().flatten(2) * invariant(F.silu, gate.float())
        x = x.unflatten(-1, (self.key_heads, -1))
        x = x / (ordered_sum(x * x) / x.shape[-1] + self.eps).sqrt()[..., None]
        return self.out_scale * x.flatten(2).to(gate.dtype)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.residual_factor * self.wo(attended)
        return x + self.residual_factor * self.mlp(self.mlp_norm(x), None)


class Mamba(Hybrid, Variant):
    """A target with Mamba-2 layers."""

    Args, Layer, cpu_only_part = MambaArgs, MambaBlock, "Mamba layers"
    can_compile = False

    def make_layer(self, layer: int) -> TargetBlock:
        return (MambaBlock if self.args.delta_layers[layer] else VariantBlock)(self.args, layer)
