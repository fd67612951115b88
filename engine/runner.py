"""The model runner: it allocates all buffers once and runs passes eagerly, compiled or as CUDA graphs.

Buffers never move. A pass runs on a contiguous range of batch slots, through views.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import extensions
from common.errors import InputError
from common.machine import free_memory
from engine.draft import Drafter
from engine.request import Guide, Score
from engine.sampling import Modes
from engine.state import State
from engine.step import accept_and_commit, backend_of, draft_and_verify, first_token, prefill, step_of
from model import Transformer
from tree import Tree

SLOT_STEP = 64  # attention reads the live prefix rounded up to this many slots
GPU_CHUNKS = 64, 512  # sizes of prefill chunks, in tokens


class CachesTooLarge(InputError):
    """The caches do not fit in memory. The message has both sizes."""


# Waits until a pass's output is on the host. Returns `State.out` and, if requested, the scores, as lists.
Output = Callable[[], list[list]]


class Emitted(NamedTuple):
    """Tokens that one sequence emitted in a pass; the first `drafted` were drafted."""

    ids: list[int]
    drafted: int
    done: bool
    scores: list[Score]


def default_batch_sizes(batch: int, captured: bool) -> tuple[int, ...]:
    """Return the batch sizes that steps run with, ascending. captured: powers of four and `batch` only."""
    below = (4**i for i in range(8)) if captured else range(1, batch)
    return *(count for count in below if count < batch), batch


class SlotRange(NamedTuple):
    """Views of the state and the target's caches: batch slots first ... first + count - 1.

    chunk_start [count]: where the next prefill chunk starts. drafter_view(drafter): its view.
    """

    first: int
    count: int
    chunk_start: Tensor
    state: State
    caches: nn.ModuleList
    drafter_view: Callable[[Drafter], Drafter]


class ModelRunner:
    """A target, a drafter, and the passes over `batch` sequences. Other arguments and errors: see `Engine`.

    variants: other drafters that steps may run; only their sizes matter. max_unread: maximum number of tokens
    that wait for the head (`engine.deferred`); 0: every step runs it. fallbacks: log lines about kernels and
    graphs that failed and were replaced by slower code.
    """

    def __init__(
        self, target: Transformer, drafter: Drafter, batch: int, max_seq_len: int, *,
        stop_ids: Iterable[int], compile: bool, log: Callable[[str], None],
        chunks: tuple[int, ...] | None, variants: list[Drafter], max_unread: int,
    ):
        self.device, dtype = target.embed.device, target.embed.dtype
        self.on_cuda = self.device.type == "cuda"
        self.target, self.drafter, self.batch = target, drafter, batch
        self.device_step, self.threads = step_of(target), backend_of(target).threads
        self._compile(compile, log)
        # A chunk is padded to the smallest size that holds it. On CUDA each size is captured separately.
        sizes = GPU_CHUNKS if self.on_cuda else (64,) if self.compiled else (16, 32, 64)
        self.chunks = sorted(chunks or sizes)[: 1 if self.on_cuda and target.is_recurrent else None]

        # If nothing drafts, reuse `drafter`: a second object would be compiled a second time.
        self.has_head = drafter.network is not None  # the head must process every token
        self.plain = self.defer_head(drafter if type(drafter) is Drafter else Drafter())
        drafters = [drafter, *variants, self.plain]
        for x in drafters:
            target.check_tree(x.shape)
        # Any of these may run after any other, so buffers have the largest sizes of all. A joint tree may be
        # deeper than the tree of the head in it.
        self._drafters = drafters
        self.max_commit = max(x.shape.max_commit for x in drafters)
        self.extra_slots = self.max_commit + max(x.extra_slots - x.shape.max_commit for x in drafters)
        self.cache_slots = round_up(max_seq_len + max(self.extra_slots, self.chunks[-1]) + 1, SLOT_STEP)
        width = len(drafter.aux_layers) * target.args.hidden_size
        self.max_unread = min(max_unread, self.cache_slots)
        # Compiled attention slices the live slots. Dynamo would recompile for a slice of the whole cache, so
        # the cache is longer than any slice.
        allocated = self.cache_slots + (SLOT_STEP if self.compiled else 0)
        unread_bytes = batch * self.max_unread * width * dtype.itemsize
        self.cache_bytes = self._check_memory(allocated, unread_bytes)
        self.caches: nn.ModuleList = target.caches(batch, allocated)
        drafter.allocate(batch, allocated, dtype, self.device)
        self.state = State(
            batch, self.cache_slots + self.chunks[-1] + 2, self.max_commit, feature_width=width,
            stop_ids=stop_ids, dtype=dtype, device=self.device, unread=self.max_unread,
            vocabulary=target.args.vocab_size,
            nodes=max(x.shape.nodes for x in drafters), aligned=not self.device_step.batch_invariant,
        )
        self.slot_ids = torch.arange(self.cache_slots, device=self.device)
        self.chunk_ids = {c: torch.arange(c, device=self.device) for c in self.chunks}
        self.chunk_start = torch.zeros(batch, dtype=torch.int64, device=self.device)
        # Ranges do not refer to this runner: a reference cycle would delay freeing its memory.
        self._ranges: dict[tuple[int, int], SlotRange] = {}
        self._live_slots: dict[int, Tensor] = {}

    def _compile(self, compile: bool, log: Callable[[str], None]) -> None:
        """Set up torch.compile and CUDA graph capture of the passes."""
        fallbacks = self.fallbacks = []

        def fell_back(line: str) -> None:
            fallbacks.append(line)
            log(line)

        self.fell_back = fell_back
        self.run_eagerly()
        # On our CPU kernels a step calls few operators: compiling it would save nothing.
        self.compiled = compile and not self.device_step.batch_invariant and self.target.can_compile
        if self.compiled or (compile and self.on_cuda):
            extensions.load(extensions.COMPILE_PASSES)(self, log)

    def run_eagerly(self) -> None:
        """Run eagerly from now on: drop compiled functions and captured graphs."""
        def uncompiled(function: Callable) -> Callable:
            return lambda key, *args: function(*args)  # `CompiledFunction` has a graph for each key

        self.passes = {step: uncompiled(step) for step in (prefill, draft_and_verify, accept_and_commit)}
        self.captured = None

    def slot_range(self, first: int, count: int) -> SlotRange:
        """Return batch slots first ... first + count - 1: the same object each time."""
        key = first, count
        if key not in self._ranges:
            start, modules = self.chunk_start[first : first + count], (self.state, self.caches)
            if count == self.batch:
                self._ranges[key] = SlotRange(*key, start, *modules, lambda drafter: drafter)
            else:
                views = (module.rows(*key) for module in modules)
                drafter_view = cache(lambda drafter: drafter.rows(*key))
                self._ranges[key] = SlotRange(*key, start, *views, drafter_view)
        return self._ranges[key]

    @property
    def has_graphs(self) -> bool:
        """True if passes are compiled or captured: then few batch sizes are in use."""
        return self.compiled or self.captured is not None

    def defer_head(self, drafter: Drafter) -> Drafter:
        """Set a drafter, in place, to store features for a later run of the head instead of running it."""
        drafter.aux_layers = self.drafter.aux_layers if self.has_head else ()
        drafter.defers_head = True
        return drafter

    def _check_memory(self, slots: int, unread_bytes: int) -> int:
        """Return the bytes of all KV caches and unread features. Raises CachesTooLarge."""
        dtype, size = self.target.embed.dtype, (self.batch, slots)
        need = self.target.cache_bytes(*size) + self.drafter.memory(*size, dtype) + unread_bytes
        free, pass_bytes = free_memory(self.device), 0
        if self.on_cuda:
            pass_bytes = extensions.load(extensions.PASS_BYTES)(self, self._drafters)
        if free is not None and need + pass_bytes > free:
            passes = f" and passes {pass_bytes / 1e9:.1f} GB" if pass_bytes else ""
            raise CachesTooLarge(
                f"the caches of {self.batch} x {slots} slots need {need / 1e9:.1f} GB{passes},"
                f" {free / 1e9:.1f} GB are free: lower --max-seq-len, the tree or the number of prompts"
                " decoded together"
            )
        return need

    # -- passes -------------------------------------------------------------------------------

    def step(
        self, group: SlotRange, live_slots: Tensor, drafter: Drafter, modes: Modes,
        guides: dict[int, Guide] | None = None, costs=None,
    ) -> tuple[Tree, Tensor]:
        """Run one step of some sequences; returns the tree and the path [B, W] accepted in it.

        drafter: `self.drafter`, `plain`, or another one with the same caches. guides: by slot; None: no
        sequence has one. costs: see `Drafter.propose`.
        """
        if modes.adjusted or modes.scored or modes.guided:
            _ = group.state.processors  # created lazily; must exist before compilation
        arguments = self.device_step, self.target, group.caches, group.drafter_view(drafter), group.state
        # Do not compile other trees, plain steps beside a drafter, and rare modes: few steps need them.
        key = None if drafter is not self.drafter else (drafter, group.count, modes.sampled)
        verify = partial(self.passes[draft_and_verify], key, *arguments, live_slots, modes.sampled, costs)
        commit = partial(self.passes[accept_and_commit], None if modes.is_rare else key, *arguments)
        if guides is None:
            key = "step", drafter, live_slots.shape[0], *modes
            return self.run(group, key, lambda: commit(verify(), *modes))
        with self.device_context():
            verified = self.run(group, ("verify", drafter, live_slots.shape[0], modes.sampled), verify)
            # The host computes which tokens may follow each node.
            tokens, parent = verified[0].tokens.tolist(), verified[0].parent.tolist()
            for i, guide in guides.items():
                group.state.processors.mask(i, guide, tokens[i], parent[i])
            return commit(verified, *modes)

    def prefill(self, group: SlotRange, live_slots: Tensor, size: int, modes: Modes | None) -> Tensor:
        """Prefill `size` tokens of the prompts of some sequences, from `chunk_start` on.

        modes: of the requests whose prompts end in this chunk; None: no prompt does. Returns the residual
        stream [B, size, H].
        """
        chunk = self.chunk_ids[size]
        if self.compiled and len(self.chunks) > 1:
            torch._dynamo.mark_dynamic(chunk, 0)
        drafter, start = group.drafter_view(self.drafter), group.chunk_start
        arguments = self.device_step, self.target, group.caches, drafter, group.state, live_slots, start
        read_chunk = partial(self.passes[prefill], (group.count,), *arguments, chunk)  # one graph, all sizes
        x, features = self.run(group, ("prefill", size, live_slots.shape[0]), read_chunk)
        if modes is not None:
            with self.device_context():
                first_token(self.device_step, self.target, group.state, group.chunk_start, x, features, modes)
        return x

    def run(self, group: SlotRange, key: tuple, call: Callable):
        """Run `call`, on CUDA as a captured graph if the group starts at slot 0 (not one graph per start).

        key: names the work; two calls with equal keys launch the same kernels.
        """
        if self.captured and group.first == 0:
            return self.captured((*key, group.count), call, self.frozen)
        with self.device_context():
            return call()

    def device_context(self) -> contextlib.AbstractContextManager:
        """Return a context for passes. It makes our GPU current in this thread, or gives our CPU kernels all
        threads.
        """
        return torch.cuda.device(self.device) if self.on_cuda else self.threads()

    def chunk_size(self, remaining: int) -> int:
        """Return the size of the next prefill chunk, with `remaining` tokens to read."""
        return next((c for c in self.chunks if c >= remaining), self.chunks[-1])

    def live_slots(self, needed: int) -> Tensor:
        """Return the live cache slots 0..n-1, n >= needed. n takes few values; it is the only dynamic size.

        All slots if attention reads the lengths itself: one graph serves every context.
        """
        # Layers with attention sinks (gpt-oss) run in PyTorch, which needs the slice.
        if self.device_step.reads_length and self.target.layers[0].sinks is None:
            return self.slot_ids
        size = round_up(needed, SLOT_STEP)
        if self.on_cuda:  # each size is captured separately: powers of two
            size = max(256, 1 << (size - 1).bit_length())
        size = min(size, self.cache_slots)
        if size not in self._live_slots:
            self._live_slots[size] = self.slot_ids[:size]
            if self.compiled:
                torch._dynamo.mark_dynamic(self._live_slots[size], 0)
        return self._live_slots[size]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Mark every sequence as done, so that passes in this context change none (warmup, graph capture)."""
        state = self.state
        done, prefilling = state.done.clone(), state.prefilling.clone()
        state.done.fill_(True)
        state.prefilling.fill_(False)
        try:
            yield
        finally:
            state.done.copy_(done)
            state.prefilling.copy_(prefilling)

    # -- output -------------------------------------------------------------------------------

    def to_host(self, state: State, scored: bool) -> Output:
        """Start copying the output of a pass; `read_outputs` waits for it. scored: also the scores."""
        buffers = (state.out, *state.processors.scores) if scored else (state.out,)
        if self.on_cuda:
            return extensions.load(extensions.COPY_TO_HOST)(buffers)
        output = [x.tolist() for x in buffers]  # now: the next pass overwrites them
        return lambda: output


def read_outputs(output: Output, logprobs: list[int | None]) -> Iterator[Emitted]:
    """Wait for the output of a pass and yield each sequence's.

    logprobs: `Sampling.logprobs` by sequence; further sequences are skipped.
    """
    out, *scores = output()
    for i, ((*tokens, count, drafted, done), num_logprobs) in enumerate(zip(out, logprobs)):
        scored = extensions.load(extensions.SCORES_OF_SLOT)(scores, i, count, num_logprobs) if scores else []
        yield Emitted(tokens[:count], drafted, bool(done), scored)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple
