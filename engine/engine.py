"""The engine: requests are admitted, stepped and leave. Everything that decodes uses it.

    request = engine.admit([1, 9690, 198], Sampling(max_new_tokens=64))
    while engine.busy:
        for event in engine.step():
            print(event.text)

A request is admitted between two steps into a free slot of the batch. Its prompt is read in chunks; other
requests go on decoding between them. A request that finishes leaves at once (`engine.slots`). A prompt that
shares a prefix with a free slot or a running request is read from there on.

On CUDA a step reads nothing back to the host before it is launched, unless a grammar constrains a request.
The device decides where a sequence stops (stop ids, token limit) and cuts it exactly there. The host learns
what was emitted from small buffers, on CUDA one step late.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

import extensions
from engine.draft import Drafter
from engine.request import Draft, Event, Finish, Guide, Request, check_prompt
from engine.runner import Emission, Emitted, ModelRunner, SlotRange, arrived, batch_sizes
from engine.sampling import Modes, Sampling
from engine.scheduler import Choice, Scheduler
from engine.slots import Slots
from model import Transformer
from tokens.tokenizer import Tokenizer
from tree import TreeShape


class Pending(NamedTuple):
    """A pass whose emission has not been read."""

    requests: list[Request | None]  # by row; None: not in this pass
    emission: Emission
    shape: TreeShape | None = None  # None: a pass over prompts
    drafts: list[Draft] | None = None
    head: bool = False  # the scheduler chose a step with the head
    record: object = None  # of the scheduler, see `Scheduler.launched`


class Engine:
    """Decodes up to `batch` requests at a time with one target and one drafter (None: plain decoding).

    - max_seq_len: most tokens of prompt and output
    - stop_ids: any of them ends a sequence
    - compile: run prefill and step through torch.compile, unless the target is on our CPU kernels. On CUDA
      they are also captured as graphs.
    - log: called with one line when something slow, such as compilation, starts and ends
    - chunks: prompt tokens per prefill pass
    - lag: how many steps the host trails the device when it reads outputs; None is 1 on CUDA, 0 elsewhere
    - scheduler: chooses the drafter and tree of each step; None: always the drafter's own tree
    - counts: batch sizes that steps are compiled or captured for, ascending; `batch` is the last
    - tokenizer: gives requests their text
    - guide: makes the `Guide` of sampling options that need one
    - self_check: called once, at the start of the first warmup (`engine.check`)

    Raises ValueError, with the numbers, if the caches do not fit in memory.
    """

    self_check: Callable[[ModelRunner, Modes, Callable[[str], None]], None] | None = None

    def __init__(
        self, target: Transformer, drafter: Drafter | None = None, *, batch: int = 1, max_seq_len: int = 2048,
        stop_ids: Iterable[int] = (), compile: bool = True, log: Callable[[str], None] = lambda line: None,
        chunks: tuple[int, ...] | None = None, lag: int | None = None, scheduler: Scheduler | None = None,
        counts: tuple[int, ...] | None = None, tokenizer: Tokenizer | None = None,
        guide: Callable[[Sampling], Guide] | None = None,
    ):
        self.target = target = target.for_length(max_seq_len)
        self.drafter, self.scheduler = drafter or Drafter(), scheduler or Scheduler()
        self.batch, self.max_seq_len, self.tokenizer, self.guide = batch, max_seq_len, tokenizer, guide
        self.stop_ids = frozenset(stop_ids)
        self.runner = ModelRunner(
            target, self.drafter, batch, max_seq_len, stop_ids=self.stop_ids, compile=compile, log=log,
            chunks=chunks, variants=self.scheduler.variants(self.drafter),
        )
        self.state, self.device = self.runner.state, self.runner.device
        on_cuda = self.device.type == "cuda"
        self.lag = int(on_cuda) if lag is None else lag
        # A step of a recurrent target must leave out sequences in prefill: it needs smaller batches too.
        self.batch_sizes = (not target.is_recurrent and counts) or batch_sizes(batch, on_cuda)
        self.scheduler.attach(self)
        self.slots = Slots(self.runner, self.drafter, batch, self.lag)
        self._pending: deque[Pending] = deque()
        self._inbox: dict[Request, deque[Event]] = {}  # events that a `run` has not yielded yet
        self._modes: Modes | None = None  # of the requests that decode; None when some come or go
        self.prompt_seconds = 0.0  # host time spent on prefill; on a GPU only the launches

    @property
    def free(self) -> int:
        """Number of requests that could be admitted now."""
        return self.slots.free

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Most tokens of prompt and output, here and in the model."""
        return self.max_seq_len, self.target.args.max_seq_len

    @property
    def busy(self) -> bool:
        """True while prompts are read or requests decode."""
        return self.free < self.batch

    @property
    def requests(self) -> list[Request]:
        """The requests that hold a slot."""
        return [request for request in self.slots.requests if request]

    # -- admit and leave ----------------------------------------------------------------------

    def check(self, prompt: list[int], sampling: Sampling, name: str = "the prompt") -> None:
        """Raise ValueError, with the numbers, if a request cannot be decoded."""
        size = self.target.args.vocab_size
        check_prompt(prompt, name, self.max_lengths, size)
        if sampling.is_guided and self.guide is None:
            raise ValueError("a JSON schema needs a tokenizer and an end token; this checkpoint lacks one")
        if sampling.stop and self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer: leave out stop texts (--stop)")
        for token, _ in sampling.logit_bias:
            if token >= size:
                raise ValueError(f"logit_bias holds token id {token}, the vocabulary is 0..{size - 1}")

    def admit(
        self, prompt: list[int], sampling: Sampling = Sampling(), *, guide: Guide | None = None,
        watch: bool = False, plain: bool = False, score_prompt: bool = False, shown: Collection[int] = (),
        continues: bool = False,
    ) -> Request:
        """Give a request a free slot.

        guide: of its sampling options, if that has been made already. watch: its events carry the drafted
        trees. plain: decode it without drafts. score_prompt: collect `Request.prompt_scores`; the whole
        prompt is read for that. shown, continues: of its `TextStream`. Raises ValueError, with the numbers,
        if the request cannot be decoded; RuntimeError if no slot is free.
        """
        if not self.free:
            raise RuntimeError(f"all {self.batch} slots are taken")
        self.check(prompt, sampling)
        if sampling.is_guided and guide is None:
            guide = self.guide(sampling)
        stream = self.tokenizer and self.tokenizer.output_stream(sampling, shown, continues)
        request = Request(prompt, sampling, guide, stream, watch, plain, [] if score_prompt else None)
        shared = self.slots.assign(request)
        # Recompute the last shared token: its entry in the head's cache also encodes the old next token.
        request.cached = request.read = 0 if score_prompt else max(0, min(shared, len(prompt)) - 1)
        self.runner.caches.start_request(request.slot, request.cached)
        try:
            self.state.start_request(request.slot, prompt, sampling, self.max_seq_len)
            self.state.done[request.slot] = True  # frozen until its prompt is read
            self.drafter.reset(request.slot, prompt)
            self.scheduler.add(request)
            if guide:
                self.state.processors.mask(request.slot, guide, [0], [0])
        except BaseException:
            self.remove(request)
            raise
        return request

    def remove(self, request: Request) -> None:
        """Free the slot of a request, whether it has finished or not. The caches keep its tokens."""
        if request.active:
            self.state.done[request.slot], self.state.reading[request.slot] = True, False
            self._modes = None
            self.slots.release(request)

    # -- step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Read a chunk of prompts, if there are any to read, and run one step of all that decode.

        Returns what has been emitted; a request whose event has a `finish` has left.
        """
        events, unread = [], 0
        if self.slots.reading:
            began = time.perf_counter()
            last = self._prefill_chunk()
            self.prompt_seconds += time.perf_counter() - began
            if last:
                events += self._collect(0)
        if decoding := self.slots.requests[: self.slots.decoding]:
            began = time.perf_counter()
            record = self._launch(decoding)
            unread = 0 if any(r.guide for r in decoding) else self.lag
            events += self._collect(unread)
            if record is not None and self.lag == 0:  # with lag, the step may still be running
                self.scheduler.timed(record, time.perf_counter() - began)
        return events if unread else events + self._collect(0)

    def run(
        self, prompts: list[list[int]], samplings: list[Sampling], requests: list[Request], **options
    ) -> Iterator[Event]:
        """Decode prompts and yield their events. A finished request frees its slot for the next.

        requests: receives the requests in order, when they are admitted. options: of `admit`. If the caller
        stops early (Ctrl-C), unfinished requests are removed. Raises ValueError as `admit`, before decoding.
        """
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings)):
            self.check(prompt, sampling, f"prompt {i + 1}" if len(prompts) > 1 else "the prompt")
        here: list[Request] = []
        try:
            while here or len(requests) < len(prompts):
                while self.free and len(requests) < len(prompts):
                    request = self.admit(prompts[len(requests)], samplings[len(requests)], **options)
                    requests.append(request)
                    here.append(request)
                    self._inbox[request] = deque()
                if not any(self._inbox[request] for request in here):
                    for event in self.step():
                        if event.request in self._inbox:  # maybe of another run: both get theirs
                            self._inbox[event.request].append(event)
                for request in [*here]:
                    while self._inbox[request]:
                        event = self._inbox[request].popleft()
                        if event.finish:
                            here.remove(request)
                        yield event
                    if request not in here:
                        del self._inbox[request]
        finally:
            for request in requests:
                self._inbox.pop(request, None)
            for request in here:
                self.remove(request)

    def generate(
        self, prompts: list[list[int]], sampling: Sampling | list[Sampling] = Sampling(), **options
    ) -> list[Request]:
        """Decode any number of prompts to their end; see `run`.

        Raises ValueError as `admit` does, and if a JSON schema cannot be followed to its end.
        """
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        requests: list[Request] = []
        for event in self.run(prompts, samplings, requests, **options):
            if event.finish == "error":
                raise ValueError(event.request.error)
        return requests

    def finish_prompts(self) -> None:
        """Prefill all prompts without decoding."""
        while self.slots.reading:
            self._prefill_chunk()
            self._collect(0)

    def _prefill_chunk(self) -> bool:
        """Prefill one chunk: of all waiting prompts if nothing decodes, else of the oldest one only.

        Returns whether a prompt is now complete; its request decodes from now on.
        """
        slots, runner = self.slots, self.runner
        reading = slots.requests[slots.decoding : slots.decoding + slots.reading]
        if slots.decoding or any(r.prompt_scores is not None for r in reading):
            reading = [min(reading, key=lambda r: slots.used_at[r.slot])]
        group = runner.slot_range(reading[0].slot, len(reading))
        if runner.prepared and len(reading) > 1:  # prefill is compiled for one sequence and for all
            group = runner.slot_range(0, self.batch)
        size = runner.chunk_size(max(len(r.prompt) - r.read for r in reading))
        starts = [len(tokens) for tokens in slots.cached]  # do not overwrite the prefix in a free slot
        ending: list[Request | None] = [None] * group.count
        for r in reading:
            starts[r.slot] = r.read
            if len(r.prompt) - r.read <= size:
                ending[r.slot - group.first] = r
                self.state.done[r.slot] = False
        starts = starts[group.first : group.first + group.count]
        group.chunk_start.copy_(torch.tensor(starts))
        modes = Modes.of_requests([r.sampling for r in ending if r]) if any(ending) else None
        x = runner.prefill(group, runner.span(max(starts) + size), size, modes)
        if reading[0].prompt_scores is not None:
            extensions.load(extensions.PROMPT_SCORES)(runner, reading[0], x)
        for r in reading:
            r.read = min(r.read + size, len(r.prompt))
        if modes is None:
            return False
        self._pending.append(Pending(ending, runner.to_host(group.state, modes.scored)))
        for r in filter(None, ending):
            self.slots.start_decoding(r)
        self._modes = None
        return True

    def _launch(self, requests: list[Request]) -> object:
        """Launch one step of the requests that decode. Returns the scheduler's record of it, if any.

        One `plain` request keeps the others from drafting.
        """
        runner, plain = self.runner, any(r.plain for r in requests)
        group = runner.slot_range(0, next(count for count in self.batch_sizes if count >= len(requests)))
        context = max(r.length for r in requests)
        span = runner.span(context + len(self._pending) * runner.max_commit + runner.extra)
        if self._modes is None:
            self._modes = Modes.of_requests([r.sampling for r in requests], compiled=runner.compiled)
        modes = self._modes
        choice = Choice(runner.plain) if plain else self.scheduler.next(requests, group, span)
        if runner.unread:
            self._catch_up(group, span, choice.drafter, requests)
        guides = {r.slot: r.guide for r in requests if r.guide} or None
        tree, path = runner.step(group, span, choice.drafter, modes, guides, choice.costs)
        drafts = None
        if any(r.watch for r in requests):
            parts = [x.tolist() for x in (tree.tokens, tree.parent, path)]
            scores = [None] * len(parts[0]) if tree.scores is None else tree.scores.tolist()
            drafts = [Draft(*x) for x in zip(*parts, scores)]
        shape, record = choice.drafter.shape, None
        if choice.costs:
            shape = shape.limited(tree.tokens.shape[1], tree.levels)
        if not plain:
            record = self.scheduler.launched(choice, group, tree, modes.noisy)
        emission = runner.to_host(group.state, modes.scored)
        self._pending.append(Pending(requests, emission, shape, drafts, choice.head, record))
        return record

    def _catch_up(
        self, group: SlotRange, span: torch.Tensor, drafter: Drafter, requests: list[Request]
    ) -> None:
        """Run the head on committed tokens that it has not seen, as far as a step with `drafter` needs: on a
        CPU one call per request, on a GPU one for all.
        """
        runner, alone, committed = self.runner, self.device.type == "cpu", drafter.shape.max_commit
        for some in [[r.slot] for r in requests] if alone else [[r.slot for r in requests]]:
            unread = max(self.slots.unread[slot] for slot in some)
            if unread > (runner.max_commit if drafter.reads else runner.unread - committed):
                runner.prefill_unread(runner.slot_range(some[0], 1) if alone else group, span, unread)
                unread = 1
            for slot in some:
                self.slots.unread[slot] = runner.max_commit if drafter.reads else unread + committed

    def _collect(self, in_flight: int) -> list[Event]:
        """Return the events of finished passes, oldest first, until only `in_flight` passes are left."""
        events = []
        while len(self._pending) > in_flight:
            done = self._pending.popleft()
            logprobs = [r.sampling.logprobs if r else None for r in done.requests]
            for i, (request, emitted) in enumerate(zip(done.requests, arrived(done.emission, logprobs))):
                if request and request.active:
                    draft = done.drafts[i] if done.drafts and request.watch else None
                    events.append(self._event(request, emitted, done, i, draft))
        return events

    def _event(
        self, request: Request, emitted: Emitted, done: Pending, row: int, draft: Draft | None
    ) -> Event:
        """Append a pass's output to a request and return its event; remove the request if it has finished.

        row: its row in the pass.
        """
        now, shape, before = time.perf_counter(), done.shape, request.last
        if done.record is not None:
            self.scheduler.emitted(done.record, row, request, len(emitted.ids))
        if request.guide:
            request.guide.advance(emitted.ids)
            request.error = request.guide.error
        text, count = request.emit(emitted.ids, emitted.scores)
        request.first, request.last = request.first or now, now
        if shape:
            request.accept_lengths.append(count)
            request.trees["plain" if shape.nodes == 1 else shape.name] += 1
            request.step_times["drafted" if done.head or shape.nodes > 1 else "plain"].append(now - before)
        request.finish = self._finish(request, emitted)
        if request.finish:
            text += request.flush()
            self.drafter.finish(request.tokens)
            self.remove(request)
        drafted = min(emitted.drafted, count)
        return Event(
            request, emitted.ids[:count], text, drafted, emitted.scores[:count],
            shape.nodes - 1 if shape else 0, draft, request.finish,
        )

    def _finish(self, request: Request, emitted: Emitted) -> Finish | None:
        """Return why a request has finished, None if it goes on."""
        if request.error:
            return "error"
        if request.stop is not None:
            return "stop"
        if not emitted.done:
            return None
        if request.ids and request.ids[-1] in self.stop_ids:
            return "stop"
        return "cache" if len(request.tokens) >= self.max_seq_len else "length"

    # -- warmup -------------------------------------------------------------------------------

    @torch.no_grad()
    def warm_up(self, *samplings: Sampling, every_length: bool = False) -> None:
        """Run, compile and capture what requests with these samplings need, and let the scheduler time steps.

        Default: greedy. every_length: cover all lengths, slots and sampling modes too, so that nothing is
        compiled or captured later.
        """
        if check := self.self_check:
            self.self_check = None  # it overwrites the caches of all slots
            check(self.runner, Modes.of_requests((samplings or (Sampling(),))[:1]), self.runner.fell_back)
        stop_ids = self.state.stop_ids.clone()
        self.state.stop_ids.fill_(-1)  # the first token might be one of them, and no step would run
        try:
            for sampling in samplings or (Sampling(),):
                sampling = replace(sampling, stop=(), json_schema=None, limits=None)
                self.generate([[0]], replace(sampling, max_new_tokens=2))
                self.scheduler.warm_up(self, sampling)
                if self.runner.prepared:
                    extensions.load(extensions.LAUNCH_ALL)(self, Modes.of_requests([sampling]), every_length)
        finally:
            self.state.stop_ids.copy_(stop_ids)
