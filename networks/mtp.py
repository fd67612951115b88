"""MTP layers of Qwen3-Next, Qwen3.5 and later, as draft heads. Definitions only."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from families.hybrid import GatedBlock, HybridArgs
from families.norms import ZeroCenteredNorm
from head import Eagle1Head, HeadArgs
from model import PassInputs


@dataclass(frozen=True, kw_only=True)
class MtpArgs(HeadArgs, HybridArgs):
    """Shape of an MTP layer: fields of its target and of draft heads."""


class MtpHead(Eagle1Head):
    """The MTP layer (multi-token prediction) of Qwen3-Next, Qwen3.5 and later, as a draft head.

    Norms of embedding and feature, `fc` of both, a layer with gated attention, a norm. Like EAGLE-1 heads, it
    reads the target's hidden states after the final norm, then its own.
    """

    Args = MtpArgs

    def __init__(self, args: MtpArgs):
        super().__init__(args)
        H, eps = args.hidden_size, args.norm_eps
        self.embed_norm, self.feature_norm, self.norm = (ZeroCenteredNorm(H, eps) for _ in range(3))
        self.layer = GatedBlock(args)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        normed = self.embed_norm(self.embed(tokens)), self.feature_norm(feature)
        return self.norm(self.layer(self.fc(torch.cat(normed, dim=-1)), caches[0], shared))
