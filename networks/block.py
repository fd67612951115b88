"""The heads that draft a whole block in one pass: DFlash, DSpark, and JetSpec's variant. Definitions only.

DFlash: arXiv 2602.06036 (z-lab/dflash). DSpark: arXiv 2607.05147 (deepseek-ai/DeepSpec), a DFlash backbone
with the heads in `networks.markov`. JetSpec (arXiv 2606.18394) is DFlash with a causal block.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import Flag, whole
from head import Head
from model import Block, KVCache, Linear, PassInputs, RMSNorm
from networks.markov import Markov, MarkovArgs


@dataclass(frozen=True, kw_only=True)
class BlockArgs(MarkovArgs):
    """Shape of a head that drafts blocks. Their rows are the anchor, which is the root, then masks."""

    block: whole(1, 256) = 8  # rows of a block, the anchor's included
    from_anchor: Flag = False  # row j drafts the token j+1 places after the anchor; else j places
    causal: Flag = False  # rows of a block see those before them only; in layers with a window they always do

    @property
    def drafts(self) -> int:
        """The number of tokens a block drafts: levels of a tree below the root."""
        return self.block if self.from_anchor else self.block - 1


class BlockLayer(Block):
    """A layer of a block head: rows of a block read the target's features, and each other.

    The keys and values of the features come from the same weights as those of the rows.
    """

    standard = False

    def __init__(self, args: BlockArgs, layer: int):
        super().__init__(args, layer=layer)
        self.attn_norm = RMSNorm(args.hidden_size, args.norm_eps)

    def forward(self, x: Tensor, context: Tensor, cache: KVCache, shared: PassInputs) -> Tensor:
        """Rows x [B, R, H] of a block -> the same after this layer.

        context [B, W, H]: fused features that are not in the cache yet. Positions, slots and sight in
        `shared` are those of context and rows, one after the other.
        """
        inputs = torch.cat((context, self.attn_norm(x)), 1)
        attended = cache.attend(self, self.wqkv(inputs), shared)
        return self.finish(x, attended[:, context.shape[1] :])

    def read(self, context: Tensor, cache: KVCache, shared: PassInputs) -> None:
        """Put the keys and values of fused features [B, C, H] into the cache."""
        cache.attend(self, self.wqkv(context), shared)


class BlockHead(Head, Markov):
    """DFlash's, and what DSpark's has in common with it.

    Row j of a block stands j places after the anchor. It sees the features of all tokens before the anchor
    and all rows of its block; through a window, and in causal heads, only those up to its own. The lm_head
    scores its output.
    """

    Args = BlockArgs

    def __init__(self, args: BlockArgs):
        super().__init__(args)
        self.fc = Linear(args.feature_width, args.hidden_size, bias=args.fc_bias)
        self.hidden_norm = RMSNorm(args.hidden_size, args.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(args, i) for i in range(args.num_layers))
        self.norm = RMSNorm(args.hidden_size, args.norm_eps)
        self.add_markov(args)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, F] -> what every layer reads of them [B, T, H]."""
        return self.hidden_norm(self.fc(features))

    def read(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> None:
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        for layer, cache in zip(self.layers, caches):
            layer.read(feature, cache, shared)

    def forward(
        self, anchor: Tensor, context: Tensor, positions: Tensor, slots: Tensor, visible: Tensor,
        caches: nn.ModuleList, *, before=None,
    ) -> Tensor:
        """One pass over the block that begins with tokens anchor [B] -> its drafting rows [B, drafts, H].

        They are normed. context [B, W, H]: fused features that are not in the caches yet. positions and slots
        [B, W+block], visible [B, W+block, n]: of these and of the block's rows, one after the other.
        before: `visible` of layers with a window, if another: rows do not see those after them.
        """
        shared = near = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        if before is not None:
            near = PassInputs(self.args, self.inv_freq, positions, slots, before)
        x = self.embed(self.block_tokens(anchor))
        for layer, cache in zip(self.layers, caches):
            x = layer(x, context, cache, near if layer.window else shared)
        return self.norm(self.drafting(x))

    def block_tokens(self, anchor: Tensor) -> Tensor:
        """The tokens that the rows of blocks read [..., block], by their anchors [...]."""
        masks = torch.full_like(anchor, self.args.mask_id)[..., None]
        return torch.cat((anchor[..., None], masks.expand(*anchor.shape, self.args.block - 1)), -1)

    def drafting(self, x: Tensor) -> Tensor:
        """The rows that draft [..., drafts, H] of those of blocks [..., block, H]."""
        return x[..., self.args.block - self.args.drafts :, :]


class DSparkHead(BlockHead):
    """DSpark's. Settings cannot tell: it may lack a Markov head, and DFlash's may draft from the anchor."""


def spread_layers(num_layers: int, states: int) -> tuple[int, ...]:
    """The layers whose inputs a block head reads: evenly from the third to the last but one.

    They are those of the published heads: outputs of layers 1, 9, 17, 25, 33 of 36 (z-lab/dflash). Raises
    ValueError if there are too few.
    """
    first, last = min(2, num_layers), max(num_layers - 2, min(2, num_layers))
    steps = max(states - 1, 1)
    layers = tuple(sorted({round(first - 1 + i * (last - first) / steps) + 1 for i in range(states)}))
    if len(layers) < states:
        raise ValueError(f"{states} states of a target of {num_layers} layers: at most {len(layers)}")
    return layers
