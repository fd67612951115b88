"""Target features of the training data, computed on demand and cached in memory."""
from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from checkpoint.folder import weights_fingerprint
from common.writing import digest
from families.mixed import causal
from kernels import isa
from kernels.quantized import QuantizedLinear
from model import Embedding, Linear, Transformer


class TargetStates(NamedTuple):
    """Hidden states of the target on rows [B, T], or on one row [n]. States of padding are undefined."""

    features: Tensor  # inputs of the auxiliary layers, concatenated [..., F]
    normed: Tensor  # last hidden state after the final norm [..., H]


class Features:
    """Computes and caches the target's hidden states of rows.

    Rows are not batched, so that a resumed run computes the same features. cache_bytes: size of the cache.
    dtype: of the cached states. read_dtype: of the result of `read`. Both default to the target's. identity:
    of the target (`checkpoint.folder`).
    """

    def __init__(
        self, target: Transformer, aux_layers: tuple[int, ...], *, cache_bytes: float = 0,
        dtype: torch.dtype | None = None, read_dtype: torch.dtype | None = None, identity: str = "",
    ):
        self.target, self.aux_layers, self.free_bytes = target, aux_layers, cache_bytes
        self.device, own_dtype = target.embed.device, target.embed.dtype
        self.dtype, self.read_dtype = dtype or own_dtype, read_dtype or own_dtype
        self.cached, self.shared = {}, {}  # states by `digest` of the ids
        self.identity = identity or weights_fingerprint(target)

    def read(self, rows: Iterable[dict]) -> TargetStates:
        """Return the states of rows, padded to one length [B, T, ...], on the target's device."""
        parts = []
        for row in rows:
            parts.append([x.to(self.device, non_blocking=True) for x in self._states(row["ids"])])
        return TargetStates(*(pad_sequence(xs, batch_first=True).to(self.read_dtype) for xs in zip(*parts)))

    def share(self, rows: Iterable[dict]) -> None:
        """Compute the states of a step's rows on all ranks of a sharded target, for `read` on any of them."""
        if self.target.ranks:
            self.shared = {}
            self.shared = {digest(row["ids"]): self._states(row["ids"]) for row in rows}

    def _states(self, ids: list[int]) -> list[Tensor] | TargetStates:
        key = digest(ids)
        states = self.cached.get(key, self.shared.get(key))
        if states is None:
            states = self.compute(ids)
            if self.free_bytes > 0:
                self.cached[key] = [x.to("cpu", copy=True) for x in states]
                self.free_bytes -= sum(x.numel() * x.element_size() for x in states)
        return states

    @torch.no_grad()
    def compute(self, ids: list[int]) -> TargetStates:
        """Return the states [n, ...] of a row of token ids, in `dtype`."""
        x, features = causal(self.target, torch.tensor([ids], device=self.device), self.aux_layers)
        states = x[..., :0] if features is None else features, self.target.norm(x)
        return TargetStates(*(x[0].to(self.dtype) for x in states))


def training_copy(target: Transformer) -> Transformer:
    """Return the target, or a float32 copy if this CPU multiplies float32 faster than bfloat16.

    That holds for processors without bfloat16 instructions, and for Intel's with AVX512-BF16 but no AMX.
    """
    on_gpu, features = target.embed.device.type == "cuda", isa.features()
    fast_bf16 = "amx_bf16" in features or (features & {"avx512_bf16", "bf16"} and isa.vendor() != isa.INTEL)
    if on_gpu or fast_bf16:
        return target
    return copy.deepcopy(target).float() if target.embed.dtype != torch.float32 else target


def without_layers(target: Transformer) -> Transformer:
    """Return the target without its layers: embedding, final norm and lm_head, dequantized."""
    outer, dtype = copy.copy(target), target.embed.dtype
    outer._modules = target._modules | {"layers": nn.ModuleList()}
    for name, layer in (("embed", target.embed), ("lm_head", target.lm_head)):
        if isinstance(layer, QuantizedLinear):
            dequantized = (Embedding if name == "embed" else Linear)(1, 1, device="meta")
            dequantized.weight = nn.Parameter(layer.dequantize(dtype), requires_grad=False)
            dequantized.bias = None
            setattr(outer, name, dequantized)
    return outer
