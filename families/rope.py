"""RoPE scaled by linear interpolation, YaRN (arXiv 2309.00071), or a divisor for each frequency.

`divisors` holds llama3 scaling as GGUF stores it (`rope_freqs.weight`), and longrope (arXiv 2402.13753),
which has a second list for sequences beyond the original length.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import NotRequired

from common.schema import Flag, number, whole
from model import Factor, Length, ModelArgs

Divisors = Annotated[list[Factor], Field(min_length=1, max_length=2**15)]
FIELDS = {  # of `rope_scaling`, by type
    "linear": {"factor": Factor},
    "yarn": {
        "factor": Factor, "original_max_position_embeddings": Length,
        **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), NotRequired[Factor | None]),
        **dict.fromkeys(("mscale", "mscale_all_dim"), NotRequired[number(0, 1e6) | None]),
        "truncate": NotRequired[Flag | None],
    },
    "divisors": {
        "divisors": Divisors, "attention_factor": NotRequired[Factor | None],
        "long_divisors": NotRequired[Divisors], "original_max_position_embeddings": NotRequired[Length],
    },
}


def frequencies(args: ModelArgs, freq: Tensor, length: int) -> Tensor:
    """Scale inverse frequencies [hd/2] for sequences of up to `length` tokens."""
    scaling = args.rope_scaling
    if args.rope_type == "linear":
        return freq / float(scaling["factor"])
    if args.rope_type == "divisors":
        divisors = scaling["long_divisors" if length > args.short_length else "divisors"]
        return freq / torch.tensor(divisors, dtype=torch.float32, device="cpu")
    return _yarn(scaling, args, freq)


def _yarn(scaling: dict, args: ModelArgs, freq: Tensor) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and blend those between."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])

    def pair(rotations: float) -> float:  # the pair that rotates this often in the original context
        return args.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(args.rope_base))

    low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, args.head_dim - 1)
    pairs = torch.arange(args.head_dim // 2, device="cpu")
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return ramp * freq / factor + (1 - ramp) * freq


def attention_factor(args: ModelArgs) -> float:
    """Return the factor of cos and sin of YaRN (section 3.4 of its paper) and longrope."""
    scaling = args.rope_scaling
    if args.rope_type == "linear":
        return 1.0
    if scaling.get("attention_factor") is not None or args.rope_type == "divisors":
        return float(scaling.get("attention_factor") or 1)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def short_length(args: ModelArgs) -> float:
    """Return the maximum length of longrope's short divisors; infinity without longrope."""
    scaling = args.rope_scaling
    return scaling["original_max_position_embeddings"] if "long_divisors" in scaling else math.inf


@dataclass(frozen=True)
class PartialRotaryArgs(ModelArgs):
    """The shape of a target that may rotate only some dimensions of a head.

    They are pairs (j, j + hd/2) with j < rotary_dim / 2. pair_factor multiplies their cosines and sines,
    `rope_factor` those of all pairs.
    """

    rotary_dim: whole(0, 2**16) = 0  # dimensions of a head with RoPE; 0: all

    def __post_init__(self):
        super().__post_init__()
        factors = (self.rope_factor, 1.0) if self.factor_by_layer else (1.0, self.rope_factor)
        for name, factor in zip(("pair_factor", "rope_factor"), factors):
            object.__setattr__(self, name, factor)

    @property
    def factor_by_layer(self) -> bool:
        """Whether the factor of cosines and sines differs between pairs or layers."""
        return self.rotary_dim > 0

    @property
    def _rotary(self) -> PartialRotaryArgs:
        """The shape of the rotary part of a head."""
        return replace(self, head_dim=self.rotary_dim, rotary_dim=0) if self.rotary_dim else self

    def constraints(self) -> list[tuple[str, bool, str]]:
        fits = ("rotary_dim", self.rotary_dim <= self.head_dim, f"at most head_dim, {self.head_dim}")
        return [*super(PartialRotaryArgs, self._rotary).constraints(), fits]

    def inverse_frequencies(self, length: int = 0) -> Tensor:
        rotary = super(PartialRotaryArgs, self._rotary).inverse_frequencies(length)
        return F.pad(rotary, (0, self.head_dim // 2 - len(rotary)))  # 0: no rotation


def scale_pairs(
    angles: tuple[Tensor, Tensor], pairs: int, factor: float
) -> tuple[Tensor, Tensor]:
    """Multiply cosines and sines [B, T, hd/2] of the first pairs by a factor."""
    if factor == 1:
        return angles
    return tuple(torch.cat((x[..., :pairs] * factor, x[..., pairs:]), dim=-1) for x in angles)
