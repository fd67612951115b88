"""The backend on GPUs: our kernels in Triton, a kernel or a few for each part of a step.

A model's attention is one kernel from wqkv to wo (`kernels.gpu.cache`), the products of quantised weights are
ours (`kernels.gpu.products`), those of others torch's.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from kernels.backend import Sight, TorchBackend, once
from kernels.gpu import growing, ranking, sampling
from kernels.gpu.cache import Float8LayerCaches, LayerCaches
from kernels.gpu.products import TritonLinear
from kernels.quantized import QuantizedLinear
from model import KVCaches, Pass, TargetBlock, Transformer, projected
from networks.head import Head
from tree import Growth, Tree

MADE_OF = {"attend": ("visible_slots", "visible_before", "reads_length")}  # attributes that use a kernel


class CudaBackend(TorchBackend):
    """Our kernels on a GPU (`here.capable`)."""

    name = "cuda"
    reads_length = True
    layer = TritonLinear  # of products with quantised weights
    caches = {"auto": LayerCaches, "fp8": Float8LayerCaches}
    quantised_at_load = {torch.bfloat16: "int8", torch.float16: "int8"}

    def without(self, failures: dict[str, str]) -> CudaBackend:
        """Return a backend that computes these parts by their definitions.

        failures: lines about them, by names of `kernels.gpu.cases.PARTS`; others change nothing.
        """
        if not failures:
            return self
        left_out = [part for part in failures if part != "linear" and part != "move"]
        names = [name for part in left_out for name in MADE_OF.get(part, (part,)) if hasattr(self, name)]
        own = {name: getattr(TorchBackend, name) for name in names}
        if "linear" in failures:
            own["layer"] = QuantizedLinear
        if "move" in failures:
            kinds = self.caches.items()
            own["caches"] = {k: type(v.__name__, (v,), {"move": KVCaches.move}) for k, v in kinds}
        name = f"cuda without {', '.join(failures)}"
        return type("CudaBackend", (CudaBackend,), {**own, "name": name, "failures": failures})()

    def prepare(self, *models: nn.Module) -> bool:
        super().prepare(*models)
        for model in models:
            if isinstance(model, Transformer | Head):
                model.Caches = self.caches["auto"]
            ours = [m for m in model.modules() if isinstance(m, QuantizedLinear) and m.mode != "fp8"]
            if isinstance(model, Transformer):
                model.whole = True
                if not any(m in ours for m in model.layers.modules()):
                    model.__class__ = FusedTransformer
            for module in ours:
                module.__class__ = self.layer
        return True

    # -- the parts of a step ------------------------------------------------------------------

    def visible_slots(self, slots: Tensor, length: Tensor, local: Tensor) -> Sight:
        return Sight(slots, length, once(local.contiguous()))

    def visible_before(self, slots: Tensor, start: Tensor, count: int) -> Sight:
        rows = torch.arange(count, device=slots.device)
        return Sight(slots, start, once((rows <= rows[:, None]).repeat(len(start), 1, 1)))

    def rank(
        self, logits: Tensor, noise: Tensor | None, k: int, names: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return ranking.rank(logits, noise, k, names)

    def advance(self, growth: Growth) -> Tensor:
        return growth.set_beam(*growing.advance(*growth.newest))

    def prune(self, growth: Growth, root: Tensor) -> Tree:
        return Tree(*growing.prune(*growth.candidates, root, growth.shape.nodes, growth.shape.depth + 1))

    def gumbel(self, key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int) -> Tensor:
        return sampling.gumbel(key, positions, temperature, vocabulary)

    def restrict(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        return sampling.restrict(logits, temperature, top_k, top_p)

    def largest(self, logits: Tensor, noise: Tensor | None, depth: Tensor | None) -> Tensor:
        return ranking.draw(logits, noise, depth)

    def accept(self, drafted: Tree, chosen: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
        path, count = growing.accept(drafted.tokens, drafted.parent, drafted.depth, chosen, window)
        return path, count, chosen.gather(1, path)

    def emit(self, state, tokens: Tensor, count: Tensor) -> Tensor:
        return growing.emit(
            tokens, count, state.tokens, state.length, state.done, state.out, state.limit, state.stop_ids
        )


# Regions are compiled once for all layers, see `model`.
@torch.compiler.nested_compile_region
def _enter(layer: TargetBlock, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    x = x + more
    return x, layer.project(x)


@torch.compiler.nested_compile_region
def _leave(layer: TargetBlock, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    x = layer.mixed(x, attended)
    return x, layer.fed(x)


class FusedTransformer(Transformer):
    """A target that adds the output of a layer's MLP where the next layer begins.

    torch.compile makes one kernel of that sum and the norm after it, as it does of the sum after attention.
    Products that add to the residual stream themselves (`TritonLinear`) gain nothing by this.
    """

    def run_layers(
        self, x: Tensor, caches: KVCaches, shared: Pass, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        features, more = [], None
        for i, (layer, cache) in enumerate(zip(self.layers, caches)):
            if more is None:
                qkv = projected(layer, x)
            else:
                x, qkv = _enter(layer, x, more)
            if i in aux_layers:
                features.append(x)
            x, more = _leave(layer, x, cache.attend(layer, qkv, shared))
        x = x + more
        if len(self.layers) in aux_layers:
            features.append(x)
        return x, torch.cat(features, dim=-1) if features else None
