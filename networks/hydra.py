"""Hydra heads: each guess reads the tokens drafted before it. Definitions only.

Ankner et al., arXiv 2402.05109. Tensors and formulas: zankner/Hydra prefix_mlp_head.py and mlp_head.py.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from model import Pass, RMSNorm, TargetBlock
from networks.medusa import MultiTokenArgs, MultiTokenHeads


class HydraHeads(MultiTokenHeads):
    """Guess k reads p, the root and k drafted tokens.

    p is z; Hydra++ has a layer that makes p of all z so far.
    """

    def __init__(self, args: MultiTokenArgs):
        super().__init__(args)
        H = args.hidden_size
        self.prefix_layer = TargetBlock(args) if args.prefix else None
        self.prefix_norm = RMSNorm(H, args.norm_eps) if args.prefix else None
        self.stacks = nn.ModuleList(self.stack((k + 2) * H, True) for k in range(args.guesses))

    def forward(self, z: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches) -> Tensor:
        """States z [B, T, H] at these positions -> p [B, T, H]. Hydra++ fills its cache.

        The other arguments are those of `Transformer.forward`.
        """
        if self.prefix_layer is None:
            return z
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)
        return self.prefix_norm(self.prefix_layer(z, caches[0], shared))

    def output(self, p: Tensor, tokens: Tensor) -> Tensor:
        """The output of guess k [..., H].

        p [..., H]: what it drafts from. tokens [..., k+1]: the root and the tokens drafted after it.
        """
        k = tokens.shape[-1] - 1
        x = torch.cat((p, self.embed(tokens).flatten(-2)), dim=-1)
        return self.run_stack(self.stacks[k], x, True)
