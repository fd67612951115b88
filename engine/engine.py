"""The engine: admit requests, run steps, remove finished requests.

    request = engine.admit([1, 9690, 198], Sampling(max_new_tokens=64))
    while engine.busy:
        for event in engine.step():
            print(event.text)

A request is admitted between two steps into a free slot of the batch. Its prompt is prefilled in chunks;
other requests decode between chunks. A finished request frees its slot at once (`engine.state`). If a prompt
shares a prefix with a free slot or a running request, only the rest is prefilled.

On CUDA a step is launched before the output of the last one is read, unless a grammar constrains a request.
The device decides where a sequence stops (stop ids, token limit) and truncates it there. The host reads the
emitted tokens from small buffers, on CUDA one step late.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import extensions
from common.errors import InputError
from engine.draft import Drafter
from engine.request import Draft, Event, Finish, Guide, Request, check_prompt
from engine.runner import Emitted, ModelRunner, Output, SlotRange, default_batch_sizes, read_outputs
from engine.sampling import Modes, Sampling
from engine.state import Slots
from model import Transformer
from tokens.tokenizer import Tokenizer
from tree import Tree, TreeShape

MAX_UNREAD_TOKENS = 512  # maximum number of tokens decoded without the head before it reads them


class Choice(NamedTuple):
    """What a step drafts."""

    drafter: Drafter
    # Limits the tree to nodes that reduce latency; None: no limit. `expand(scores, limit)` and
    # `keep(scores)` return how many nodes to expand and to keep, see `schedulers.costs`.
    costs: Any = None
    head: bool = False  # the scheduler chose a step with the draft head


class Scheduler:
    """Choose the drafter of every step. This base class always chooses the engine's own."""

    runner: ModelRunner
    skips_head = False  # it may choose steps without the draft head, see `engine.deferred`

    def variants(self, drafter: Drafter) -> list[Drafter]:
        """Return other drafters that steps may run, without buffers: the engine sizes its for all of them."""
        return []

    def attach(self, engine) -> None:
        """Attach to an `engine.engine.Engine`. Called once, before its first step."""
        self.runner = engine.runner

    @property
    def drafters(self) -> list[Drafter]:
        """The drafters that steps may run."""
        return [self.runner.drafter]

    def add(self, request: Request) -> None:
        """Prepare for a new request."""

    def next(self, requests: list[Request], group: SlotRange) -> Choice:
        """Choose what to draft for these requests. group: their slots."""
        return Choice(self.runner.drafter)

    def launched(self, choice: Choice, group: SlotRange, tree: Tree, sampled: bool) -> Any:
        """Return a record of a step for `timed` and `emitted`, or None. sampled: a request samples."""

    def timed(self, record: Any, seconds: float) -> None:
        """Learn how long a step took. Not called if the engine has a `lag`."""

    def emitted(self, record: Any, index: int, request: Request, count: int) -> None:
        """Learn how many tokens a step emitted for request number `index` of the step."""

    def warm_up(self, engine, sampling: Sampling) -> None:
        """Time steps of the engine before requests come."""

    def describe(self, sampled: bool) -> str | None:
        """Return one line that describes what is drafted, or None. sampled: at temperatures above 0."""


class PendingPass(NamedTuple):
    """A launched pass whose output the host has not read."""

    requests: list[Request | None]  # by batch slot of the pass; None: not in it
    output: Output
    shape: TreeShape | None = None  # None: a pass over prompts
    drafts: list[Draft] | None = None
    head: bool = False  # the scheduler chose a step with the head
    record: object = None  # of the scheduler, see `Scheduler.launched`


