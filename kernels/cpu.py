"""Backend and step on CPUs: C++ operators (`csrc/`), compiled for one instruction set (`kernels.isa`).

Every operator is batch-invariant: a token's result has the same bits whatever tokens are computed with it.
So output with drafting equals output without, also in bfloat16. A step calls a few large operators and does
not need torch.compile. Operators have no gradient; csrc/operators.cpp documents them. `kernels.packed` has
the modules that replace those of a model.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from common.heap import return_freed_memory
from engine.draft import Drafter
from engine.state import State
from engine.step import Backend, Step
from head import Eagle3Head
from kernels import cpu_cache, packed
from kernels.build import NoKernels, build_library, namespace
from kernels.isa import InstructionSet, choose
from tree import CandidateTree, Tree, TreeShape

ISAS_WITHOUT_AVX512 = ("avxvnni", "avx2", "neoni8mm", "neondot", "neon", "portable")


class Layout(NamedTuple):
    """The layout of packed weights for an instruction set."""

    columns: int  # outputs per block
    bf16_per_word: int  # inputs per word of a quantized weight, for activations in bfloat16
    bytes_per_word: int  # inputs per word of a w8a8 weight
    w8a8_zero_point: int  # added to the int8 values of a w8a8 weight
    nibbles_per_word: int  # inputs per word of a q4 weight


class CpuBackend(Backend):
    """Models on C++ operators, such as `torch.ops.eagle_avx2`. isa: must be supported by the processor."""

    caches = {"auto": cpu_cache.CpuCaches}
    # A head reads all its weights at each tree level; w8a8 does not lower acceptance (docs/quantizing.md).
    quantized_at_load = {torch.bfloat16: "w8a8"}
    loaded: dict[str, CpuBackend] = {}  # instruction set -> backend

    def __init__(self, isa: InstructionSet):
        self.name, self.ops = isa.name, getattr(torch.ops, namespace(isa))
        self.layout, self.step = Layout(*self.ops.layout()), CpuStep(self.ops)
        self._in_threads = False

    @classmethod
    def load(cls, isa: str | None = None, log: Callable[[str], None] = lambda line: None) -> CpuBackend:
        """Return the backend of an instruction set, by name; None: the one that `kernels.isa.choose` returns.

        Compiles the kernels unless they are cached. Raises InputError if the processor lacks the instruction
        set; NoKernels, an InputError, if the C++ compiler is missing or fails.
        """
        chosen = choose(isa)
        if chosen.name not in cls.loaded:
            try:
                torch.ops.load_library(str(build_library(chosen, log)))
            except (OSError, ValueError) as e:  # ValueError: CXX is not a command
                raise NoKernels(f"the kernels cannot be compiled or loaded ({e})") from None
            cls.loaded[chosen.name] = cls(chosen)
        return cls.loaded[chosen.name]

    def prepare(self, *models: nn.Module) -> bool:
        """Pack the weights of models in place, see `Backend.prepare`.

        float16 and fp8 weights, and odd row sizes in bfloat16, are not packed.
        """
        super().prepare(*models)
        return_freed_memory()  # loading the tokenizer leaves 50 MB of freed memory with malloc
        all_run = packed.pack_models(self, *models)
        return_freed_memory()  # of unpacked weights: 25 MB of a 1.5B model
        return all_run

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """In this context, give PyTorch's number of threads to our operators, and one thread to PyTorch.

        Idle OpenMP threads spin, and would take cores from our thread pool. PyTorch computes little between
        our operators.
        """
        if self._in_threads:
            yield
            return
        count = torch.get_num_threads()
        self.ops.use_threads(count)
        torch.set_num_threads(1)
        self._in_threads = True
        try:
            yield
        finally:
            self._in_threads = False
            torch.set_num_threads(count)
            self.ops.use_threads(0)

    def default_tree(self, device: torch.device, quantized: bool, batch: int) -> TreeShape:
        if self.name in ISAS_WITHOUT_AVX512:
            return TreeShape(4, 2, 2)
        return super().default_tree(device, quantized, batch)

    def delta(self, cache, block, projected: Tensor, paths) -> Tensor:
        """See `families.hybrid.DeltaCache.outputs`."""
        cache.write(block, projected, paths)
        tokens, state = (paths.length, paths.positions, paths.local), (cache.state, cache.start)
        return self.ops.delta(cache.mixed, cache.rates, *tokens, *state, block.Tokens.delta_rule)


class CpuStep(Step):
    """The phases and operations of a step as C++ operators."""

    batch_invariant, static_shapes = True, False

    def __init__(self, ops):
        self.ops = ops

    def mask(self, slots: Tensor, length: Tensor, local: Tensor) -> Tensor:
        return self.ops.tree_attention_mask(length, local, slots.shape[0])

    def rank(
        self, logits: Tensor, noise: Tensor | None, k: int, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.ops.rank(logits, noise, k, ids)

    def advance(self, growth: CandidateTree) -> Tensor:
        level = growth.scores[-1], growth.tokens[-1], growth.beam_mask, growth.size
        *beam, parent = self.ops.advance(*level, growth.shape.width)
        growth.set_beam(*beam)
        return parent

    def prune(
        self, root: Tensor, scores: Tensor, tokens: Tensor, parents: Tensor, nodes: int, levels: int,
        costs=None,
    ) -> Tree:
        return Tree(*self.ops.prune(scores, tokens, parents, root, nodes, *costs or packed.NO_COSTS))

    def draft(self, drafter: Drafter, state: State, slots: Tensor, noise: Tensor | None, costs=None) -> Tree:
        head = drafter.network
        fused = head.fused if isinstance(head, Eagle3Head) else None
        if drafter.resizable and fused is not None and fused.has_draft_operator:
            return Tree(*fused.draft(self, drafter, state, slots, noise, costs))
        return super().draft(drafter, state, slots, noise, costs)

    def verify(
        self, target: nn.Module, drafted: Tree, state, slots: Tensor, caches: cpu_cache.CpuCaches,
        aux_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        if target.fused is not None:
            return target.fused.verify(target, drafted, state.length, slots.shape[0], caches, aux_layers)
        return super().verify(target, drafted, state, slots, caches, aux_layers)

    def join(self, first: Tree, second: Tree, nodes: int, levels: int, costs=None) -> Tree:
        fields = (x for t in (first, second) for x in (t.tokens, t.parent, t.scores))
        return Tree(*self.ops.join(*fields, nodes, *costs or packed.NO_COSTS))

    def lookup(self, matcher, tokens: Tensor, length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        tables = matcher.chain, matcher.ahead, matcher.first_scores, matcher.later_scores
        return self.ops.lookup(tokens, length, count, *tables, matcher.min_match)

    def gumbel(
        self, key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int, latest: list | None = None
    ) -> Tensor:
        """latest: the previous call's noise, updated in place. Noise of the same positions is reused: a draft
        reaches beyond the tokens that a step commits.
        """
        noise = self.ops.gumbel(key, positions, temperature, vocabulary, *latest or [None] * 4)
        if latest is not None:
            latest[:] = noise
        return noise[-1]

    def restrict(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        return self.ops.restrict(logits, temperature, top_k, top_p)

    def draw(self, logits: Tensor, noise: Tensor | None, depth: Tensor | None = None) -> Tensor:
        return self.ops.draw(logits, noise, depth)

    def accept(self, drafted: Tree, chosen: Tensor, max_commit: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.ops.accept(drafted.tokens, drafted.parent, drafted.depth, chosen, max_commit)

    def commit(
        self, state, tokens: Tensor, count: Tensor, path: Tensor, features: Tensor | None,
        caches: cpu_cache.CpuCaches | None = None, *, active: Tensor | None = None, append: bool = False,
    ) -> Tensor:
        table, head_dim = None, 0
        if isinstance(caches, cpu_cache.CpuCaches):
            table, head_dim = caches.table, caches.head_dim
        elif caches is not None:
            caches.move(state.length[:, None] + path, state.length[:, None] + torch.arange(path.shape[1]))
        return self.ops.commit(
            tokens, count, path, features, table, head_dim, state.tokens, state.root, state.length,
            state.done, state.out, state.limit, state.stop_ids, active, append, state.features,
            state.n_unread,
        )
