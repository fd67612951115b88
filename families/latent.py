"""Multi-head latent attention (arXiv 2405.04434) with experts: GLM-4.7-Flash.

Queries, keys and values are projected from two compressed (latent) vectors per token. The KV cache has the
expanded keys and values of all heads, so attention is computed as in other models.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import whole
from families.experts import SigmoidArgs, SigmoidBlock, SigmoidExperts
from families.rope import PartialRotaryArgs
from model import MLP, Linear, Transformer

LATENT_EPS = 1e-6  # of the norms of the latent vectors


@dataclass(frozen=True)
class LatentArgs(SigmoidArgs, PartialRotaryArgs):
    """The shape of a target with latent attention. Heads share `rotary_dim` dimensions of keys."""

    query_rank: whole(0, 2**16) = 0  # size of the latent vector of queries (q_lora_rank)
    latent_rank: whole(0, 2**16) = 0  # of keys and values (kv_lora_rank)
    shared_expert_size: whole(0, 2**22) = 0  # intermediate size of the shared expert

    shardable = False


class SharedExperts(nn.Module):
    """Routed experts and a shared expert."""

    def __init__(self, args: LatentArgs):
        super().__init__()
        self.routed = SigmoidExperts(args)
        self.routed.eps = 1e-20
        self.shared = MLP(replace(args, intermediate_size=args.shared_expert_size))

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """See `MLP.forward`."""
        return self.shared(x, self.routed(x, residual))


class LatentBlock(SigmoidBlock):
    """A layer with latent attention. `wqkv` computes both latent vectors and the rotary part of the keys."""

    def __init__(self, args: LatentArgs, layer: int = 0):
        super().__init__(args, layer)
        self.standard, H, heads = False, args.hidden_size, args.num_heads
        self.widths = args.query_rank, args.latent_rank, args.rotary_dim
        self.nope_dim = args.head_dim - args.rotary_dim
        self.wqkv = Linear(H, sum(self.widths), bias=False)
        self.query_norm = self.Norm(args.query_rank, LATENT_EPS)
        self.latent_norm = self.Norm(args.latent_rank, LATENT_EPS)
        self.w_q = Linear(args.query_rank, heads * args.head_dim, bias=False)
        self.w_kv = Linear(args.latent_rank, heads * (self.nope_dim + args.head_dim), bias=False)

    def make_mlp(self, args: LatentArgs) -> nn.Module:
        return SharedExperts(args) if args.num_experts else MLP(args)

    def project(self, x: Tensor) -> Tensor:
        queries, latent, rotary = self.wqkv(self.attn_norm(x)).split(self.widths, dim=-1)
        q = self.w_q(self.query_norm(queries.contiguous()))
        kv = self.w_kv(self.latent_norm(latent.contiguous())).unflatten(-1, (self.num_heads, -1))
        k, v = kv.split((self.nope_dim, self.head_dim), dim=-1)
        rotary = rotary[..., None, :].expand(*k.shape[:-1], -1)
        halves = zip(rotary.chunk(2, dim=-1), k.chunk(2, dim=-1))  # pairs are (j, j + hd/2)
        k = torch.cat([part for half in halves for part in half], dim=-1)
        return torch.cat((q, k.flatten(-2), v.flatten(-2)), dim=-1)


class Latent(Transformer):
    """A target with latent attention."""

    Args, Layer, cpu_only_part = LatentArgs, LatentBlock, "models with latent attention"