class Engine:
    """Decodes up to `batch` requests at a time with one target and one drafter (None: plain decoding).

    - max_seq_len: maximum number of tokens of prompt and output
    - stop_ids: any of them ends a sequence
    - compile: run steps, and on a CPU also prefill, through torch.compile, unless the target is on our CPU
      kernels. On CUDA both are captured as graphs.
    - log: called with one line when something slow, such as compilation, starts and ends
    - chunks: sizes of prefill chunks, in tokens; None: by device
    - lag: number of steps that the host reads outputs late; None: 1 on CUDA, 0 elsewhere
    - scheduler: chooses the drafter and tree of each step; None: always the drafter's own tree
    - batch_sizes: sizes that steps are compiled or captured for, ascending; `batch` is the last
    - tokenizer: decodes outputs; None: no text
    - guide: makes the `Guide` of sampling options that need one
    - plain_requests: allow `plain` requests, whose steps skip the draft head
    - self_check (attribute): the backend's self-check, run once at the start of the first warmup

    Raises InputError if the caches do not fit in memory.
    """

    def __init__(
        self, target: Transformer, drafter: Drafter | None = None, *, batch: int = 1, max_seq_len: int = 2048,
        stop_ids: Iterable[int] = (), compile: bool = True, log: Callable[[str], None] = lambda line: None,
        chunks: tuple[int, ...] | None = None, lag: int | None = None, scheduler: Scheduler | None = None,
        batch_sizes: tuple[int, ...] | None = None, tokenizer: Tokenizer | None = None,
        guide: Callable[[Sampling], Guide] | None = None, plain_requests: bool = False,
    ):
        self.target = target = target.for_length(max_seq_len)
        self.drafter, self.scheduler = drafter or Drafter(), scheduler or Scheduler()
        self.batch, self.max_seq_len, self.tokenizer, self.guide = batch, max_seq_len, tokenizer, guide
        self.stop_ids = frozenset(stop_ids)
        # A recurrent target cannot read the end of a shared prefix again: the head alone reads it.
        defers_head = self.drafter.network is not None and (
            plain_requests or self.scheduler.skips_head or target.is_recurrent)
        self.runner = ModelRunner(
            target, self.drafter, batch, max_seq_len, stop_ids=self.stop_ids, compile=compile, log=log,
            chunks=chunks, variants=self.scheduler.variants(self.drafter),
            max_unread=MAX_UNREAD_TOKENS if defers_head else 0,
        )
        self.state, self.device = self.runner.state, self.runner.device
        on_cuda = self.runner.on_cuda
        self.lag = int(on_cuda) if lag is None else lag
        # With a recurrent target a step must exclude sequences in prefill: every batch size is needed.
        sizes = None if target.is_recurrent else batch_sizes
        self.batch_sizes = sizes or default_batch_sizes(batch, on_cuda and not target.is_recurrent)
        self.scheduler.attach(self)
        self.slots = Slots(self.runner, self.drafter, batch, self.lag)
        if defers_head:
            from engine.deferred import DeferredHead

            self.slots.deferred = DeferredHead(self.runner, self.slots)
        self._pending: deque[PendingPass] = deque()
        self._modes: Modes | None = None  # of the decoding requests; None: recompute
        self.self_check = target.backend and target.backend.self_check

    @property
    def free(self) -> int:
        """Number of requests that could be admitted now."""
        return self.slots.free

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Maximum number of tokens of prompt and output: of this engine, of the model."""
        return self.max_seq_len, self.target.args.max_seq_len

    @property
    def busy(self) -> bool:
        """True while a request holds a slot."""
        return self.free < self.batch

    # -- admit and remove ---------------------------------------------------------------------

    def check(self, prompt: list[int], sampling: Sampling, name: str = "the prompt") -> None:
        """Raise InputError if a request cannot be decoded. name: the prompt's name in errors."""
        size = self.target.args.vocab_size
        check_prompt(prompt, name, self.max_lengths, size)
        if sampling.is_guided and self.guide is None:
            raise InputError("a grammar or JSON schema needs a tokenizer and an end token; one is missing")
        if sampling.stop and self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer: leave out stop strings (--stop)")
        for token, _ in sampling.logit_bias:
            if token >= size:
                raise InputError(f"logit_bias holds token id {token}, the vocabulary is 0..{size - 1}")

    def admit(
        self, prompt: list[int], sampling: Sampling = Sampling(), *, guide: Guide | None = None,
        watch: bool = False, plain: bool = False, score_prompt: bool = False, shown: Collection[int] = (),
        continues: bool = False,
    ) -> Request:
        """Give a request a free slot.

        guide: its `Guide`; None: built if its options need one. watch: its events carry the drafted trees.
        plain: decode it without drafts. score_prompt: collect `Request.prompt_scores`; no cached prefix is
        reused. shown, continues: see `TextStream`. Raises InputError if the request cannot be decoded,
        RuntimeError if no slot is free, ValueError on `plain` without `plain_requests`.
        """
        if not self.free:
            raise RuntimeError(f"all {self.batch} slots are taken")
        if plain and self.runner.has_head and not self.slots.deferred:
            raise ValueError("plain=True: this engine has a draft head; create it with plain_requests=True")
        self.check(prompt, sampling)
        if sampling.is_guided and guide is None:
            guide = self.guide(sampling)
        stream = self.tokenizer and self.tokenizer.output_stream(sampling, shown, continues)
        request = Request(prompt, sampling, guide, stream, watch, plain, [] if score_prompt else None)
        shared = self.slots.assign(request)
        # Recompute the last shared token: its entry in the head's cache also encodes the old next token.
        request.cached = request.prefilled = 0 if score_prompt else max(0, min(shared, len(prompt)) - 1)
        self.runner.caches.start_request(request.slot, request.cached)
        try:
            self.state.start_request(request.slot, prompt, sampling, self.max_seq_len)
            self.state.done[request.slot] = True  # frozen until its prefill ends
            self.drafter.reset(request.slot, prompt)
            self.scheduler.add(request)
            if guide:  # for the first token: the tree is only the root
                self.state.processors.mask(request.slot, guide, [0], [0])
        except BaseException:
            self.remove(request)
            raise
        return request

    def remove(self, request: Request) -> None:
        """Free the slot of a request, whether it has finished or not. The caches keep its tokens."""
        if request.active:
            self.state.done[request.slot], self.state.prefilling[request.slot] = True, False
            self._modes = None
            self.slots.release(request)

    # -- step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Prefill one chunk of waiting prompts, then run one step of all decoding requests.

        Returns their events. An event with a `finish` is its request's last.
        """
        events, in_flight = [], 0
        if self.slots.prefilling and self._prefill_chunk():
            events += self._collect(0)
        if decoding := self.slots.requests[: self.slots.decoding]:
            start_time = time.perf_counter()
            record = self._launch(decoding)
            in_flight = 0 if any(r.guide for r in decoding) else self.lag
            events += self._collect(in_flight)
            if record is not None and self.lag == 0:  # with lag, the step may still be running
                self.scheduler.timed(record, time.perf_counter() - start_time)
        return events if in_flight else events + self._collect(0)

    def run(
        self, prompts: list[list[int]], samplings: list[Sampling], requests: list[Request], **options
    ) -> Iterator[Event]:
        """Decode prompts and yield their events. A finished request frees its slot for the next.

        requests: receives the requests in order, when they are admitted. options: of `admit`. If the caller
        stops early (Ctrl-C), unfinished requests are removed. Raises InputError as `admit`, before decoding.
        """
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings)):
            self.check(prompt, sampling, f"prompt {i + 1}" if len(prompts) > 1 else "the prompt")
        active: list[Request] = []
        try:
            while active or len(requests) < len(prompts):
                while self.free and len(requests) < len(prompts):
                    request = self.admit(prompts[len(requests)], samplings[len(requests)], **options)
                    requests.append(request)
                    active.append(request)
                if not any(request.undelivered for request in active):
                    for event in self.step():  # another `run` may own the request
                        event.request.undelivered.append(event)
                for request in [*active]:
                    while request.undelivered:
                        event = request.undelivered.popleft()
                        if event.finish:
                            active.remove(request)
                        yield event
        finally:
            for request in active:
                self.remove(request)

    def generate(
        self, prompts: list[list[int]], sampling: Sampling | list[Sampling] = Sampling(), **options
    ) -> list[Request]:
        """Decode any number of prompts to their end; see `run`.

        Raises InputError as `admit` does, and if a JSON schema cannot be satisfied.
        """
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        requests: list[Request] = []
        for event in self.run(prompts, samplings, requests, **options):
            if event.finish == "error":
                raise InputError(event.request.error)
        return requests

    def finish_prompts(self) -> None:
        """Prefill all prompts without decoding."""
        while self.slots.prefilling:
            self._prefill_chunk()
            self._collect(0)

    def _prefill_chunk(self) -> bool:
        """Prefill one chunk: of all waiting prompts if nothing decodes, else of the oldest one only.

        Returns whether a prompt was completed; its request decodes from now on.
        """
        slots, runner = self.slots, self.runner
        prefilling = slots.requests[slots.decoding : slots.decoding + slots.prefilling]
        if slots.decoding or any(r.prompt_scores is not None for r in prefilling):
            prefilling = [min(prefilling, key=lambda r: slots.last_used[r.slot])]
        group = runner.slot_range(prefilling[0].slot, len(prefilling))
        if runner.has_graphs and len(prefilling) > 1:  # prefill has graphs for one slot and for all slots
            group = runner.slot_range(0, self.batch)
        size = runner.chunk_size(max(len(r.prompt) - r.prefilled for r in prefilling))
        starts = [len(tokens) for tokens in slots.cached]  # do not overwrite the prefix in a free slot
        ending: list[Request | None] = [None] * group.count
        for r in prefilling:
            starts[r.slot] = r.prefilled
            if len(r.prompt) - r.prefilled <= size:
                ending[r.slot - group.first] = r
                self.state.done[r.slot] = False
        starts = starts[group.first : group.first + group.count]
        group.chunk_start.copy_(torch.tensor(starts))
        modes = Modes.of_requests([r.sampling for r in ending if r]) if any(ending) else None
        x = runner.prefill(group, runner.live_slots(max(starts) + size), size, modes)
        if prefilling[0].prompt_scores is not None:
            extensions.load(extensions.PROMPT_SCORES)(runner, prefilling[0], x)
        for r in prefilling:
            r.prefilled = min(r.prefilled + size, len(r.prompt))
        if modes is None:
            return False
        self._pending.append(PendingPass(ending, runner.to_host(group.state, modes.scored)))
        for r in filter(None, ending):
            self.slots.start_decoding(r)
        self._modes = None
        return True

    def _launch(self, requests: list[Request]) -> object:
        """Launch one step of the requests that decode. Returns the scheduler's record of it, if any.

        If any request is `plain`, the step drafts for none.
        """
        runner, plain = self.runner, any(r.plain for r in requests)
        group = runner.slot_range(0, next(count for count in self.batch_sizes if count >= len(requests)))
        context = max(r.length for r in requests)
        live_slots = runner.live_slots(context + len(self._pending) * runner.max_commit + runner.extra_slots)
        if self._modes is None:
            self._modes = Modes.of_requests([r.sampling for r in requests], runner.has_graphs)
        modes = self._modes
        choice = Choice(runner.plain) if plain else self.scheduler.next(requests, group)
        if self.slots.deferred:
            self.slots.deferred.before_step(group, live_slots, choice.drafter, requests)
        guides = {r.slot: r.guide for r in requests if r.guide} or None
        tree, path = runner.step(group, live_slots, choice.drafter, modes, guides, choice.costs)
        drafts = _drafts(tree, path) if any(r.watch for r in requests) else None
        shape = choice.drafter.shape
        if choice.costs:
            shape = shape.limited(tree.tokens.shape[1], tree.levels)
        record = None if plain else self.scheduler.launched(choice, group, tree, modes.sampled)
        output = runner.to_host(group.state, modes.scored)
        self._pending.append(PendingPass(requests, output, shape, drafts, choice.head, record))
        return record

    def _collect(self, in_flight: int) -> list[Event]:
        """Wait for all passes but the last `in_flight`; return their events, oldest first."""
        events = []
        while len(self._pending) > in_flight:
            launched = self._pending.popleft()
            logprobs = [r.sampling.logprobs if r else None for r in launched.requests]
            outputs = enumerate(zip(launched.requests, read_outputs(launched.output, logprobs)))
            for i, (request, emitted) in outputs:
                if request and request.active:
                    draft = launched.drafts[i] if launched.drafts and request.watch else None
                    events.append(self._emit(request, emitted, launched, i, draft))
        return events

    def _emit(
        self, request: Request, emitted: Emitted, launched: PendingPass, index: int, draft: Draft | None
    ) -> Event:
        """Append a pass's output to a request and return its event; remove the request if it has finished.

        index: of the request in the pass.
        """
        now, shape, previous = time.perf_counter(), launched.shape, request.last
        if launched.record is not None:
            self.scheduler.emitted(launched.record, index, request, len(emitted.ids))
        if -1 in emitted.ids:
            emitted.ids.remove(-1)
            request.error = "the model's logits are not finite: use --dtype fp32, or convert the model again"
        elif request.guide:
            request.guide.advance(emitted.ids)
            request.error = request.guide.error
        text, count = request.emit(emitted.ids, emitted.scores)
        request.first, request.last = request.first or now, now
        if shape:
            request.accept_lengths.append(count)
            request.trees["plain" if shape.nodes == 1 else shape.name] += 1
            drafted = launched.head or shape.nodes > 1
            request.step_times["drafted" if drafted else "plain"].append(now - previous)
        request.finish = self._finish_reason(request, emitted)
        if request.finish:
            text += request.flush()
            self.drafter.finish(request.tokens)
            self.remove(request)
        return Event(
            request, emitted.ids[:count], text, min(emitted.drafted, count), emitted.scores[:count],
            shape.nodes - 1 if shape else 0, draft, request.finish,
        )

    def _finish_reason(self, request: Request, emitted: Emitted) -> Finish | None:
        """Return why a request has finished, None if it goes on."""
        if request.error:
            return "error"
        if request.stop is not None or (emitted.done and request.ids and request.ids[-1] in self.stop_ids):
            return "stop"
        if not emitted.done:
            return None
        return "cache" if len(request.tokens) >= self.max_seq_len else "length"

    # -- warmup -------------------------------------------------------------------------------

    @torch.no_grad()
    def warm_up(self, *samplings: Sampling, exhaustive: bool = False) -> None:
        """Run, compile and capture the passes that these samplings need, and let the scheduler time steps.

        Default: greedy. exhaustive: cover all context lengths, prefill passes and sampling modes too, so that
        nothing is compiled or captured later.
        """
        if check := self.self_check:
            self.self_check = None  # once, before any request: it overwrites the caches
            extensions.load(check)(self.runner, samplings[:1])
        stop_ids = self.state.stop_ids.clone()
        self.state.stop_ids.fill_(-1)  # else the first token might end the request before a step runs
        try:
            for sampling in samplings or (Sampling(),):
                sampling = replace(sampling, stop=(), json_schema=None, limits=None)
                self.generate([[0]], replace(sampling, max_new_tokens=2))
                self.scheduler.warm_up(self, sampling)
                if self.runner.has_graphs:
                    extensions.load(extensions.LAUNCH_ALL)(self, sampling, exhaustive)
        finally:
            self.state.stop_ids.copy_(stop_ids)


def _drafts(tree: Tree, path: torch.Tensor) -> list[Draft]:
    """Return tree and accepted path of each sequence."""
    parts = [x.tolist() for x in (tree.tokens, tree.parent, path)]
    scores = [None] * len(path) if tree.scores is None else tree.scores.tolist()
    return [Draft(*fields) for fields in zip(*parts, scores)]
