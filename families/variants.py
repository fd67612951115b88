"""Dense targets that differ from LLaMA in scales, norms or RoPE: Gemma 2 and 3, Granite, OLMo, GLM, SmolLM3.

Each difference is a field of `VariantArgs`, which checkpoint/families.json sets.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import Flag, number, whole
from families.activations import soft_cap
from families.norms import ZeroCenteredNorm
from families.rope import PartialRotaryArgs, scale_pairs
from model import TargetBlock, Transformer

Scale = number(above=0, high=1e6)


@dataclass(frozen=True)
class VariantArgs(PartialRotaryArgs):
    """Shape of a dense target with these options."""

    local_rope_base: number(above=1, high=1e15) | None = None  # of sliding-window layers; not scaled
    query_scalar: Scale | None = None  # scores are divided by its square root; None: head_dim
    scaled_embedding: Flag = False  # embeddings are multiplied by the square root of H
    embedding_factor: Scale = 1.0
    residual_factor: Scale = 1.0  # multiplies outputs of attention and of the MLP
    logit_divisor: Scale = 1.0
    logit_cap: Scale | None = None  # logits become cap * tanh(logits / cap)
    score_cap: Scale | None = None  # the same for attention scores
    zero_centred: Flag = False  # norms multiply by 1 + weight
    output_norms: Flag = False  # outputs of attention and of the MLP are normed
    only_output_norms: Flag = False  # inputs of attention and of the MLP are not normed
    wide_qk_norm: Flag = False  # an RMSNorm over all query heads, and one over all key heads, before RoPE
    unrotated_layers: tuple[whole(0, 1), ...] = ()  # 1: without RoPE

    def __post_init__(self):
        super().__post_init__()
        # Scores are scaled by the square of this factor.
        scale = (self.head_dim / (self.query_scalar or self.head_dim)) ** 0.25
        object.__setattr__(self, "rope_factor", self.rope_factor * scale)

    def constraints(self) -> list[tuple[str, bool, str]]:
        fits = len(self.unrotated_layers) in (0, self.num_layers) and not (
            self.unrotated_layers and self.local_rope_base)
        return [
            *super().constraints(),
            ("unrotated_layers", fits, f"a list of {self.num_layers}, without local_rope_base"),
            ("wide_qk_norm", not (self.wide_qk_norm and self.qk_norm), "false with qk_norm")]

    @property
    def factor_by_layer(self) -> bool:
        return super().factor_by_layer or self.local_rope_base is not None

    @property
    def shardable(self) -> bool:
        """Whether ranks can share it (`kernels.tp`)."""
        return not self.wide_qk_norm

    def embedding_scale(self, dtype: torch.dtype) -> float:
        factor = self.embedding_factor * (self.hidden_size**0.5 if self.scaled_embedding else 1)
        return torch.tensor(factor, dtype=dtype, device="cpu").item()

    def inverse_frequencies(self, length: int = 0) -> Tensor:
        """Return [hd/2] float32, or [2, hd/2] if layers differ: row 1 is for local or unrotated layers."""
        full = super().inverse_frequencies(length)
        if self.unrotated_layers:
            return torch.stack((full, torch.zeros_like(full)))
        if self.local_rope_base is None:
            return full
        local = replace(self, rope_base=self.local_rope_base, rope_scaling=None, local_rope_base=None)
        return torch.stack((full, local.inverse_frequencies()))


class VariantBlock(TargetBlock):
    """A layer of a variant. other_rope: it uses row 1 of `inverse_frequencies`. pair_scaling: number of
    rotary pairs, factor of their cosines and sines.
    """

    def __init__(self, args: VariantArgs, layer: int = 0):
        super().__init__(args, layer)
        H, (q, k) = args.hidden_size, (n * args.head_dim for n in (args.num_heads, args.num_kv_heads))

        def norm(size: int, exists: bool) -> nn.Module:
            return self.Norm(size, args.norm_eps) if exists else nn.Identity()

        self.wo_norm, self.mlp_out_norm = norm(H, args.output_norms), norm(H, args.output_norms)
        if args.only_output_norms:
            self.attn_norm, self.mlp_norm = nn.Identity(), nn.Identity()
        self.q_wide_norm, self.k_wide_norm = norm(q, args.wide_qk_norm), norm(k, args.wide_qk_norm)
        self.widths = q, k, k
        unrotated = bool(args.unrotated_layers and args.unrotated_layers[layer])
        self.other_rope = unrotated or (args.local_rope_base is not None and self.window > 0)
        pairs = (args.rotary_dim or args.head_dim) // 2
        self.pair_scaling = pairs, 1.0 if self.other_rope else args.pair_factor
        self.residual_factor, self.score_cap = args.residual_factor, args.score_cap or 0.0
        self.standard = not (
            args.only_output_norms or args.wide_qk_norm or args.unrotated_layers or args.score_cap
            or args.logit_cap or (args.residual_factor, args.logit_divisor, args.pair_factor) != (1, 1, 1))

    def layer_cos_sin(self, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if angles[0].ndim == 4:
            angles = tuple(x[int(self.other_rope)] for x in angles)
        return scale_pairs(angles, *self.pair_scaling)

    def project(self, x: Tensor) -> Tensor:
        qkv = super().project(x)
        if isinstance(self.q_wide_norm, nn.Identity):
            return qkv
        q, k, v = qkv.split(self.widths, dim=-1)
        return torch.cat((self.q_wide_norm(q.contiguous()), self.k_wide_norm(k.contiguous()), v), dim=-1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """See `Block.attention`."""
        if not self.score_cap:
            return super().attention(q, k, v, bias)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        scores = soft_cap(scores, self.score_cap)
        return (scores + bias).softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.residual_factor * self.wo_norm(self.wo(attended))
        return x + self.residual_factor * self.mlp_out_norm(self.mlp(self.mlp_norm(x), None))


class ZeroCenteredBlock(VariantBlock):
    """A layer of Gemma."""

    Norm = ZeroCenteredNorm


class Variant(Transformer):
    """A variant of LLaMA."""

    Args = VariantArgs
    Layer = property(lambda self: ZeroCenteredBlock if self.args.zero_centred else VariantBlock)

    def logits(self, x: Tensor) -> Tensor:
        return self.cap_logits(super().logits(x))

    def cap_logits(self, logits: Tensor) -> Tensor:
        """Divide and cap the lm_head's outputs [..., V]."""
        return soft_cap(logits / self.args.logit_divisor, self.args.logit_cap)
