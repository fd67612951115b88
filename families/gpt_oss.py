"""gpt-oss: experts, attention sinks, and biases everywhere."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.schema import Flag
from families.experts import Mixture, MixtureArgs, MixtureBlock
from model import MLP, Linear


@dataclass(frozen=True)
class GptOssArgs(MixtureArgs):
    """The shape of a gpt-oss target. With `biases`, `wo` has a bias too."""

    sinks: Flag = False  # a learned softmax score per query head, without a value (attention sinks)


class GptOssBlock(MixtureBlock):
    """A layer of gpt-oss."""

    def __init__(self, args: GptOssArgs, layer: int = 0):
        super().__init__(args, layer)
        self.sinks = nn.Parameter(torch.empty(args.num_heads)) if args.sinks else None
        self.wo = Linear(args.num_heads * args.head_dim, args.hidden_size, bias=args.biases)

    def make_mlp(self, args: GptOssArgs) -> nn.Module:
        mlp = super().make_mlp(args)
        if isinstance(mlp, MLP) and args.biases:
            H, inner = args.hidden_size, args.intermediate_size
            mlp.w_gate_up, mlp.w_down = Linear(H, 2 * inner, bias=True), Linear(inner, H, bias=True)
        return mlp

    def attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """See `Block.attention`. A sink is the bias of an extra slot with key and value 0."""
        if self.sinks is None:
            return super().attention(q, k, v, bias)
        h, rows = q.shape[1:3]
        scores = self.sinks.view(h, -1)  # [h, query heads per key/value head]
        sinks = scores.repeat_interleave(rows // scores.shape[1], 1).to(bias.dtype)[..., None]
        bias = torch.cat((bias.expand(*q.shape[:-1], -1), sinks.expand(*q.shape[:-1], 1)), dim=-1)
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class GptOss(Mixture):
    """A gpt-oss target."""

    Args, Layer = GptOssArgs, GptOssBlock
