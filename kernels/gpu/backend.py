"""The backend on GPUs: our kernels in Triton, a kernel or a few for each part of a step.

A model's attention is one kernel from wqkv to wo (`kernels.gpu.cache`). So is a product with a quantised
weight (`kernels.gpu.products`), and one of all experts of a mixture (`kernels.gpu.experts`), except in fp8.
Other products are cuBLAS'.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from kernels.backend import Sight, TorchBackend, once
from kernels.gpu import experts, growing, products, ranking, sampling
from kernels.gpu.cache import Float8LayerCaches, LayerCaches
from model import KVCaches, Transformer
from networks.head import Head
from tree import Growth, Tree

MADE_OF = {"attend": ("visible_slots", "visible_before", "reads_length")}  # attributes of a part


class CudaBackend(TorchBackend):
    """Our kernels on a GPU (`here.capable`)."""

    name = "cuda"
    reads_length = True
    takes = {"linear": products.take, "experts": experts.take}  # called with every module
    caches = {"auto": LayerCaches, "fp8": Float8LayerCaches}
    quantised_at_load = {torch.bfloat16: "int8", torch.float16: "int8"}

    def without(self, failures: dict[str, str]) -> CudaBackend:
        """Return a backend that computes these parts by their definitions.

        failures: lines about them, by names of `kernels.gpu.cases.PARTS`; others change nothing.
        """
        if not failures:
            return self
        names = [name for part in failures for name in MADE_OF.get(part, (part,)) if hasattr(self, name)]
        own = {name: getattr(TorchBackend, name) for name in names}
        own["takes"] = {part: take for part, take in self.takes.items() if part not in failures}
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
            if isinstance(model, Transformer):
                model.whole = True
            for module in model.modules():
                for take in self.takes.values():
                    take(module)
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

    def extend(self, growth: Growth, scores: Tensor, tokens: Tensor, more: bool) -> Tensor:
        beam = growth.beam_scores, growth.beam_flat, growth.beam_sees
        *candidates, row, best, ids, flat, sees = growing.extend(scores, tokens, *growth.candidates, *beam)
        growth.scores, growth.tokens, growth.parents = ([x] for x in candidates)
        return growth.set_beam(best, ids, flat, sees, row)

    def prune(self, growth: Growth, root: Tensor, prices: None = None) -> Tree:
        return Tree(*growing.prune(*growth.candidates, root, growth.shape.nodes, growth.shape.depth + 1))

    def gumbel(
        self, key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int, latest: list | None = None
    ) -> Tensor:
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
            tokens, count, state.tokens, state.root, state.length, state.done, state.out, state.limit,
            state.stop_ids,
        )
