"""Gemma 3: output norms, zero-centered norms, scaled embeddings, and a local RoPE base."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from common.schema import number
from families.norms import ZeroCenteredNorm
from model import ModelArgs, TargetBlock, Transformer


@dataclass(frozen=True)
class Gemma3Args(ModelArgs):
    """The shape of a Gemma 3 target."""

    local_rope_base: number(above=1, high=1e15) | None = None  # of sliding-window layers, if different
    query_scalar: number(above=0, high=1e6) | None = None  # scores / its square root; None: head_dim
    scaled_embedding: Literal[True] = True  # embeddings are multiplied by the square root of H
    zero_centred: Literal[True] = True  # norms multiply by 1 + weight
    output_norms: Literal[True] = True  # outputs of attention and of the MLP are normed

    def __post_init__(self):
        super().__post_init__()
        # Scores are scaled by the square of this factor.
        scale = (self.head_dim / (self.query_scalar or self.head_dim)) ** 0.25
        object.__setattr__(self, "rope_factor", self.rope_factor * scale)

    def relations(self) -> list[tuple[str, bool, str]]:
        one_factor = self.local_rope_base is None or self.rope_type not in ("yarn", "divisors")
        words = "null: rope_scaling has a factor of cos and sin"
        return [*super().relations(), ("local_rope_base", one_factor, words)]

    def embedding_scale(self, dtype: torch.dtype) -> float:
        return torch.tensor(self.hidden_size**0.5, dtype=dtype, device="cpu").item()

    def inverse_frequencies(self, length: int = 0) -> Tensor:
        """Return [hd/2] float32; with a `local_rope_base` [2, hd/2], the local ones second."""
        usual = super().inverse_frequencies(length)
        if self.local_rope_base is None:
            return usual
        local = replace(self, rope_base=self.local_rope_base, rope_scaling=None, local_rope_base=None)
        return torch.stack((usual, local.inverse_frequencies()))


class Gemma3Block(TargetBlock):
    """A layer of Gemma 3."""

    Norm = ZeroCenteredNorm

    def __init__(self, args: Gemma3Args, layer: int = 0):
        super().__init__(args, layer)
        self.wo_norm = self.Norm(args.hidden_size, args.norm_eps)
        self.mlp_out_norm = self.Norm(args.hidden_size, args.norm_eps)

    def layer_angles(self, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return angles if angles[0].ndim == 3 else tuple(x[int(self.window > 0)] for x in angles)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.wo_norm(self.wo(attended))
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x), None))


class Gemma3(Transformer):
    """A Gemma 3 target."""

    Args, Layer = Gemma3Args, Gemma3Block
