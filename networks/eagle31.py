"""EAGLE-3 heads with the options of EAGLE-3.1, SpecForge, SGLang and speculators."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import Flag
from head import Eagle3Block, Eagle3Head, HeadArgs
from model import RMSNorm


@dataclass(frozen=True, kw_only=True)
class Eagle31Args(HeadArgs):
    """Shape of an EAGLE-3 head with options."""

    # Norms before fc: "" none, "each": one per captured state, "all": one over all states.
    feature_norm: Literal["", "each", "all"] = ""
    norm_before_residual: Flag = False  # the residual stream starts from the normed feature
    recycle_normed: Flag = False  # norm_output: the next draft step reads norm(h), not h


class Eagle31Block(Eagle3Block):
    """The first layer. Its residual stream may start from the normed feature."""

    def __init__(self, args: Eagle31Args):
        super().__init__(args)
        self.norm_before_residual = args.norm_before_residual

    def inputs(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.feature_norm(feature)
        attention_input = torch.cat((self.embed_norm(embedded), normed), dim=-1)
        return attention_input, normed if self.norm_before_residual else feature


class Eagle31Head(Eagle3Head):
    """An EAGLE-3 head with norms before `fc`, or with normed outputs as features."""

    Args, Layer = Eagle31Args, Eagle31Block

    def __init__(self, args: Eagle31Args):
        super().__init__(args)
        widths = {
            "": (), "each": (args.target_hidden_size,) * len(args.aux_layers), "all": (args.feature_width,)
        }[args.feature_norm]
        self.fc_norms = nn.ModuleList(RMSNorm(width, args.norm_eps) for width in widths)
        self.feeds_residual = not args.recycle_normed

    def fuse(self, features: Tensor) -> Tensor:
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts)], dim=-1)
        return self.fc(features)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        x = super().forward(tokens, feature, positions, slots, visible, caches)
        return self.norm(x) if self.args.recycle_normed else x

    def logits(self, feature: Tensor) -> Tensor:
        return self.lm_head.logits(feature) if self.args.recycle_normed else super().logits(feature)
