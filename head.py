"""Draft heads of EAGLE-1/2 and EAGLE-3 as published, and the interface of all draft heads.

Other heads subclass these in `networks/` (`extensions.HEADS`).
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
import torch.nn as nn
from pydantic import Field
from torch import Tensor

from common.schema import Flag, IdCount, Width, whole
from model import Block, Embedding, KVCaches, Linear, ModelArgs, PassInputs, RMSNorm, TargetBlock, Transformer


@dataclass(frozen=True, kw_only=True)
class HeadArgs(ModelArgs):
    """The shape of a draft head. `vocab_size` is the target's; the RoPE is the head's own."""

    draft_vocab_size: IdCount
    target_hidden_size: Width
    # Target layers whose *input* residual stream feeds the head (0-based, ascending; L: the last output).
    aux_layers: Annotated[tuple[whole(0, 10_000), ...], Field(min_length=1, max_length=1000)]
    fc_bias: Flag = False
    own_embedding: Flag = False  # else the target's table is used
    own_lm_head: Flag = True  # else the target's, or, where `tie_embeddings`, the head's own embedding
    draft_window: whole(0) = 0  # default attention window: its longest training sequence; 0: unknown

    drafts = None  # maximum number of tree levels that the head was trained for; None: any

    def constraints(self) -> list[tuple[str, bool, str]]:
        ascending, ids = all(low < high for low, high in pairwise(self.aux_layers)), self.vocab_size
        return [
            *super().constraints(),
            ("draft_vocab_size", self.draft_vocab_size <= ids, f"at most vocab_size, {ids}"),
            ("aux_layers", ascending, "ascending layers"),
        ]

    @property
    def feature_width(self) -> int:
        """F, the width of the target's features: one hidden state per captured layer."""
        return len(self.aux_layers) * self.target_hidden_size


class Head(nn.Module):
    """Base class of draft heads.

    At position i it reads the feature of token i and the embedding of token i+1, and predicts token i+2. The
    target's features go through `fuse` once. From the second draft step on, the head reads its own output
    instead. Weights that a checkpoint lacks (`HeadArgs.own_...`) are the target's: `use_target` shares them.

    Args, Caches: classes of its shape and KV caches. backend: the `Backend` it was prepared for, or None.
    reads_normed: its features are the target's last hidden states after the final norm.
    """

    Args, Caches, backend, reads_normed = HeadArgs, KVCaches, None, False

    def __init__(self, args: HeadArgs):
        super().__init__()
        H, Vd = args.hidden_size, args.draft_vocab_size
        self.args, self.target_norm = args, None
        self.embed = Embedding(args.vocab_size, H) if args.own_embedding else None
        self.lm_head = Linear(H, Vd, bias=False) if args.own_lm_head else None
        # Target id of each draft id [Vd], ascending; the identity when both vocabularies are the same.
        self.register_buffer("draft_ids", torch.arange(Vd, device="cpu"))
        self.register_buffer("inv_freq", args.inverse_frequencies(), persistent=False)

    def use_target(self, target: Transformer) -> None:
        """Share the target's embedding, lm_head and final norm where the head has none of its own."""
        if self.lm_head is None:
            tied = self.args.tie_embeddings and self.embed is not None
            self.lm_head = self.embed if tied else target.output_layer
        if self.embed is None:
            self.embed = target.embed
        if self.reads_normed:
            self.target_norm = target.norm

    def set_sliding_window(self, tokens: int) -> None:
        """Set the sliding window of all layers, in tokens; 0: none. Call it before `Backend.prepare`."""
        for block in self.modules():
            if isinstance(block, Block):
                block.window = tokens

    def caches(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> KVCaches:
        """Allocate a KV cache for every layer of the head."""
        return self.Caches.allocate(self.args, batch, slots, dtype, device, self.backend)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, F] -> head features [B, T, H]."""
        return self.target_norm(features)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        """Run one pass over tokens [B, T] with features [B, T, H] -> the features to feed back [B, T, H].

        The other arguments are those of `Transformer.forward`, for the head's own caches.
        """
        raise NotImplementedError

    def prefill(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> None:
        """Write keys and values of prompt tokens to the caches. Arguments as for `forward`."""
        self(tokens, feature, positions, slots, visible, caches)

    def logits(self, feature: Tensor) -> Tensor:
        """Output of `forward` [..., H] -> float32 draft logits [..., Vd]; draft id j is `draft_ids[j]`."""
        return self.lm_head.logits(feature)


class Eagle1Head(Head):
    """The head of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, section 4.1; SafeAILab/EAGLE model/cnets1.py).

    It predicts the target's hidden states after the final norm; the target's lm_head gives its logits. Its
    only layer has no input norm: the output of `fc` is both its input and its residual stream.
    """

    reads_normed = True

    def __init__(self, args: HeadArgs):
        super().__init__(args)
        self.fc = Linear(2 * args.hidden_size, args.hidden_size, bias=args.fc_bias)
        self.layer = Block(args)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        x = self.fc(torch.cat((self.embed(tokens), feature), dim=-1))
        return self.layer(x, caches[0], shared)


class Eagle3Block(Block):
    """The first layer of an EAGLE-3 head: attention reads embedding and feature concatenated (2H)."""

    def __init__(self, args: HeadArgs):
        super().__init__(args, input_size=2 * args.hidden_size)
        self.embed_norm = RMSNorm(args.hidden_size, args.norm_eps)
        self.feature_norm = RMSNorm(args.hidden_size, args.norm_eps)

    def inputs(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and features [B, T, H] -> attention's input [B, T, 2H], residual stream [B, T, H]."""
        return torch.cat((self.embed_norm(embedded), self.feature_norm(feature)), dim=-1), feature


class Eagle3Head(Head):
    """The head of EAGLE-3 (arXiv 2503.01840, section 3; SafeAILab/EAGLE model/cnets.py).

    fused: a backend's kernel for `forward`, called with this head and the arguments. feeds_residual: a
    draft step reads the residual stream of the previous one, not its norm.
    """

    Layer, fused, feeds_residual = Eagle3Block, None, True

    def __init__(self, args: HeadArgs):
        super().__init__(args)
        self.fc = Linear(args.feature_width, args.hidden_size, bias=args.fc_bias)
        self.layer = self.Layer(args)
        self.more_layers = nn.ModuleList(TargetBlock(args, i) for i in range(1, args.num_layers))
        self.norm = RMSNorm(args.hidden_size, args.norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        if self.fused is not None:
            return self.fused(self, tokens, feature, positions, slots, visible, caches)
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        inputs, x = self.layer.inputs(self.embed(tokens), feature)
        x = self.layer(x, caches[0], shared, inputs)
        for i, layer in enumerate(self.more_layers, 1):
            x = layer(x, caches[i], shared)
        return x

    def logits(self, feature: Tensor) -> Tensor:
        return self.lm_head.logits(self.norm(feature))
