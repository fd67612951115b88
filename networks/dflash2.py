"""DFlash2 heads (inco.ai, z-lab/dflash): DFlash with convolutions within a block and a path selector.

A causal convolution mixes the tokens of a block. Its weights are per channel, plus weights per group of
channels that the token computes. The selector keeps the top K tokens of each level and scores pairs of
adjacent tokens.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.schema import whole
from model import KVCache, Linear, PassInputs
from networks.block import BlockArgs, BlockHead, BlockLayer


@dataclass(frozen=True, kw_only=True)
class DFlash2Args(BlockArgs):
    """Shape of a DFlash2 head."""

    conv_taps: whole(1, 64) = 2
    conv_group: whole(1, 2**16) = 16  # channels
    selector_rank: whole(1, 2**16) = 256
    candidates: whole(1, 1024) = 16  # K

    def constraints(self) -> list[tuple[str, bool, str]]:
        full_vocab = self.draft_vocab_size == self.vocab_size
        return [
            *super().constraints(),
            ("conv_group", self.hidden_size % self.conv_group == 0, "a divisor of hidden_size"),
            ("draft_vocab_size", full_vocab, f"vocab_size, {self.vocab_size}, with a selector"),
        ]


class GroupedConvolution(nn.Module):
    """The convolutions before and after attention or MLP. base [2, taps, H]: their weights per channel."""

    def __init__(self, args: DFlash2Args):
        super().__init__()
        self.taps, self.group = args.conv_taps, args.conv_group
        # No parameter: quantization takes those of three dimensions for experts.
        self.register_buffer("base", torch.zeros(2, self.taps, args.hidden_size))
        self.w_kernel = Linear(args.hidden_size, 2 * self.taps * args.hidden_size // self.group, bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, H]. Returns the result and the weights for `after`."""
        kernels = self.w_kernel(x).unflatten(-1, (2, self.taps, -1)).unbind(-3)
        return self._convolve(x, kernels[0], self.base[0]), kernels[1]

    def after(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Convolve x [B, T, H]."""
        return self._convolve(x, kernel, self.base[1])

    def _convolve(self, x: Tensor, kernel: Tensor, base: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for back in range(self.taps):  # token i reads tokens i, i - 1, ...
            weight = base[back].to(x.dtype) + kernel[..., back, :].repeat_interleave(self.group, dim=-1)
            total = total + weight * F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        return total


class DFlash2Layer(BlockLayer):
    """A layer whose attention and MLP have convolutions."""

    def __init__(self, args: DFlash2Args, layer: int):
        super().__init__(args, layer)
        self.attn_conv, self.mlp_conv = GroupedConvolution(args), GroupedConvolution(args)

    def forward(self, x: Tensor, context: Tensor, cache: KVCache, shared: PassInputs) -> Tensor:
        inputs, kernel = self.attn_conv.before(self.attn_norm(x))
        attended = cache.attend(self, self.wqkv(torch.cat((context, inputs), 1)), shared)
        x = x + self.attn_conv.after(self.wo(attended[:, context.shape[1] :].contiguous()), kernel)
        inputs, kernel = self.mlp_conv.before(self.mlp_norm(x))
        return x + self.mlp_conv.after(self.mlp(inputs, None), kernel)


class DFlash2Head(BlockHead):
    """The DFlash2 head."""

    Args, Layer = DFlash2Args, DFlash2Layer

    def __init__(self, args: DFlash2Args):
        super().__init__(args)
        self.w_selector = Linear(args.hidden_size, args.selector_rank, bias=False)
        self.before, self.following = (nn.Embedding(args.vocab_size, args.selector_rank) for _ in range(2))

    def pair_scores(self, hidden: Tensor, tokens: Tensor, candidates: Tensor) -> Tensor:
        """Score candidates [B, 1, K] after tokens [B, R] -> float32 [B, R, K], to add to their logits.

        hidden [B, 1, H]: what the lm_head reads for the candidates.
        """
        gate = self.before(tokens).float() * self.w_selector(hidden).float()
        return gate @ self.following(candidates[:, 0]).float().transpose(1, 2)
