"""The decoder: it allocates the static state, takes prompts, and replays the step until every text ends.

Everything that a step touches is allocated once and keeps its address. A step never reads a value back to the
host. The device decides where a text stops (stop ids, token limit) and cuts it exactly there; a finished
sequence stays in the batch and stops moving. The host learns what was emitted from one small buffer, on CUDA
one step late.
"""
from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import Drafter
from engine.capture import CapturedCalls
from engine.compiling import CompiledFunction
from engine.memory import bytes_per_step, free_memory
from engine.prefill import prefill
from engine.run import Output, Run
from engine.state import State
from engine.step import commit, step, verify
from engine.switching import Switch
from engine.tuning import Plan
from kernels.packed import threads_for
from kernels.parts import visible_before
from model import KVCache, Transformer
from sampling.options import Modes, Sampling
from tokens.grammar import Guide
from tokens.ids import common_prefix
from tree import Tree, TreeShape

SPAN = 64  # attention reads the live prefix rounded up to this many slots
REHEARSAL = 5  # steps of each kind at warm-up
UNREAD = 64  # tokens of plain decoding that an EAGLE head reads later, in one pass


class Kind(NamedTuple):
    """A kind of step: the step of a drafter, and its first half."""

    drafter: Drafter
    step: Callable
    verify: Callable


class Unread(NamedTuple):
    """What a step emitted, on its way to the host."""

    kind: Kind | None  # None: a pass over prompts
    shape: TreeShape | None  # what the switch chose
    out: tuple[Tensor, ...]  # of the state, on the host: `out` and, if they are asked for, what tokens score
    copied: torch.cuda.Event | None  # that it has arrived; None: it has


