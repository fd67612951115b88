"""The backend on GPUs: our kernels in Triton, a kernel or a few for each part of a step.

A model's attention is one kernel from wqkv to wo (`kernels.gpu.cache`). So is a product with a quantised
weight (`kernels.gpu.products`), and one of all experts of a mixture (`kernels.gpu.experts`), except in fp8.
Other products are cuBLAS'.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from engine.draft import once
from engine.step import Step
from head import Head
from kernels.gpu import experts, products, ranking, sampling
from kernels.gpu.cache import Float8LayerCaches, LayerCaches
from kernels.gpu.parts import left_out, on_kernel
from kernels.gpu.sight import Sight
from model import Transformer


class CudaStep(Step):
    """Our kernels on a GPU (`here.capable`)."""

    name, self_check = "cuda", "engine.check:check"
    takes = {"linear": products.take, "experts": experts.take}  # called with every module
    caches = {"auto": LayerCaches, "fp8": Float8LayerCaches}
    quantised_at_load = {torch.bfloat16: "int8", torch.float16: "int8"}

    @property
    def reads_length(self) -> bool:
        return "attend" not in left_out

    def prepare(self, *models: nn.Module) -> bool:
        super().prepare(*models)
        for model in models:
            if isinstance(model, Transformer | Head):
                model.Caches = self.caches["auto"]
            if isinstance(model, Transformer):
                model.whole = True
            for module in model.modules():
                for take in self.takes.values():
                    take(module)
        return True

    # -- the parts of a step ------------------------------------------------------------------

    def mask(self, slots: Tensor, length: Tensor, local: Tensor) -> Sight:
        return Sight(slots, length, once(local.contiguous()))

    def causal_mask(self, slots: Tensor, start: Tensor, count: int) -> Sight:
        rows = torch.arange(count, device=slots.device)
        return Sight(slots, start, once((rows <= rows[:, None]).repeat(len(start), 1, 1)))

    @on_kernel("rank", Step.rank)
    def rank(
        self, logits: Tensor, noise: Tensor | None, k: int, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scores, index = ranking.top_k(logits, noise, k)
        return scores, index if ids is None else ids[index]

    def gumbel(
        self, key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int, latest: list | None = None
    ) -> Tensor:
        return once(super().gumbel(key, positions, temperature, vocabulary))

    @on_kernel("restrict", Step.restrict)
    def restrict(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        lowest = sampling.thresholds(logits, temperature, top_k, top_p)
        return torch.where(logits >= lowest[..., None], logits, float("-inf"))
