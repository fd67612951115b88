"""Heads that draft a block in one pass: DFlash, DSpark, JetSpec.

DFlash: arXiv 2602.06036 (z-lab/dflash). DSpark: arXiv 2607.05147 (deepseek-ai/DeepSpec), a DFlash backbone
with the heads in `networks.markov`. JetSpec (arXiv 2606.18394) is DFlash with a causal block.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.schema import Flag, number, whole
from families.activations import soft_cap
from head import Head
from model import Block, KVCache, Linear, PassInputs, RMSNorm
from networks.markov import Markov, MarkovArgs


@dataclass(frozen=True, kw_only=True)
class BlockArgs(MarkovArgs):
    """Shape of a block head. A block is the anchor (the root) followed by mask tokens."""

    block: whole(1, 256) = 8  # tokens of a block, anchor included
    from_anchor: Flag = False  # token j drafts position j+1 after the anchor; else position j
    causal: Flag = False  # causal attention within a block
    windows_ahead: Flag = False  # layers with a sliding window also attend to later tokens of the block
    own_mask: Flag = False  # the mask token has its own embedding, `mask_embedding`
    logit_factor: number(above=0, high=1e6) = 1.0
    logit_cap: number(above=0, high=1e6) | None = None  # logits become cap * tanh(logits / cap)

    @property
    def drafts(self) -> int:
        """The number of draft tokens of a block: levels of a tree below the root."""
        return self.block if self.from_anchor else self.block - 1


class BlockLayer(Block):
    """A layer of a block head: tokens of a block attend to the target's features and to the block.

    `wqkv` computes the keys and values of both. span: the sliding window if it also looks ahead, applied by
    the mask; 0: none.
    """

    standard = False

    def __init__(self, args: BlockArgs, layer: int):
        super().__init__(args, layer=layer)
        self.span, self.window = (self.window, 0) if args.windows_ahead else (0, self.window)
        self.attn_norm = RMSNorm(args.hidden_size, args.norm_eps)

    def forward(self, x: Tensor, context: Tensor, cache: KVCache, shared: PassInputs) -> Tensor:
        """x [B, R, H] of a block -> [B, R, H].

        context [B, W, H]: fused features that are not in the cache yet. Positions, slots and mask in `shared`
        are of the context followed by the block.
        """
        inputs = torch.cat((context, self.attn_norm(x)), 1)
        attended = cache.attend(self, self.project(inputs), shared)
        return self.finish(x, attended[:, context.shape[1] :])

    def prefill(self, context: Tensor, cache: KVCache, shared: PassInputs) -> None:
        """Write the keys and values of fused features [B, C, H] to the cache."""
        cache.attend(self, self.project(context), shared)


class BlockHead(Head, Markov):
    """The DFlash head, and the base class of DSpark's.

    Token j of a block is at position j after the anchor. It attends to the features of all tokens before the
    anchor and to its block: in causal heads and, by default, in layers with a window, only up to itself.
    """

    Args, Layer = BlockArgs, BlockLayer

    def __init__(self, args: BlockArgs):
        super().__init__(args)
        self.fc = Linear(args.feature_width, args.hidden_size, bias=args.fc_bias)
        self.hidden_norm = RMSNorm(args.hidden_size, args.norm_eps)
        self.layers = nn.ModuleList(self.Layer(args, i) for i in range(args.num_layers))
        self.norm = RMSNorm(args.hidden_size, args.norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(args.hidden_size)) if args.own_mask else None
        self.add_markov(args)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, F] -> the context of every layer [B, T, H]."""
        return self.hidden_norm(self.fc(features))

    def prefill(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> None:
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        for layer, cache in zip(self.layers, caches):
            layer.prefill(feature, cache, shared)

    def forward(
        self, anchor: Tensor, context: Tensor, positions: Tensor, slots: Tensor, visible: Tensor,
        caches: nn.ModuleList, *, causal=None,
    ) -> Tensor:
        """Run the block of anchor tokens [B] -> normed outputs of its drafting tokens [B, drafts, H].

        context [B, W, H]: fused features that are not in the caches yet. positions and slots [B, W+block],
        visible [B, W+block, n]: of the context followed by the block. causal: the causal mask of layers with
        a sliding window, if `visible` is bidirectional.
        """
        shared = windowed = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        if causal is not None:
            windowed = PassInputs(self.args, self.inv_freq, positions, slots, causal)
        if span := max(layer.span for layer in self.layers):
            visible = visible if isinstance(visible, Tensor) else visible.dense()
            position_of = torch.arange(visible.shape[-1], device=slots.device).expand(len(slots), -1)
            position_of = position_of.scatter(1, slots, positions)  # a committed token's slot is its position
            near = position_of[:, None] > positions[..., None] - span
            windowed = PassInputs(self.args, self.inv_freq, positions, slots, visible & near)
        x = self.block_inputs(anchor)
        for layer, cache in zip(self.layers, caches):
            x = layer(x, context, cache, windowed if layer.window or layer.span else shared)
        return self.norm(self.draft_rows(x))

    def block_inputs(self, anchor: Tensor) -> Tensor:
        """Return the embeddings of blocks [..., block, H] of anchors [...]."""
        x = self.embed(F.pad(anchor[..., None], (0, self.args.block - 1), value=self.args.mask_id))
        if self.mask_embedding is not None:
            x[..., 1:, :] = self.mask_embedding
        scale = self.args.embedding_scale(x.dtype)
        return x if scale == 1 else x * scale

    def logits(self, feature: Tensor) -> Tensor:
        logits, factor = super().logits(feature), self.args.logit_factor
        return soft_cap(logits if factor == 1 else logits * factor, self.args.logit_cap)

    def draft_rows(self, x: Tensor) -> Tensor:
        """Return the drafting tokens [..., drafts, H] of blocks [..., block, H]."""
        return x[..., self.args.block - self.args.drafts :, :]


class DSparkHead(BlockHead):
    """The DSpark head. The type is not implied by options: the Markov head is optional."""


def evenly_spaced_layers(num_layers: int, states: int) -> tuple[int, ...]:
    """Return `states` layers whose inputs a block head reads, evenly spaced from layer 2 to num_layers - 2.

    As published: inputs of layers 2, 10, 18, 26, 34 of 36, which are outputs of 1, 9, 17, 25, 33
    (z-lab/dflash). Raises ValueError if there are too few layers.
    """
    first, last = min(2, num_layers), max(num_layers - 2, min(2, num_layers))
    steps = max(states - 1, 1)
    layers = tuple(sorted({round(first - 1 + i * (last - first) / steps) + 1 for i in range(states)}))
    if len(layers) < states:
        raise ValueError(f"{states} states: a target of {num_layers} layers has at most {len(layers)}")
    return layers
