"""The base of the draft heads: their shape and interface. Definitions only."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import torch
import torch.nn as nn
from pydantic import Field
from torch import Tensor

from common.schema import Flag, Ids, Width, whole
from model import Block, KVCaches, Linear, ModelArgs, Transformer, blank, project


@dataclass(frozen=True, kw_only=True)
class HeadArgs(ModelArgs):
    """The shape of a draft head. `vocab_size` is the target's; the RoPE is the head's own."""

    draft_vocab_size: Ids
    target_hidden_size: Width
    # Target layers whose *input* residual stream feeds the head (0-based, ascending; L: the last output).
    aux_layers: Annotated[tuple[whole(0, 10_000), ...], Field(min_length=1, max_length=1000)]
    fc_bias: Flag = False
    own_embedding: Flag = False  # else the target's table is used
    own_lm_head: Flag = True  # else the target's, or, where `tie_embeddings`, the head's own embedding
    # EAGLE-3.1, before fc: "" none, "each" captured state has its own norm, "all" share a wide one.
    feature_norm: Literal["", "each", "all"] = ""
    norm_before_residual: Flag = False  # the residual stream starts from the normed feature
    recycle_normed: Flag = False  # EAGLE-3.1 norm_output: the next step is fed norm(h), not h

    # Tokens of the longest text that it was trained on, 0: unknown. See --draft-window.
    draft_window: whole(0) = 0

    drafts = None  # levels of a tree that it can draft; None: any number

    def relations(self) -> list[tuple[str, bool, str]]:
        ascending, ids = all(low < high for low, high in pairwise(self.aux_layers)), self.vocab_size
        return [
            *super().relations(),
            ("draft_vocab_size", self.draft_vocab_size <= ids, f"at most vocab_size, {ids}"),
            ("aux_layers", ascending, "ascending layers"),
        ]

    @property
    def feature_width(self) -> int:
        """F, the width of what the target hands to the head: one hidden state per captured layer."""
        return len(self.aux_layers) * self.target_hidden_size


class Head(nn.Module):
    """The base of the draft heads.

    Drafters call `fuse`, `read`, `forward`, `logits`, `draft_ids` and `caches`.
    Row i pairs the feature of token i with the embedding of token i+1 and predicts token i+2. Features of the
    target go through `fuse` once; from the second drafted token on the head's own output is fed back in their
    place. Weights that a checkpoint lacks (`HeadArgs.own_...`) are the target's: `use_target` shares them.
    """

    Args = HeadArgs
    Caches = KVCaches  # the class of its caches
    backend = None  # that it was prepared for, see `kernels.backend`
    reads_normed = False  # its features are the target's last states after the final norm

    def __init__(self, args: HeadArgs):
        super().__init__()
        self.args, self.target_norm = args, None
        self.embed = nn.Embedding(args.vocab_size, args.hidden_size) if args.own_embedding else None
        self.lm_head = Linear(
            args.hidden_size, args.draft_vocab_size, bias=False
        ) if args.own_lm_head else None
        # Target id of each draft id, ascending; the identity when both vocabularies are the same.
        self.register_buffer("draft_ids", torch.arange(args.draft_vocab_size, device="cpu"))
        self.register_buffer("inv_freq", args.inverse_frequencies(), persistent=False)

    def use_target(self, target: Transformer) -> None:
        """Share the target's embedding table and lm_head where the checkpoint carries none."""
        if self.lm_head is None:
            tied = self.embed if self.args.tie_embeddings and self.embed is not None else None
            self.lm_head = tied or (target.embed if target.lm_head is None else target.lm_head)
        if self.embed is None:
            self.embed = target.embed
        if self.reads_normed:
            self.target_norm = target.norm

    def attend_to(self, tokens: int) -> None:
        """Attend to the last `tokens` tokens alone, 0: all. Call it before the head is put on a backend."""
        for block in self.modules():
            if isinstance(block, Block):
                block.window = tokens

    def own_state(self) -> dict[str, Tensor]:
        """The state dict without what `use_target` handed over."""
        with blank():
            names = type(self)(self.args).state_dict()
        return {name: t for name, t in self.state_dict().items() if name in names}

    def twin(self, target: Transformer, dtype: torch.dtype) -> Head:
        """A copy with weights of its own in this dtype, on the target's device. The target lends the rest."""
        with blank():
            head = type(self)(self.args)
        device = target.embed.weight.device
        cast = {
            name: t.detach().to(device, dtype if t.is_floating_point() else None, copy=True)
            for name, t in self.own_state().items()
        }
        head.load_state_dict(cast, assign=True)
        head.inv_freq = self.inv_freq.to(device)
        head.requires_grad_(False)
        head.use_target(target)
        return head

    def caches(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> KVCaches:
        """Allocate a cache for every layer of the head."""
        return self.Caches.of(self.args, batch, slots, dtype, device, self.backend)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, F] -> head features [B, T, H]."""
        return self.target_norm(features)

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ):
        """One pass over tokens [B, T] with their features [B, T, H]: the features to feed back [B, T, H].

        The other arguments are those of `Transformer.forward`, for the head's own caches.
        """
        raise NotImplementedError

    def read(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> None:
        """Put keys and values of rows of a prompt into the caches. The arguments are those of `forward`."""
        self(tokens, feature, positions, slots, visible, caches)

    def logits(self, feature: Tensor) -> Tensor:
        """Output of `forward` [..., H] -> float32 draft logits [..., Vd].

        Draft id j is target id `draft_ids[j]`.
        """
        return project(self.lm_head, feature)


def eagle3_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs feed an EAGLE-3 head unless its config says otherwise: low, middle, high.

    Inputs of layers 2, L//2 and L-3 (SafeAILab/EAGLE, modeling_llama_kv.py); SpecForge writes the same states
    as "outputs of layers 1, L//2-1, L-4".
    """
    return 2, num_layers // 2, num_layers - 3


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
