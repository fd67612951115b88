"""Medusa and Hydra heads: several tokens guessed from one state. Definitions only.

Both read z, the target's last state after the final norm, at the last committed token. Guess k (from 0) is
for the token k+1 places after the root. Medusa's guesses do not read each other (Cai et al., arXiv
2401.10774; tensors and formulas: FasterDecoding/Medusa medusa_model.py). Hydra's read the
tokens drafted before (Ankner et al., arXiv 2402.05109; zankner/Hydra prefix_mlp_head.py and mlp_head.py).
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.schema import Flag, whole
from head import Head, HeadArgs
from model import KVCaches, Linear, Pass, RMSNorm, TargetBlock, project


@dataclass(frozen=True, kw_only=True)
class MultiTokenArgs(HeadArgs):
    """Shape of Medusa or Hydra heads; sizes of attention and MLP are those of Hydra++'s layer."""

    guesses: whole(1, 64) = 4  # K
    blocks: whole(1, 64) = 1  # residual blocks of each guess; Hydra's first block narrows
    repeated: Flag = False  # all blocks (Hydra: all but the first) are one, applied again and again
    lm_head_each: Flag = False  # else all guesses share one: own (`own_lm_head`) or the target's
    lm_head_bias: Flag = False
    prefix: Flag = False  # Hydra++

    @property
    def drafts(self) -> int:
        """The number of tokens that are guessed: levels of a tree below the root."""
        return self.guesses


class ResidualBlock(nn.Module):
    """x + silu(linear(x)), the sum on a learned projection of x where the width changes."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = Linear(inputs, outputs, bias=True)
        self.skip = Linear(inputs, outputs, bias=True) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.skip is None else self.skip(x)) + F.silu(self.linear(x))


class Stack(nn.ModuleList):
    """The residual blocks of one guess. The first narrows its input to H, if that is wider."""

    def __init__(self, args: MultiTokenArgs, inputs: int):
        narrowing = int(inputs != args.hidden_size)
        rest = args.blocks - narrowing
        sizes = [inputs] * narrowing + [args.hidden_size] * (min(rest, 1) if args.repeated else rest)
        super().__init__(ResidualBlock(size, args.hidden_size) for size in sizes)
        self.again = rest - 1 if args.repeated else 0  # times that the last one is applied once more

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> the guess's output [..., H]."""
        for block in self:
            x = block(x)
        for _ in range(self.again):
            x = self[-1](x)
        return x


class MultiTokenHeads(Head):
    """The base of Medusa and Hydra heads."""

    Args = MultiTokenArgs
    reads_normed = True

    def __init__(self, args: MultiTokenArgs):
        super().__init__(args)
        H, V = args.hidden_size, args.draft_vocab_size
        count = args.guesses if args.lm_head_each else 0
        self.lm_heads = nn.ModuleList(Linear(H, V, bias=args.lm_head_bias) for _ in range(count))

    def caches(
        self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCaches | None:
        return super().caches(batch, slots, dtype, device) if self.args.prefix else None

    def guess_logits(self, h: Tensor, k: int) -> Tensor:
        """Output of guess k [..., H] -> float32 logits [..., Vd]."""
        if not self.args.lm_head_each:
            return project(self.lm_head, h)
        return self.lm_heads[k].logits(h)


class MedusaHeads(MultiTokenHeads):
    """K stacks of residual blocks side by side."""

    def __init__(self, args: MultiTokenArgs):
        super().__init__(args)
        self.stacks = nn.ModuleList(Stack(args, args.hidden_size) for _ in range(args.guesses))

    def logits(self, feature: Tensor) -> Tensor:
        """z [..., H] -> float32 logits of all guesses [..., K, Vd]."""
        outputs = [stack(feature) for stack in self.stacks]
        if not self.args.lm_head_each:
            return project(self.lm_head, torch.stack(outputs, -2))
        return torch.stack([self.guess_logits(h, k) for k, h in enumerate(outputs)], -2)


class HydraHeads(MultiTokenHeads):
    """Guess k reads p, the root and k drafted tokens.

    p is z; Hydra++ has a layer that makes p of all z so far.
    """

    def __init__(self, args: MultiTokenArgs):
        super().__init__(args)
        H = args.hidden_size
        self.prefix_layer = TargetBlock(args) if args.prefix else None
        self.prefix_norm = RMSNorm(H, args.norm_eps) if args.prefix else None
        self.stacks = nn.ModuleList(Stack(args, (k + 2) * H) for k in range(args.guesses))

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        """States z [B, T, H] -> p [B, T, H]. Hydra++ fills its cache."""
        if self.prefix_layer is None:
            return feature
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)
        return self.prefix_norm(self.prefix_layer(feature, caches[0], shared))

    def output(self, p: Tensor, tokens: Tensor) -> Tensor:
        """The output of guess k [..., H].

        p [..., H]: what it drafts from. tokens [..., k+1]: the root and the tokens drafted after it.
        """
        k = tokens.shape[-1] - 1
        x = torch.cat((p, self.embed(tokens).flatten(-2)), dim=-1)
        return self.stacks[k](x)
