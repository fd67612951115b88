"""What decoding needs whatever the order of requests: all that is allocated, and the passes over it.

Everything that a step touches is allocated once and keeps its address. A pass works on all sequences of the
batch or on some that lie side by side: on views of the same buffers.
"""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import Drafter
from engine.capture import CapturedCalls
from engine.compiling import CompiledFunction
from engine.memory import free_memory
from engine.prefill import prefill
from engine.state import State
from engine.step import commit, step, verify
from engine.tuning import Plan
from kernels.backend import backend_of
from model import Transformer
from sampling.options import Modes, Sampling
from tokens.grammar import Guide

SPAN = 64  # attention reads the live prefix rounded up to this many slots
GPU_CHUNKS = 64, 512  # prompt rows of a pass
UNREAD = 512  # tokens of plain decoding that a head reads later, at most


class Kind(NamedTuple):
    """A kind of step: the step of a drafter, and its first half."""

    drafter: Drafter
    step: Callable
    verify: Callable


class Emission(NamedTuple):
    """What a pass emitted, on its way to the host: of the state `out` and, if asked for, the scores."""

    parts: tuple[Tensor, ...]
    copied: torch.cuda.Event | None  # that it has arrived; None: it has


class Score(NamedTuple):
    """What the target thinks of a token: its log-probability, and the likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest first


class Emitted(NamedTuple):
    """What a sequence emitted in a pass. The first `drafted` of the tokens were drafted."""

    ids: list[int]
    drafted: int
    done: bool
    scores: list[Score]


class Rows:
    """The sequences first ... first + count - 1 of a body's batch, as its passes take them."""

    def __init__(self, body: Body, first: int, count: int):
        self.first, self.count = first, count
        self.chunk_start = body.chunk_start[first : first + count]
        self._body, self._whole = body, count == body.batch
        if self._whole:
            self.state, self.caches, self._drafter = body.state, body.caches, body.drafter
        else:
            self.state = body.state.rows(first, count)
            self.caches = body.caches.rows(first, count)
            self._drafter = body.drafter.rows(first, count)
        self.prefill = body.function(prefill, "prefill")
        self._kinds: dict[Kind, Kind] = {}

    @property
    def drafter(self) -> Drafter:
        """The body's drafter for these sequences."""
        return self._drafter

    def kind(self, kind: Kind) -> Kind:
        """A kind of step of the body, for these sequences."""
        if self._whole:
            return kind
        if kind not in self._kinds:
            usual = kind.drafter is self._body.drafter
            drafter = self._drafter if usual else kind.drafter.rows(self.first, self.count)
            self._kinds[kind] = self._body.kind(drafter, f"step of {self.count}")
        return self._kinds[kind]


