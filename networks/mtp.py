"""MTP layers of Qwen3-Next, Qwen3.5 and later, and of GLM-4.7-Flash, as draft heads."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from families.hybrid import GatedBlock, HybridArgs
from families.latent import LatentArgs, LatentBlock
from families.norms import ZeroCenteredNorm
from head import Eagle1Head, HeadArgs
from model import PassInputs, RMSNorm


@dataclass(frozen=True, kw_only=True)
class MtpArgs(HeadArgs, HybridArgs):
    """Shape of an MTP layer: fields of its target and of draft heads."""


class MtpHead(Eagle1Head):
    """The MTP layer (multi-token prediction) of Qwen3-Next, Qwen3.5 and later, as a draft head.

    Norms of embedding and feature, `fc` of both, a layer of the target's kind, a norm. Like EAGLE-1 heads, it
    reads the target's hidden states after the final norm, then its own.
    """

    Args, Norm, Layer = MtpArgs, ZeroCenteredNorm, GatedBlock

    def __init__(self, args: MtpArgs):
        super().__init__(args)
        H, eps = args.hidden_size, args.norm_eps
        self.embed_norm, self.feature_norm, self.norm = (self.Norm(H, eps) for _ in range(3))
        self.layer = self.Layer(args)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        normed = self.embed_norm(self.embed(tokens)), self.feature_norm(feature)
        return self.norm(self.layer(self.fc(torch.cat(normed, dim=-1)), caches[0], shared))


@dataclass(frozen=True, kw_only=True)
class LatentMtpArgs(HeadArgs, LatentArgs):
    """Shape of an MTP layer with latent attention."""


class LatentMtpHead(MtpHead):
    """The MTP layer of GLM-4.7-Flash."""

    Args, Norm, Layer = LatentMtpArgs, RMSNorm, LatentBlock
