"""Backend and step on GPUs: Triton kernels for attention, KV caches, quantized products, experts and ranking.

`kernels.gpu.cache` has attention, `kernels.gpu.products` products with quantized weights, `kernels.gpu.dense`
the pass of a 16-bit target over few tokens, `kernels.gpu.experts` mixtures of experts and `kernels.gpu.delta`
Gated DeltaNet layers. cuBLAS computes other products, inductor compiles the rest.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

import extensions
from engine.graphs import materialize
from engine.step import Backend, Step
from head import Head
from kernels.gpu import dense, experts, products, sampling
from kernels.gpu.cache import Float8LayerCaches, LayerCaches, TreeMask
from kernels.gpu.fallback import disabled, with_fallback
from model import Transformer
from tree import gather_tokens


class CudaStep(Step):
    """The operations of a step that have Triton kernels or that inductor compiles badly."""

    reads_length = property(lambda self: "attend" not in disabled)

    def mask(self, slots: Tensor, length: Tensor, local: Tensor) -> TreeMask:
        return TreeMask(slots, length, materialize(local.contiguous()))

    def causal_mask(self, slots: Tensor, start: Tensor, count: int) -> TreeMask:
        token = torch.arange(count, device=slots.device)
        return TreeMask(slots, start, materialize((token <= token[:, None]).repeat(len(start), 1, 1)))

    @with_fallback("rank", Step.rank)
    def rank(
        self, logits: Tensor, noise: Tensor | None, k: int, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores, index = sampling.top_k(logits, noise, k)
        return scores, index if ids is None else ids[index]

    def draw(self, logits: Tensor, noise: Tensor | None, depth: Tensor | None = None) -> Tensor:
        if noise is not None:
            logits = logits + (noise[:, :1] if depth is None else gather_tokens(noise, depth))
        count = math.gcd(logits.shape[-1], 256)  # parts of the vocabulary; one program alone takes 30 us
        parts = logits.unflatten(-1, (count, -1))
        top, part = parts.amax(-1).max(-1, keepdim=True)
        best = parts.gather(-2, part[..., None].expand(*part.shape, parts.shape[-1])).argmax(-1)
        return torch.where(top.isfinite(), part * parts.shape[-1] + best, -1)[..., 0]

    def gumbel(
        self, key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int, latest: list | None = None
    ) -> Tensor:
        return materialize(super().gumbel(key, positions, temperature, vocabulary))

    @with_fallback("restrict", Step.restrict)
    def restrict(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        lowest = sampling.thresholds(logits, temperature, top_k, top_p)
        return torch.where(logits < lowest[..., None], float("-inf"), logits)  # keeps NaN


class CudaBackend(Backend):
    """Models on NVIDIA GPUs of compute capability 8.0 and later (`device.runs_kernels`)."""

    name, self_check = "cuda", "engine.check:check"
    caches = {"auto": LayerCaches, "fp8": Float8LayerCaches}
    quantized_at_load = {torch.bfloat16: "int8", torch.float16: "int8"}
    step = CudaStep()

    def prepare(self, *models: nn.Module) -> bool:
        super().prepare(*models)
        for model in models:
            if isinstance(model, Transformer | Head):
                model.Caches, model.runs_on_backend = self.caches["auto"], True
            for module in model.modules():
                products.fuse(module)
                experts.fuse(module)
            if isinstance(model, Transformer):
                dense.fuse(model)
        return True

    @property
    def delta(self) -> Callable:
        """See `families.hybrid.DeltaCache.outputs`."""
        return extensions.load("kernels.gpu.delta:outputs")