class Body:
    """A target, a drafter, and all that decoding `batch` sequences with them touches.

    max_seq_len: most tokens of prompt and output. stop_ids: any of them ends a text. compile: run prefill and
    step through torch.compile; on CUDA the step is also captured as one graph. say: called with one line when
    something slow (compilation) starts and ends. chunks: prompt rows per prefill pass. plans: the trees of
    all of them can be drafted, with `drafter`, which is a `HeadDrafter`. guide: makes a
    `tokens.grammar.Guide` of a JSON schema, for requests that have one. follows: plain steps leave what
    `read_behind` reads. Raises ValueError, with the numbers, if the caches do not fit in memory.
    """

    def __init__(
        self, target: Transformer, drafter: Drafter | None, batch: int, max_seq_len: int,
        stop_ids: Iterable[int], compile: bool, say: Callable[[str], None] | None,
        chunks: tuple[int, ...] | None, plans: tuple[Plan, ...], guide: Callable[[str], Guide] | None,
        follows: bool = False,
    ):
        weight = target.embed.weight
        self.device, dtype = weight.device, weight.dtype
        on_cuda = self.device.type == "cuda"
        self.target, self.drafter, self.backend = target, drafter or Drafter(), backend_of(target)
        self.batch, self.max_seq_len = batch, max_seq_len
        # Without compiling everything runs eagerly and gives the same text. On our CPU kernels a step calls
        # few operators: compiling it would save nothing.
        self.compiled = compile and not self.backend.row_invariant
        # A short prompt, or the rest of one, takes the smallest that holds it; compiled, each is compiled.
        sizes = GPU_CHUNKS if on_cuda else (64,) if self.compiled else (16, 32, 64)
        self.chunks = sorted(chunks or sizes)
        self.say, self.guide = say or (lambda line: None), guide

        planned = tuple(dict.fromkeys(shape for plan in plans for shape in plan.shapes))
        drafters = [self.drafter, *(self.drafter.with_tree(shape) for shape in planned)]
        # On a CPU, where asking for a guess costs no synchronisation.
        headless = None if on_cuda else copy.copy(self.drafter.headless)
        if headless:
            drafters.append(headless)
        # A joint tree may be deeper than the one of the head in it. Each is drafted after a catch-up of as
        # many rows as the widest window has.
        self.window = max(one.shape.window for one in drafters)
        self.extra = max(one.extra_slots_after(self.window) for one in drafters)
        room = max(self.extra, self.chunks[-1]) + 1
        self.slots = round_up(max_seq_len + room, SPAN)
        width = len(self.drafter.aux_layers) * target.args.hidden_size
        self.unread = max(min(UNREAD, self.slots), self.window) if follows else 0
        self.cache_bytes = self._check_memory(room, batch * self.unread * width * weight.element_size())
        # Compiled attention reads the live slots of a cache. If these could be all, dynamo would take that
        # for another graph: a cache is longer than what is ever live.
        allocated = self.slots + (SPAN if self.compiled else 0)
        self.caches = target.caches(batch, allocated)
        self.drafter.allocate(batch, allocated, room, dtype, self.device)
        tokens = self.slots + self.chunks[-1] + 1
        self.state = State(
            batch, tokens, self.window, width, stop_ids, dtype, self.device, room=self.unread,
            vocabulary=target.args.vocab_size, nodes=max(one.shape.nodes for one in drafters),
            backend=self.backend,
        )
        self.slot_ids = torch.arange(self.slots, device=self.device)
        self.chunk_ids = {c: torch.arange(c, device=self.device) for c in self.chunks}
        self.chunk_start = torch.zeros(batch, dtype=torch.int64, device=self.device)

        self.trees = {
            shape: self.kind(self.drafter.with_tree(shape), f"step {shape.name}") for shape in planned
        }
        self.usual = self.kind(self.drafter, "step")
        self.plain = self._without_head(Drafter(), follows, "step without a guess")
        self.headless = headless and self._without_head(headless, follows, "step without the head")
        # On a CPU rows are not free and asking costs no synchronisation: a drafter that may have nothing to
        # propose is asked before each step.
        self.asks = not on_cuda and self.drafter.may_pass
        self.captured = CapturedCalls(self.device, self.still) if compile and on_cuda else None
        self._rows: dict[tuple[int, int], Rows] = {}

    def function(self, function: Callable, what: str) -> Callable:
        """A function of a step, compiled if it is to be."""
        if not self.compiled:
            return function
        return CompiledFunction(function, what, self.say)

    def kind(self, drafter: Drafter, what: str) -> Kind:
        """The step of a drafter."""
        return Kind(drafter, self.function(step, what), self.function(verify, f"{what}, guided"))

    def _without_head(self, drafter: Drafter, follows: bool, what: str) -> Kind:
        """The step of a drafter that leaves what the head will read."""
        drafter.aux_layers, drafter.reads = self.drafter.aux_layers if follows else (), False
        return self.kind(drafter, what)

    def without_head(self, rows: Rows, span: Tensor) -> Kind:
        """The step for these sequences if the head is not to draft: plain, or that of what needs no head."""
        if self.headless and self.headless.drafter.has_guess(rows.state, span):
            return self.headless
        return self.plain

    def rows(self, first: int, count: int) -> Rows:
        """Some sequences of the batch; the same object each time."""
        if (first, count) not in self._rows:
            self._rows[first, count] = Rows(self, first, count)
        return self._rows[first, count]

    @property
    def whole(self) -> Rows:
        """All sequences."""
        return self.rows(0, self.batch)

    def _check_memory(self, room: int, unread_bytes: int) -> int:
        """Bytes of all KV caches, and of features that the head has not read. Raises ValueError, before
        anything is allocated, if they do not fit.

        room: see `Drafter.allocate`.
        """
        dtype, size = self.target.embed.weight.dtype, (self.batch, self.slots)
        need = self.target.cache_bytes(*size) + self.drafter.memory(*size, room, dtype) + unread_bytes
        free = free_memory(self.device)
        if free is not None and need > free:
            raise ValueError(
                f"the caches of {self.batch} x {self.slots} slots need {need / 1e9:.1f} GB,"
                f" {free / 1e9:.1f} GB are free: lower --max-seq-len, the tree or the number of prompts"
                " decoded together"
            )
        return need

    # -- requests -----------------------------------------------------------------------------

    def check(self, prompt: list[int], name: str = "the prompt") -> None:
        """Raise ValueError if a prompt is empty, too long, or has an id outside the vocabulary."""
        check_prompt(prompt, name, self.max_seq_len, self.target.args.vocab_size)

    def check_request(self, request: Sampling) -> None:
        """Raise ValueError if a request names an id outside the vocabulary, or cannot be guided here."""
        if request.json_schema is not None and self.guide is None:
            raise ValueError("a JSON schema needs a tokenizer, which this checkpoint does not have")
        size = self.target.args.vocab_size
        for token, _ in request.logit_bias:
            if token >= size:
                raise ValueError(f"logit_bias holds token id {token}, the vocabulary is 0..{size - 1}")

    # -- passes -------------------------------------------------------------------------------

    def launch_step(
        self, rows: Rows, span: Tensor, kind: Kind, modes: Modes, guides: dict[int, Guide] | None = None
    ):
        """One step of some sequences; returns (tree, path). guides: those of rows, by their number."""
        kind = rows.kind(kind)
        arguments = self.target, rows.caches, kind.drafter, rows.state
        key = kind, *self._key(rows, span, modes)
        if not modes.guided:
            return self.run(("step", *key), partial(kind.step, *arguments, span, *modes))
        # The host says what may follow each node. What comes after that is neither compiled nor captured.
        verified = self.run(("verify", *key), partial(kind.verify, *arguments, span, *modes))
        tokens, parent = verified.tree.tokens.tolist(), verified.tree.parent.tolist()
        for i, guide in (guides or {}).items():
            mask(rows.state.allowed[i], guide, tokens[i], parent[i])
        with self.here():
            return commit(*arguments, verified, *modes)

    def launch_prefill(self, rows: Rows, span: Tensor, size: int, modes: Modes) -> Tensor:
        """Read `size` tokens of the prompts of some sequences, from `chunk_start` on; see `prefill`."""
        chunk = self.chunk_ids[size]
        if self.compiled:
            torch._dynamo.mark_static(chunk, 0)
        arguments = self.target, rows.caches, rows.drafter, rows.state, span, rows.chunk_start, chunk
        call = partial(rows.prefill, *arguments, *modes)
        return self.run(("prefill", size, *self._key(rows, span, modes)), call)

    def _key(self, rows: Rows, span: Tensor, modes: Modes) -> tuple:
        return span.shape[0], rows.first, rows.count, *modes

    def keep_up(self, rows: Rows, span: Tensor, kind: Kind, behind: int) -> int:
        """Before a step of this kind: let the head read what it must, of at most `behind` unread tokens.

        Returns how many there may be after the step.
        """
        committed = kind.drafter.shape.window
        if behind > self.window if kind.drafter.reads else behind + committed > self.unread:
            self.read_behind(rows, span, behind)
            behind = 1
        return self.window if kind.drafter.reads else behind + committed

    def read_behind(self, rows: Rows, span: Tensor, behind: int) -> None:
        """Let the drafter read what plain steps have committed, at most `behind` tokens, but for the last."""
        first = 0
        while first < behind:
            size = self.chunk_size(behind - first)
            key = "behind", first, size, span.shape[0], rows.first, rows.count
            self.run(key, partial(self._read_behind, rows, span, first, size))
            first += size
        self.run(("read", rows.first, rows.count), rows.state.keep_last_unread)

    def chunk_size(self, remaining: int) -> int:
        """The rows of the next pass, where so many tokens are still to be read."""
        return next((c for c in self.chunks if c >= remaining), self.chunks[-1])

    def _read_behind(self, rows: Rows, span: Tensor, first: int, size: int) -> None:
        state = rows.state
        # A sequence that has fewer writes where nothing is committed.
        start = torch.minimum(state.length - state.n_new + first, state.length)
        features = state.features[:, first : first + size]
        short = size - features.shape[1]
        if short:
            features = F.pad(features, (0, 0, 0, short))
        positions = start[:, None] + self.slot_ids[:size]
        rows.drafter.read(state, features, positions, self.backend.visible_before(span, start, size))

    def run(self, key: tuple, call: Callable):
        """A call, on CUDA as a captured graph. key: tells calls apart; those of one key do the same."""
        if self.captured:
            return self.captured(key, call)
        with self.here():
            return call()

    def here(self) -> contextlib.AbstractContextManager:
        """A context for passes: on a GPU it is the current one, which each thread has its own of; our CPU
        kernels have all threads.
        """
        if self.device.type == "cuda":
            return torch.cuda.device(self.device)
        return self.backend.threads()

    def span(self, needed: int) -> Tensor:
        """The live slots 0..n-1, n >= needed, in few sizes. n is the one dynamic dimension of the graph.

        Where attention reads the lengths itself, all slots: one graph serves every context.
        """
        if self.backend.reads_length:
            return self.slot_ids
        size = round_up(needed, SPAN)
        if self.device.type == "cuda":  # a captured graph is of one size: powers of two keep them few
            size = max(256, 1 << (size - 1).bit_length())
        span = self.slot_ids[: min(size, self.slots)]
        if self.compiled:
            torch._dynamo.mark_dynamic(span, 0)
        return span

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Hold every sequence still: passes in this context decode nothing."""
        state = self.state
        done, reading = state.done.clone(), state.reading.clone()
        state.done.fill_(True)
        state.reading.fill_(False)
        yield
        state.done.copy_(done)
        state.reading.copy_(reading)

    # -- what comes out -----------------------------------------------------------------------

    def out_to_host(self, state: State, scored: bool) -> Emission:
        """Start copying what a pass emitted; `arrived` waits for it. scored: the scores of tokens too."""
        parts = (state.out,)
        if scored:
            parts += state.logprob, state.top_logprobs, state.top_ids
        if self.device.type != "cuda":
            return Emission(tuple(x.clone() for x in parts), None)
        host = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in parts)
        for x, there in zip(parts, host):
            there.copy_(x, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        return Emission(host, copied)


def arrived(emission: Emission, requests: list[Sampling]) -> Iterator[Emitted]:
    """What each of the first sequences emitted, which have these requests; it waits until that is known."""
    if emission.copied is not None:
        emission.copied.synchronize()
    out, *scores = (x[: len(requests)].tolist() for x in emission.parts)
    for i, ((*tokens, count, drafted, done), request) in enumerate(zip(out, requests)):
        of_tokens = zip(*(x[i][:count] for x in scores)) if request.logprobs is not None else ()
        scored = [Score(own, list(zip(ids, top))[: request.logprobs]) for own, top, ids in of_tokens]
        yield Emitted(tokens[:count], drafted, bool(done), scored)


def mask(allowed: Tensor, guide: Guide, tokens: list[int], parent: list[int]) -> None:
    """Say in allowed [T', V/32] what may follow the nodes of a tree below a guide's text."""
    rows = torch.full((len(tokens), allowed.shape[1]), -1, dtype=torch.int32)
    guide.mask(tokens, parent, rows.numpy())
    allowed[: len(tokens)] = rows.to(allowed.device)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def check_prompt(prompt: list[int], name: str, room: int, vocab_size: int) -> None:
    """Raise ValueError, with the numbers, if a prompt is empty, does not fit in a cache of `room` tokens, or
    has an id outside the vocabulary.
    """
    if not prompt:
        raise ValueError(f"{name} is empty: give at least one token")
    if len(prompt) >= room:
        raise ValueError(
            f"{name} has {len(prompt)} tokens and needs room for one more,"
            f" the cache holds {room}: shorten it or raise --max-seq-len"
        )
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token id {token}, the vocabulary is 0..{vocab_size - 1}")
