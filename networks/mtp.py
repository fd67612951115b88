"""The MTP layer (multi-token prediction) of Qwen3-Next, Qwen3.5 and later, as a draft head. Definition only.

As the heads of EAGLE-1, it reads the target's states after the final norm, and then its own, normed.
"""
from __future__ import annotations

import torch
from torch import Tensor

from model import Pass, RMSNorm
from networks.eagle import Eagle1Head
from networks.head import HeadArgs
from networks.hybrid import GatedBlock


class MtpHead(Eagle1Head):
    """Norms of embedding and feature, `fc` of both, a layer with gated attention, a norm."""

    def __init__(self, args: HeadArgs):
        super().__init__(args)
        H, norm = args.hidden_size, (args.norm_eps, args.zero_centred)
        self.embed_norm, self.feature_norm, self.norm = (RMSNorm(H, *norm) for _ in range(3))
        self.layer = GatedBlock(args)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)
        normed = self.embed_norm(self.embed(tokens)), self.feature_norm(feature)
        return self.norm(self.layer(self.fc(torch.cat(normed, dim=-1)), caches[0], shared))
