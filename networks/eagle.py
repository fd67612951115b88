"""The heads of EAGLE-1/2, EAGLE-3 and P-EAGLE. Definitions only."""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import whole
from model import Block, Linear, Pass, RMSNorm, TargetBlock, project
from networks.head import Head, HeadArgs
from networks.markov import Markov, MarkovArgs


class Eagle3Block(Block):
    """The first layer of an EAGLE-3 head.

    Attention reads embedding and feature side by side (2H); the residual stream is the feature alone.
    """

    def __init__(self, args: HeadArgs):
        super().__init__(args, input_size=2 * args.hidden_size)
        self.norm_before_residual = args.norm_before_residual
        self.embed_norm = RMSNorm(args.hidden_size, args.norm_eps)
        self.feature_norm = RMSNorm(args.hidden_size, args.norm_eps)

    def inputs(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention's input [B, T, 2H], embedding first, and the residual stream [B, T, H].

        embedded, feature [B, T, H]: token embeddings and features, not yet normed.
        """
        normed = self.feature_norm(feature)
        return torch.cat(
            (self.embed_norm(embedded), normed), dim=-1
        ), normed if self.norm_before_residual else feature


class Eagle1Head(Head):
    """The head of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, section 4.1; SafeAILab/EAGLE model/cnets1.py).

    Its features are the target's states after the final norm, which it predicts; its logits are the target's
    lm_head on them. The one layer has no input norm: `fc` of embedding and feature is its input and its
    residual stream.
    """

    reads_normed = True

    def __init__(self, args: HeadArgs):
        super().__init__(args)
        self.fc = Linear(2 * args.hidden_size, args.hidden_size, bias=args.fc_bias)
        self.layer = Block(args)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ):
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)
        x = self.fc(torch.cat((self.embed(tokens), feature), dim=-1))
        return self.layer(x, caches[0], shared)


class Eagle3Head(Head):
    """The head of EAGLE-3 (arXiv 2503.01840, section 3; SafeAILab/EAGLE model/cnets.py).

    The flags of `HeadArgs` are the variants in SpecForge, SGLang and speculators. fused: a backend's kernel
    for `run_layers`, called with this head and the arguments.
    """

    fused = None

    def __init__(self, args: HeadArgs):
        super().__init__(args)
        H, Ht = args.hidden_size, args.target_hidden_size
        widths = {
            "": (), "each": (Ht,) * len(args.aux_layers), "all": (args.feature_width,)
        }[args.feature_norm]
        self.fc_norms = nn.ModuleList(RMSNorm(width, args.norm_eps) for width in widths)
        self.fc = Linear(args.feature_width, H, bias=args.fc_bias)
        self.layer = Eagle3Block(args)
        self.more_layers = nn.ModuleList(TargetBlock(args, i) for i in range(1, args.num_layers))
        self.norm = RMSNorm(H, args.norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts)], dim=-1)
        return self.fc(features)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ):
        x = self.run_layers(tokens, feature, positions, slots, visible, caches)
        return self.norm(x) if self.args.recycle_normed else x

    def run_layers(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        """Compute the residual stream [B, T, H] after the last layer; arguments as for `forward`."""
        if self.fused is not None:
            return self.fused(self, tokens, feature, positions, slots, visible, caches)
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)
        inputs, x = self.layer.inputs(self.embed(tokens), feature)
        x = self.layer(x, caches[0], shared, inputs)
        for i, layer in enumerate(self.more_layers, 1):
            x = layer(x, caches[i], shared)
        return x

    def logits(self, feature: Tensor) -> Tensor:
        return project(self.lm_head, feature) if self.args.recycle_normed else self.score(feature)

    def score(self, x: Tensor) -> Tensor:
        """Residual stream [..., H] -> float32 draft logits [..., Vd]."""
        return project(self.lm_head, self.norm(x))


@dataclass(frozen=True, kw_only=True)
class PEagleArgs(MarkovArgs):
    """Shape of a P-EAGLE head."""

    drafts: whole(1, 256) = 8  # draft steps that it was trained for: levels of a tree


class PEagleHead(Eagle3Head, Markov):
    """The head of P-EAGLE (arXiv 2602.01469): EAGLE-3 with all draft steps in one pass.

    Rows after the first stand for tokens that are not known yet: they read the embedding of `mask_id`, and
    `mask_hidden` in place of the target's features (names: vllm-project/vllm#32887).
    """

    Args = PEagleArgs

    def __init__(self, args: PEagleArgs):
        super().__init__(args)
        self.mask_hidden = nn.Parameter(torch.zeros(args.feature_width))
        self.add_markov(args)

    def rows(self, h: Tensor) -> Tensor:
        """Output of `forward` [..., H] -> the input of the lm_head, the Markov and the confidence head."""
        return h if self.args.recycle_normed else self.norm(h)

    def logits(self, feature: Tensor) -> Tensor:
        """Output of `rows` [..., H] -> float32 draft logits [..., Vd], without the Markov head's part."""
        return Head.logits(self, feature)