class Score(NamedTuple):
    """What the target thinks of a token: its log-probability, and the likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest first


class Decoder:
    """Decodes token-id prompts with one target and one drafter. Text is the business of `engine.api`.

    batch: sequences decoded together. max_seq_len: most tokens of prompt and output. stop_ids: any of them
    ends a text. compile: run prefill and step through torch.compile; on CUDA the step is also captured as one
    graph. say: called with one line when something slow (compilation) starts and ends. chunks: prompt rows
    per prefill pass. lag: how many steps the host reads late; None is 1 on CUDA, 0 elsewhere. plan: draft its
    trees in turn (see `engine.switching`), with `drafter`, which is an `Eagle`. Raises ValueError, with the
    numbers, if the caches do not fit in memory. guide: makes a `tokens.grammar.Guide` of a JSON schema, for
    requests that have one.
    """

    def __init__(
        self, target: Transformer, drafter: Drafter | None = None, *, batch: int = 1, max_seq_len: int = 2048,
        stop_ids: Iterable[int] = (), compile: bool = True, say: Callable[[str], None] | None = None,
        chunks: tuple[int, ...] | None = None, lag: int | None = None, plan: Plan | None = None,
        guide: Callable[[str], Guide] | None = None,
    ):
        weight = target.embed.weight
        self.device, dtype = weight.device, weight.dtype
        on_cuda = self.device.type == "cuda"
        self.target, self.drafter = target, drafter or Drafter()
        self.batch, self.max_seq_len = batch, max_seq_len
        # Without compiling everything runs eagerly and gives the same text. On our CPU kernels a step calls
        # few operators: compiling it would save nothing.
        self.compiled = compile and not target.on_kernels
        self.chunks = sorted(chunks or ((64, 512) if on_cuda else (64,)))
        self.lag = int(on_cuda) if lag is None else lag
        self.say, self.guide = say or (lambda line: None), guide
        self._observer: Callable[[Tree, Tensor], None] | None = None

        shapes = [self.drafter.shape, *(plan.shapes if plan else ())]
        self.window = max(shape.window for shape in shapes)
        # Each tree is drafted after a catch-up of as many rows as the widest window has.
        self._extra = max(shape.extra_slots - shape.window for shape in shapes) + self.window
        room = max(self.drafter.extra_slots, self._extra, self.chunks[-1]) + 1
        self.slots = round_up(max_seq_len + room, SPAN)
        self.cache_bytes = self._check_memory()
        # Compiled attention reads the live slots of a cache. If these could be all, dynamo would take that
        # for another graph: a cache is longer than what is ever live.
        allocated = self.slots + (SPAN if self.compiled else 0)
        self.caches = target.caches(batch, allocated)
        self.drafter.allocate(batch, allocated, dtype, self.device)
        width = len(self.drafter.aux_layers) * target.args.hidden_size
        tokens = self.slots + self.chunks[-1] + 1
        self.state = State(
            batch, tokens, self.window, width, stop_ids, dtype, self.device, room=UNREAD if plan else 0,
            vocabulary=target.args.vocab_size, nodes=max(shape.nodes for shape in shapes),
        )
        self.slot_ids = torch.arange(self.slots, device=self.device)
        self.chunk_ids = {c: torch.arange(c, device=self.device) for c in self.chunks}
        self.chunk_start = torch.zeros(batch, dtype=torch.int64, device=self.device)

        self._prefill = self._function(prefill, "prefill")
        self.switch = Switch(plan) if plan else None
        self._trees = {
            shape: self._kind(self.drafter.with_tree(shape), f"step {shape.name}")
            for shape in (plan.shapes if plan else ())
        }
        self._usual = self._kind(self.drafter, "step")
        plain = Drafter()
        plain.aux_layers, plain.reads = self.drafter.aux_layers if plan else (), False
        self._plain = self._kind(plain, "step without a guess")
        # On a CPU rows are not free and asking costs no synchronisation: a drafter that may have nothing to
        # propose is asked before each step.
        self._asks = not on_cuda and self.drafter.may_pass
        self.captured = CapturedCalls(self.device, self._still) if compile and on_cuda else None
        self._serial = 0  # of the text at hand

    def _function(self, function: Callable, what: str) -> Callable:
        """A function of a step, compiled if it is to be."""
        if not self.compiled:
            return function
        return CompiledFunction(function, what, self.say)

    def _kind(self, drafter: Drafter, what: str) -> Kind:
        return Kind(drafter, self._function(step, what), self._function(verify, f"{what}, guided"))

    def trees_taken(self) -> dict[str, int]:
        """How many steps of this text took which tree: T/D/k, the nodes of a static tree, or "plain"."""
        def name(shape) -> str:
            if shape.nodes == 1:
                return "plain"
            return shape.name if isinstance(shape, TreeShape) else f"{shape.nodes} nodes"

        return {name(kind.drafter.shape): count for kind, count in self.taken.most_common() if count}

    def bytes_read(self) -> int:
        """Weight bytes that the steps of this text have read."""
        return sum(bytes_per_step(self.target, kind.drafter) * n for kind, n in self.taken.items())

    @property
    def done(self) -> list[bool]:
        """Which sequences have ended, as far as the host has read."""
        return list(self._done)

    @contextlib.contextmanager
    def observe(self, see: Callable[[Tree, Tensor], None]) -> Iterator[None]:
        """Call see(tree, path) with what each step returns, within this context.

        The host then reads every step at once: one that reads late sees steps that never count.
        """
        before = self._observer, self.lag
        self._observer, self.lag = see, 0
        try:
            yield
        finally:
            self._observer, self.lag = before

    def _check_memory(self) -> int:
        """Bytes of all KV caches. Raises ValueError, before anything is allocated, if they do not fit."""
        dtype, size = self.target.embed.weight.dtype, (self.batch, self.slots)
        drafting = (KVCache.bytes(*size, args, dtype) * args.num_layers for args in self.drafter.cached)
        need = self.target.cache_bytes(*size) + sum(drafting) + self.drafter.memory(self.batch)
        free = free_memory(self.device)
        if free is not None and need > free:
            raise ValueError(
                f"the caches of {self.batch} x {self.slots} slots need {need / 1e9:.1f} GB,"
                f" {free / 1e9:.1f} GB are free: lower --max-seq-len, the tree or the number of prompts"
                " decoded together"
            )
        return need

    # -- requests -----------------------------------------------------------------------------

    def start(
        self, prompts: list[list[int]], sampling: Sampling | list[Sampling], reuse: bool = False
    ) -> None:
        """Take up to `batch` prompts (lists of token ids); `steps` then decodes them.

        reuse: keep what the caches hold of a prompt that begins as the sequence in the same place did (chat).
        Raises ValueError, naming the prompt and the numbers, before anything is touched, if a prompt is
        empty, too long for the cache, or holds an id outside the vocabulary.
        """
        if isinstance(sampling, Sampling):
            sampling = [sampling] * len(prompts)
        if not 1 <= len(prompts) <= self.batch or len(sampling) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts and {len(sampling)} samplings for a batch of {self.batch}"
            )
        for i, prompt in enumerate(prompts):
            self.check(prompt, f"prompt {i + 1}" if len(prompts) > 1 else "the prompt")

        for request in sampling:
            self.check_request(request)
        guides = [request.json_schema and self.guide(request.json_schema) for request in sampling]

        self._serial += 1
        cached = self._cached() if reuse else [[]] * self.batch
        self._prompts, self._sampling, self._guides = prompts, sampling, guides
        self._start, goes_on = [], reuse
        for i, (prompt, request) in enumerate(zip(prompts, sampling)):
            same = common_prefix(prompt, cached[i])
            # One token back: the drafter's last row was read together with the token that followed it then.
            self._start.append(max(0, min(same, len(prompt)) - 1))
            goes_on &= 2 * same > len(prompt)
            self.state.begin(i, prompt, request, self.max_seq_len)
            if guides[i]:
                self._mask(i, [0], [0])
        for i in range(len(prompts), self.batch):
            self.state.rest(i)
        self.drafter.begin(prompts)
        self._modes = Modes.of(sampling, few=self.compiled)
        self._length = [len(p) - 1 for p in prompts]  # what the host knows of state.length
        self._shape, self._behind, self.taken = None, self.window, Counter()
        if self.switch:
            self.switch.begin([s.temperature for s in sampling], goes_on)
        self._done = [False] * len(prompts)

    def check(self, prompt: list[int], name: str = "the prompt") -> None:
        """Raise ValueError if a prompt is empty, too long, or has an id outside the vocabulary."""
        if not prompt:
            raise ValueError(f"{name} is empty: give at least one token")
        if len(prompt) >= self.max_seq_len:
            raise ValueError(
                f"{name} has {len(prompt)} tokens and needs room for one more,"
                f" the cache holds {self.max_seq_len}: shorten it or raise --max-seq-len"
            )
        size = self.target.args.vocab_size
        for token in prompt:
            if not 0 <= token < size:
                raise ValueError(f"{name} holds token id {token}, the vocabulary is 0..{size - 1}")

    def check_request(self, request: Sampling) -> None:
        """Raise ValueError if a request names an id outside the vocabulary, or cannot be guided here."""
        if request.json_schema is not None and self.guide is None:
            raise ValueError("a JSON schema needs a tokenizer, which this checkpoint does not have")
        size = self.target.args.vocab_size
        for token, _ in request.logit_bias:
            if token >= size:
                raise ValueError(f"logit_bias holds token id {token}, the vocabulary is 0..{size - 1}")

    def _cached(self) -> list[list[int]]:
        """The tokens of each sequence that all caches hold: committed, and read by the drafter too."""
        lengths = (self.state.length - self.state.n_new).clamp(min=0).tolist()
        return [row[:n] for row, n in zip(self.state.tokens.tolist(), lengths)]

    def stop(self, i: int) -> None:
        """End sequence i, from the next step on."""
        self.state.done[i] = self._done[i] = True

    # -- the loop -----------------------------------------------------------------------------

    def steps(self) -> Iterator[list[list[int]]]:
        """Decode what `start` took. Yields, per pass, the tokens that each sequence emitted.

        There are often none during prefill. How many of them were drafted is in `drafted`, what the target
        thinks of each in `scores`, for sequences that asked for it.
        Raises RuntimeError if another text was started in between.
        """
        unread: deque[Unread] = deque()
        serial = self._serial
        for _ in self._read_prompts():
            unread.append(self._out_to_host())
            yield from self._read(unread, 0)
        while True:
            if serial != self._serial:
                raise RuntimeError(
                    "this decoder has started another text: one at a time, or one decoder each"
                )
            if all(self._done):
                break
            kind, (tree, path) = self._run_step(len(unread))
            if self._observer:
                self._observer(tree, path)
            unread.append(self._out_to_host(kind))
            yield from self._read(unread, 0 if self._modes.guided else self.lag)
        # Steps launched before the host knew that all had ended: nobody waits for them, nor counts them.
        self.taken.subtract(late.kind for late in unread)

    def _read_prompts(self) -> Iterator[None]:
        start = list(self._start)
        while remaining := max(len(p) - s for p, s in zip(self._prompts, start)):
            size = next((c for c in self.chunks if c >= remaining), self.chunks[-1])
            span = self._span(max(start) + size)
            self.chunk_start.copy_(torch.tensor(start + [0] * (self.batch - len(start))))
            with torch.no_grad():
                self._launch_prefill(span, size)
            start = [min(s + size, len(p)) for s, p in zip(start, self._prompts)]
            yield

    def _run_step(self, unread: int):
        """Launch one step; returns its kind and (tree, path).

        Each of the `unread` steps may have committed up to W tokens that the host does not know of.
        """
        span = self._span(max(self._length) + unread * self.window + self._extra)
        with torch.no_grad():
            kind = self._choose(span)
            self.taken[kind] += 1
            began = time.perf_counter()
            result = self._launch_step(span, kind)
            on_cpu = self.device.type == "cpu"  # elsewhere a step is only launched by now
            if self.switch and not self._observer and on_cpu:
                self.switch.time(self._shape, max(self._length), time.perf_counter() - began)
            return kind, result

    def _choose(self, span: Tensor) -> Kind:
        """What kind of step comes next."""
        if self._asks and not self.drafter.has_guess(self.state, span):
            return self._plain
        if self.switch is None or self._observer:
            return self._usual
        self._shape = self.switch.next(max(self._length))
        if self._shape is None and not self.switch.trees:
            return self._plain  # and never anything else: the head need not keep up
        if self._behind >= UNREAD if self._shape is None else self._behind > self.window:
            self._run((), partial(self._read_behind, span))
            self._behind = 1
        if self._shape is None:
            self._behind += 1
            return self._plain
        self._behind = self.window
        return self._trees[self._shape]

    def _read_behind(self, span: Tensor) -> None:
        """Let the drafter read what plain steps have committed, in one pass."""
        state = self.state
        start = state.length - state.n_new
        positions = start[:, None] + self.slot_ids[:UNREAD]
        self.drafter.read(state, state.features, positions, visible_before(span, start, UNREAD))
        state.keep_last_unread()

    def _launch_step(self, span: Tensor, kind: Kind):
        arguments = self.target, self.caches, kind.drafter, self.state
        if not self._modes.guided:
            call = partial(kind.step, *arguments, span, *self._modes)
            return self._run(("step", span.shape[0]), call)
        # The host says what may follow each node. What comes after that is neither compiled nor captured.
        call = partial(kind.verify, *arguments, span, *self._modes)
        verified = self._run(("verify", span.shape[0]), call)
        trees = zip(verified.tree.tokens.tolist(), verified.tree.parent.tolist())
        for i, ((tokens, parent), guide) in enumerate(zip(trees, self._guides)):
            if guide and not self._done[i]:
                self._mask(i, tokens, parent)
        with threads_for(self.target):
            return commit(*arguments, verified, *self._modes)

    def _mask(self, i: int, tokens: list[int], parent: list[int]) -> None:
        """Say what may follow the nodes of a tree below the text of sequence i."""
        allowed = self.state.allowed[i, : len(tokens)]
        rows = torch.full(allowed.shape, -1, dtype=torch.int32)
        self._guides[i].mask(tokens, parent, rows.numpy())
        allowed.copy_(rows)

    def _launch_prefill(self, span: Tensor, rows: int) -> None:
        chunk = self.chunk_ids[rows]
        if self.compiled:
            torch._dynamo.mark_static(chunk, 0)
        arguments = self.target, self.caches, self.drafter, self.state, span, self.chunk_start, chunk
        self._run(("prefill", rows, span.shape[0]), partial(self._prefill, *arguments, *self._modes))

    def _run(self, key: tuple, call: Callable):
        """A call, on CUDA as a captured graph, on our kernels with all threads for them."""
        if self.captured:
            return self.captured((*key, *self._modes), call)
        with threads_for(self.target):
            return call()

    def _span(self, needed: int) -> Tensor:
        """The live slots 0..n-1, n >= needed, in few sizes. n is the one dynamic dimension of the graph.

        Where attention reads the lengths itself, all slots: one graph serves every context.
        """
        if self.target.reads_length:
            return self.slot_ids
        size = round_up(needed, SPAN)
        if self.device.type == "cuda":  # a captured graph is of one size: powers of two keep them few
            size = max(256, 1 << (size - 1).bit_length())
        span = self.slot_ids[: min(size, self.slots)]
        if self.compiled:
            torch._dynamo.mark_dynamic(span, 0)
        return span

    def _out_to_host(self, kind: Kind | None = None) -> Unread:
        """Start copying what a step of this kind, or a pass over prompts, emitted; `_read` waits for it."""
        state = self.state
        parts = (state.out,)
        if self._modes.scored:
            parts += state.logprob, state.top_logprobs, state.top_ids
        if self.device.type != "cuda":
            return Unread(kind, self._shape, tuple(x.clone() for x in parts), None)
        host = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in parts)
        for x, there in zip(parts, host):
            there.copy_(x, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        return Unread(kind, self._shape, host, copied)

    def _read(self, unread: deque[Unread], keep: int) -> Iterator[list[list[int]]]:
        """Read finished steps, oldest first, until only `keep` are unread."""
        while len(unread) > keep:
            step = unread.popleft()
            if step.copied is not None:
                step.copied.synchronize()
            out, *scores = (x[: len(self._prompts)].tolist() for x in step.out)
            emitted, self.drafted, self.scores = [], [], []
            for i, (*tokens, count, drafted, done) in enumerate(out):
                emitted.append(tokens[:count])
                if self._guides[i]:
                    self._guides[i].take(tokens[:count])
                self.drafted.append(drafted)
                self._length[i] += count
                self._done[i] = bool(done)
                wanted = self._sampling[i].logprobs
                self.scores.append([] if wanted is None else [
                    Score(logprob, list(zip(ids, likeliest))[:wanted])
                    for logprob, likeliest, ids in zip(*(x[i][:count] for x in scores))
                ])
            if self.switch:
                lengths = [len(tokens) for tokens in emitted if tokens]
                self.switch.record(step.shape, max(self._length), lengths)
            yield emitted

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Hold every sequence still: passes in this context decode nothing."""
        state = self.state
        done, reading = state.done.clone(), state.reading.clone()
        state.done.fill_(True)
        state.reading.fill_(False)
        yield
        state.done.copy_(done)
        state.reading.copy_(reading)

    # -- from start to end --------------------------------------------------------------------

    def warm_up(self, sampling: Sampling = Sampling(), every_length: bool = False) -> None:
        """Compile (and on CUDA capture) what a request with this sampling runs, so that the request is fast.

        every_length: on CUDA, capture what texts of every length need, up to `max_seq_len`.
        """
        stop_ids = self.state.stop_ids.clone()
        self.state.stop_ids.fill_(-1)  # the first token might be one of them, and no step would run
        try:
            for prompt in ([0], [0] * 16) if self._asks else ([0],):  # the second: there is a guess
                self.generate([prompt], replace(sampling, max_new_tokens=2))
            self._rehearse(sampling)
            if self.captured and every_length:
                with self._still(), torch.no_grad():
                    for size in sorted({self._span(n).shape[0] for n in range(1, self.slots + 1, SPAN)}):
                        self._launch_step(self._span(size), self._usual)
                        for rows in self.chunks:
                            if rows <= size:
                                self._launch_prefill(self._span(size), rows)
        finally:
            self.state.stop_ids.copy_(stop_ids)

    def _rehearse(self, sampling: Sampling) -> None:
        """Take every kind of step a few times, so that the switch knows what they cost now."""
        if self.switch is None:
            return
        self.start([[0]], replace(sampling, max_new_tokens=self.max_seq_len))
        self.switch.rehearse(REHEARSAL)
        steps = self.steps()
        while self.switch.rehearsing and next(steps, None):
            pass
        self.switch.rehearse(0)

    def generate(
        self, prompts: list[list[int]], sampling: Sampling | list[Sampling] = Sampling()
    ) -> list[Output]:
        """Decode prompts (any number, in groups of `batch`) to the end. Raises ValueError as `start` does."""
        if isinstance(sampling, Sampling):
            sampling = [sampling] * len(prompts)
        outputs = []
        for i in range(0, len(prompts), self.batch):
            run = Run(self, prompts[i : i + self.batch], sampling[i : i + self.batch])
            for _ in run:
                pass
            outputs += run.outputs()
        return outputs


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple
