"""The engine: requests are admitted, stepped and leave. Everything that decodes uses it.

    request = engine.admit([1, 9690, 198], Sampling(max_new_tokens=64))
    while engine.busy:
        for event in engine.step():
            print(event.text)

A request is admitted between two steps into a free place of the batch. Its prompt is read in chunks; the
others go on decoding between them. A request that ends leaves at once. Places are in groups: first the
requests that decode, then those whose prompts are being read, then the free ones. So a step works on
only the sequences that decode, and a scheduler may choose a smaller tree as they become more.

A free place keeps its tokens. A request that begins like them, or like a running one, reads only the rest.

On CUDA a step reads nothing back to the host before it is launched, unless a grammar follows its text. The
device decides where a text stops (stop ids, token limit) and cuts it exactly there. The host learns what was
emitted from small buffers, on CUDA one step late.
"""
from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.draft import Drafter
from engine.passes import Emission, Emitted, Passes, Rows, arrived, mask, step_counts
from engine.prompt import check_prompt
from engine.request import Draft, Event, Finish, Guide, Request, Score
from engine.scheduler import Choice, Scheduler
from model import Transformer
from sampling.adjust import log_probabilities
from sampling.options import MAX_LOGPROBS, Modes, Sampling
from tokens.tokenizer import Tokenizer, common_prefix
from tree import TreeShape

DRAFTED, PLAIN, READING = range(3)  # groups: decoding with drafts, decoding without as asked for, reading
WORTH_COPYING = 32  # tokens of a text in another place, beyond what a free place holds


class Pending(NamedTuple):
    """A pass whose emission has not been read."""

    requests: list[Request | None]  # by row; None: of no interest
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
    - say: called with one line when something slow, such as compilation, starts and ends
    - chunks: prompt tokens per prefill pass
    - lag: how many steps the host reads late; None is 1 on CUDA, 0 elsewhere
    - scheduler: chooses the drafter and tree of each step; None: always the drafter's own tree
    - counts: numbers of sequences that steps exist for (`step_counts`), `batch` last
    - tokenizer: gives requests their text
    - guide: makes the `Guide` of sampling options that need one
    - self_check: called once, at the start of the first warmup (`engine.check`)

    Raises ValueError, with the numbers, if the caches do not fit in memory.
    """

    self_check: Callable[[Passes, Modes, Callable[[str], None]], None] | None = None

    def __init__(
        self, target: Transformer, drafter: Drafter | None = None, *, batch: int = 1, max_seq_len: int = 2048,
        stop_ids: Iterable[int] = (), compile: bool = True, say: Callable[[str], None] | None = None,
        chunks: tuple[int, ...] | None = None, lag: int | None = None, scheduler: Scheduler | None = None,
        counts: tuple[int, ...] | None = None, tokenizer: Tokenizer | None = None,
        guide: Callable[[Sampling], Guide] | None = None,
    ):
        self.target = target = target.for_length(max_seq_len)
        self.drafter, self.scheduler = drafter or Drafter(), scheduler or Scheduler()
        self.batch, self.max_seq_len, self.tokenizer, self.guide = batch, max_seq_len, tokenizer, guide
        self.stop_ids = frozenset(stop_ids)
        self.passes = Passes(
            target, self.drafter, batch, max_seq_len, stop_ids=self.stop_ids, compile=compile,
            say=say or (lambda line: None), chunks=chunks,
            variants=self.scheduler.variants(self.drafter),
        )
        self.state, self.device, self.slots = self.passes.state, self.passes.device, self.passes.slots
        self.max_commit, self.cache_bytes = self.passes.max_commit, self.passes.cache_bytes
        self.lag = int(self.device.type == "cuda") if lag is None else lag
        self.scheduler.attach(self.passes, self.lag == 0)
        # A step may not touch a text whose prompt is still read, if a target keeps a state of it.
        few = self.device.type == "cuda"
        self.step_counts = (not target.keeps_state and counts) or step_counts(batch, few)
        self._requests: list[Request | None] = [None] * batch  # by place, as the next three
        self._kept: list[list[int]] = [[] for _ in range(batch)]  # tokens in the caches of a free place
        self._unread = [1] * batch  # how many of these the drafter has not read, at most
        self._used = [0] * batch  # when a place was taken or left
        self._sizes = [0, 0, 0]  # of the groups, which lie one after the other
        self._serial = 0
        self._pending: deque[Pending] = deque()
        self._inbox: dict[Request, deque[Event]] = {}  # events that a `run` has not yielded yet
        self._modes: list[Modes | None] = [None, None]  # of DRAFTED, PLAIN; None: the group has changed
        self.prompt_seconds = 0.0  # of the host, on prompts; on a GPU it does not wait for them

    @property
    def free(self) -> int:
        """Number of requests that could be admitted now."""
        return self.batch - sum(self._sizes)

    @property
    def busy(self) -> bool:
        """True while requests are read or decoded."""
        return any(self._sizes)

    @property
    def requests(self) -> list[Request]:
        """The requests that hold a place."""
        return [request for request in self._requests if request]

    # -- admit and leave ----------------------------------------------------------------------

    def check(self, prompt: list[int], sampling: Sampling, name: str = "the prompt") -> None:
        """Raise ValueError, with the numbers, if a request cannot be decoded."""
        size = self.target.args.vocab_size
        check_prompt(prompt, name, self.max_seq_len, size)
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
        """Give a request a free place.

        guide: of its sampling options, if that has been made already. watch: its events carry the drafted
        trees. plain: decode it without drafts. score_prompt: collect `Request.prompt_scores`; the whole
        prompt is read for that. shown, continues: of its `TextStream`. Raises ValueError, with the numbers,
        if the request cannot be decoded; RuntimeError if no place is free.
        """
        if not self.free:
            raise RuntimeError(f"all {self.batch} places are taken")
        self.check(prompt, sampling)
        if sampling.is_guided and guide is None:
            guide = self.guide(sampling)
        stream = self.tokenizer and self.tokenizer.output(sampling, shown, continues)
        request = Request(prompt, sampling, guide, stream, watch, plain, [] if score_prompt else None)
        request.place, same = self._place_for(prompt)
        # One token back: the drafter's last row was read together with the token that followed it then.
        request.cached = request.read = 0 if score_prompt else max(0, min(same, len(prompt)) - 1)
        self._requests[request.place], self._kept[request.place] = request, []
        self._sizes[READING] += 1
        self._touch(request.place)
        self.passes.caches.begin(request.place, request.cached)
        try:
            self.state.begin(request.place, prompt, sampling, self.max_seq_len)
            self.state.done[request.place] = True  # held still until its prompt is read
            self.drafter.reset(request.place, prompt)
            self.scheduler.add(request)
            if guide:
                mask(self.state.allowed[request.place], guide, [0], [0])
        except BaseException:
            self.leave(request)
            raise
        return request

    def _touch(self, place: int) -> None:
        self._serial += 1
        self._used[place] = self._serial

    def _place_for(self, prompt: list[int]) -> tuple[int, int]:
        """Return the first free place, now with the longest known beginning of the prompt, and its length.

        A text that would be lost for a short beginning is copied from instead.
        """
        first = sum(self._sizes)
        free = range(first, self.batch)
        held = {place: self._kept[place] for place in free}
        held |= {request.place: self._held(request) for request in self.requests}
        same = {
            place: self.passes.caches.reusable(place, common_prefix(prompt, tokens))
            for place, tokens in held.items()
        }
        source = max(same, key=same.__getitem__)
        target = min(free, key=self._used.__getitem__)  # whose text is missed least
        lost = len(self._kept[source]) - same[source]
        if source in free and (lost <= WORTH_COPYING or 2 * lost <= len(self._kept[target])):
            target = source
        elif same[source] < same[target] + WORTH_COPYING:
            source = target
        self._let_read(source, same[source])
        self._exchange(target, first)
        if source != target:
            now = target if source == first else source
            for here, there in zip(*(self._sequence(place, same[source]) for place in (first, now))):
                here.copy_(there)
        return first, same[source]

    def _let_read(self, place: int, tokens: int) -> None:
        """Let the drafter read what it has not of the first tokens in a place."""
        request = self._requests[place]
        held = self._held(request) if request else self._kept[place]
        unread = request.unread if request else self._unread[place]
        if not self.passes.unread or tokens <= max(0, len(held) + 1 - unread):
            return
        span = self.passes.span(int(self.state.length[place]))
        with torch.no_grad():
            self.passes.read_behind(self.passes.rows(place, 1), span, unread)
        if request:
            request.unread = 1
        self._unread[place] = 1

    def _held(self, request: Request) -> list[int]:
        """Tokens of a request in the target's caches, and, except the unread ones, in the drafter's."""
        if self._group(request) == READING:
            return request.prompt[: request.read]
        return request.tokens[: max(0, request.length - 1)]

    def leave(self, request: Request) -> None:
        """Free the place of a request, whether it has ended or not. The caches keep its tokens."""
        place = request.place
        if not request.here:
            return
        group = self._group(request)
        self._unread[place], self._kept[place] = request.unread, self._held(request)
        request.here, self._requests[place] = False, None
        self.state.done[place], self.state.reading[place] = True, False
        if group != READING:
            self._modes[group] = None
        self._touch(place)
        # The last of each group takes the place that becomes free before it.
        for following in range(group, len(self._sizes)):
            last = sum(self._sizes[: following + 1]) - 1
            if following == group or self._sizes[following]:
                self._exchange(place, last)
                place = last
        self._sizes[group] -= 1

    def _group(self, request: Request) -> int:
        return next(group for group in range(3) if request.place < sum(self._sizes[: group + 1]))

    def _decode(self, request: Request) -> None:
        """A request whose prompt has been read joins those that decode."""
        self.passes.caches.keep(request.place)
        group = PLAIN if request.plain else DRAFTED
        for passed in range(READING, group, -1):
            self._exchange(request.place, sum(self._sizes[:passed]))
            self._sizes[passed] -= 1
            self._sizes[passed - 1] += 1
        self._modes[group] = None

    def _exchange(self, one: int, other: int) -> None:
        """Exchange two places and all that is in them."""
        if one == other:
            return
        if slots := max(self._live(one), self._live(other)):
            for a, b in zip(self._sequence(one, slots), self._sequence(other, slots)):
                kept = a.clone()  # of one layer at a time: all of a long text's would take gigabytes
                a.copy_(b)
                b.copy_(kept)
        self.state.exchange(one, other)
        for of_place in (self._requests, self._kept, self._unread, self._used):
            of_place[one], of_place[other] = of_place[other], of_place[one]
        for place in (one, other):
            if request := self._requests[place]:
                request.place = place

    def _live(self, place: int) -> int:
        """Return an upper bound on the slots in use in a place."""
        if request := self._requests[place]:
            return min(request.length + (self.lag + 1) * self.max_commit, self.slots)
        return len(self._kept[place])

    def _sequence(self, place: int, slots: int) -> list[torch.Tensor]:
        """Return views of all that is in the caches of a place."""
        return self.passes.caches.sequence(place, slots) + self.drafter.sequence(place, slots)

    # -- step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Read a chunk of prompts, if there are any to read, and run one step of all that decode.

        Returns what has been emitted; a request whose event has a `finish` has left.
        """
        events: list[Event] = []
        if self._sizes[READING]:
            began = time.perf_counter()
            last = self._read_prompts()
            self.prompt_seconds += time.perf_counter() - began
            if last:
                events += self._read(0)
        keep = 0
        for group in (DRAFTED, PLAIN):
            if self._sizes[group]:
                began = time.perf_counter()
                record = self._launch(group)
                keep = 0 if any(r.guide for r in self._members(group)) else self.lag
                events += self._read(keep)
                if record is not None and self.lag == 0:  # else the step is only launched by now
                    self.scheduler.timed(record, time.perf_counter() - began)
        return events if keep else events + self._read(0)

    def run(
        self, prompts: list[list[int]], samplings: list[Sampling], requests: list[Request], **options
    ) -> Iterator[Event]:
        """Decode any number of prompts, yielding what they gain: a request that ends makes room for the next.

        requests: receives the requests in order, when they are admitted. options: of `admit`. If it is left
        early, as by Ctrl-C, no request stays here. Raises ValueError as `admit` does, before any decoding.
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
                self.leave(request)

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

    def _members(self, group: int) -> list[Request]:
        first = sum(self._sizes[:group])
        return self._requests[first : first + self._sizes[group]]

    def _read_prompts(self) -> bool:
        """Read one chunk: of all prompts while nothing decodes, else of the one that came first.

        Returns whether a prompt was read to its end; that request decodes from now on.
        """
        reading, passes = self._members(READING), self.passes
        alone = not (self._sizes[DRAFTED] or self._sizes[PLAIN])
        if not alone or any(r.prompt_scores is not None for r in reading):
            reading = [min(reading, key=lambda r: self._used[r.place])]
        rows = passes.rows(reading[0].place, len(reading))
        if passes.prepared and len(reading) > 1:  # passes exist for one sequence and for all
            rows = passes.rows(0, self.batch)
        size = passes.chunk_size(max(len(r.prompt) - r.read for r in reading))
        starts = [len(kept) for kept in self._kept]  # keep the tokens of a free place
        ending: list[Request | None] = [None] * rows.count
        for r in reading:
            starts[r.place] = r.read
            if len(r.prompt) - r.read <= size:
                ending[r.place - rows.first] = r
                self.state.done[r.place] = False
        starts = starts[rows.first : rows.first + rows.count]
        rows.chunk_start.copy_(torch.tensor(starts))
        modes = Modes.of([r.sampling for r in ending if r]) if any(ending) else None
        x = passes.prefill(rows, passes.span(max(starts) + size), size, modes)
        if reading[0].prompt_scores is not None:
            self._score_prompt(reading[0], x)
        for r in reading:
            r.read = min(r.read + size, len(r.prompt))
        if modes is None:
            return False
        self._pending.append(Pending(ending, passes.to_host(rows.state, modes.scored)))
        for r in filter(None, ending):
            self._decode(r)
        return True

    def _score_prompt(self, request: Request, x: torch.Tensor) -> None:
        """Score the prompt tokens after those of a chunk, whose last states are x [1, C, H]."""
        after = request.prompt[request.read + 1 : request.read + 1 + x.shape[1]]
        if not after:
            return
        logits = self.passes.logits(x)[:, : len(after)]
        own, top, ids = log_probabilities(logits, torch.tensor([after], device=x.device), MAX_LOGPROBS)
        found = zip(own[0].tolist(), top[0].tolist(), ids[0].tolist())
        wanted = request.sampling.logprobs or 0
        request.prompt_scores += [Score(o, list(zip(i, t))[:wanted]) for o, t, i in found]

    def _launch(self, group: int) -> object:
        """Launch one step of a group that decodes. Return the scheduler's record of it, if any."""
        requests, first = self._members(group), sum(self._sizes[:group])
        before = first if self.passes.prepared else 0  # prepared steps begin with the batch's first row
        count = next(c for c in self.step_counts if c >= before + len(requests))
        rows = self.passes.rows(min(first - before, self.batch - count), count)
        offset = first - rows.first  # of the group's requests in those rows
        context = max(r.length for r in requests)
        span = self.passes.span(context + len(self._pending) * self.max_commit + self.passes.extra)
        if self._modes[group] is None:
            self._modes[group] = Modes.of([r.sampling for r in requests], few=self.passes.compiled)
        modes = self._modes[group]
        choice = Choice(self.passes.plain) if group == PLAIN else self.scheduler.next(requests, rows, span)
        if self.passes.unread:
            self._keep_up(rows, span, choice.drafter, requests)
        rows.state.costs = choice.costs
        guides = {offset + i: r.guide for i, r in enumerate(requests) if r.guide} or None
        with self._held_still(rows, group):
            tree, path = self.passes.step(rows, span, choice.drafter, modes, guides)
        drafts = None
        if any(r.watch for r in requests):
            score = tree.scores
            parts = (x[offset:].tolist() for x in (tree.tokens, tree.parent, path))
            scored = [None] * len(requests) if score is None else score[offset:].tolist()
            drafts = [Draft(*x) for x in zip(*parts, scored)]
        emission = self.passes.to_host(self.passes.rows(first, len(requests)).state, modes.scored)
        shape, record = choice.drafter.shape, None
        if choice.costs:
            shape = shape.limited(tree.tokens.shape[1], rows.state.levels)
        if group == DRAFTED:
            record = self.scheduler.launched(choice, requests, rows, offset, tree, modes.noisy)
        self._pending.append(Pending(requests, emission, shape, drafts, choice.head, record))
        return record

    @contextlib.contextmanager
    def _held_still(self, rows: Rows, group: int) -> Iterator[None]:
        """Hold the requests of the other group still that are among these rows: steps exist for few numbers
        of sequences only.
        """
        other = PLAIN if group == DRAFTED else DRAFTED
        first = sum(self._sizes[:other])
        places = range(max(first - rows.first, 0), min(first + self._sizes[other] - rows.first, rows.count))
        if not places:
            yield
            return
        done = rows.state.done[places.start : places.stop]
        before = done.clone()
        done.fill_(True)
        try:
            yield
        finally:
            done.copy_(before)

    def _keep_up(self, rows: Rows, span: torch.Tensor, drafter: Drafter, requests: list[Request]) -> None:
        """Before a step with this drafter: let the head read what it must of each request. On a CPU, where a
        call costs little, it reads no more than that.
        """
        passes, alone, committed = self.passes, self.device.type == "cpu", drafter.shape.max_commit
        for some in [[r] for r in requests] if alone else [requests]:
            unread = max(r.unread for r in some)
            if unread > self.max_commit if drafter.reads else unread + committed > passes.unread:
                passes.read_behind(passes.rows(some[0].place, 1) if alone else rows, span, unread)
                unread = 1
            for r in some:
                r.unread = self.max_commit if drafter.reads else unread + committed

    def _read(self, keep: int) -> list[Event]:
        """Read what passes have emitted, oldest first, until only `keep` are unread."""
        events = []
        while len(self._pending) > keep:
            done = self._pending.popleft()
            logprobs = [r.sampling.logprobs if r else None for r in done.requests]
            for i, (request, emitted) in enumerate(zip(done.requests, arrived(done.emission, logprobs))):
                if request and request.here:
                    draft = done.drafts[i] if done.drafts and request.watch else None
                    events.append(self._event(request, emitted, done, i, draft))
        return events

    def _event(
        self, request: Request, emitted: Emitted, done: Pending, row: int, draft: Draft | None
    ) -> Event:
        """Add what a pass emitted to a request, which leaves if that ends it. row: its row in the pass."""
        now, shape, before = time.perf_counter(), done.shape, request.last
        if done.record is not None:
            self.scheduler.emitted(done.record, row, request, len(emitted.ids))
        if request.guide:
            request.guide.take(emitted.ids)
            request.error = request.guide.error
        text, count = request.emit(emitted.ids, emitted.scores)
        request.first, request.last = request.first or now, now
        if shape:
            request.accept_lengths.append(count)
            request.trees[shape.name] += 1
            request.spent["drafted" if done.head or shape.nodes > 1 else "plain"].append(now - before)
        request.finish = self._finish(request, emitted)
        if request.finish:
            text += request.flush()
            self.drafter.finish(request.tokens)
            self.leave(request)
        drafted = min(emitted.drafted, count)
        return Event(
            request, emitted.ids[:count], text, drafted, emitted.scores[:count],
            shape.nodes - 1 if shape else 0, draft, request.finish,
        )

    def _finish(self, request: Request, emitted: Emitted) -> Finish | None:
        """Return why a request has ended, None if it goes on."""
        if request.error:
            return "error"
        if request.stop is not None:
            return "stop"
        if not emitted.done:
            return None
        if request.ids and request.ids[-1] in self.stop_ids:
            return "stop"
        return "cache" if len(request.tokens) >= self.max_seq_len else "length"

    # -- warm-up ------------------------------------------------------------------------------

    def explain(self, noisy: bool) -> str | None:
        """Return a line about what is drafted, if there is anything to say. noisy: at temperatures above 0.
        """
        return self.scheduler.describe(self._rehearsed, noisy)

    @property
    def _rehearsed(self) -> list[int]:
        """Numbers of sequences whose steps are rehearsed."""
        return sorted({self.step_counts[0], self.batch})

    @torch.no_grad()
    def warm_up(self, *samplings: Sampling, every_length: bool = False) -> None:
        """Run, compile and capture what requests with these samplings need, and let the scheduler time steps.

        Default: greedy. every_length: also what prompts and texts of every length need, in every place, with
        all other options: after that nothing is compiled or captured.
        """
        if check := self.self_check:
            self.self_check = None  # it overwrites the caches of all slots
            check(self.passes, Modes.of((samplings or (Sampling(),))[:1]), self.passes.fell_back)
        stop_ids = self.state.stop_ids.clone()
        self.state.stop_ids.fill_(-1)  # the first token might be one of them, and no step would run
        try:
            for sampling in samplings or (Sampling(),):
                sampling = replace(sampling, stop=(), json_schema=None, limits=None)
                repeated = [0] * min(16, self.max_seq_len - 1)  # prompt lookup has a draft there
                for prompt in ([0], repeated) if self.drafter.may_pass else ([0],):
                    self.generate([prompt], replace(sampling, max_new_tokens=2))
                self._rehearse(sampling)
                if self.passes.prepared:
                    self._launch_all(Modes.of([sampling]), every_length)
        finally:
            self.state.stop_ids.copy_(stop_ids)

    def _rehearse(self, sampling: Sampling) -> None:
        """Let the scheduler time steps, of one sequence and of the whole batch."""
        long = replace(sampling, max_new_tokens=self.max_seq_len)
        lag, self.lag = self.lag, 0

        def run(count: int) -> None:
            while len(self.requests) < count:
                self.admit([0], long)
            while self._sizes[READING]:
                self._read_prompts()
                self._read(0)
            self.step()

        try:
            self.scheduler.warm_up(self._rehearsed, sampling.temperature > 0, run)
        finally:
            self.lag = lag
            for request in self.requests:
                self.leave(request)

    def _launch_all(self, modes: Modes, every_length: bool) -> None:
        """Launch a step of every kind for every number of sequences, which changes nothing."""
        passes = self.passes
        needs = range(1, self.slots + 1, 64) if every_length and passes.captured else (1,)
        spans = {span.shape[0]: span for span in map(passes.span, needs)}
        kinds = dict.fromkeys((*self.scheduler.drafters, *((passes.plain,) if every_length else ())))
        rare = Modes.every(modes.noisy)
        with passes.still():
            for number, span in enumerate(spans.values()):
                for count in self.step_counts:
                    rows = passes.rows(0, count)
                    for drafter in kinds:
                        passes.step(rows, span, drafter, modes)
                        if every_length:
                            passes.step(rows, span, drafter, rare)
                            passes.step(rows, span, drafter, rare, {})
                    for unread in passes.chunks if every_length and passes.unread else ():
                        passes.read_behind(rows, span, min(unread, passes.unread))
                # Prompts are read in each place alone, and in all of them together.
                places = {(place, 1) for place in range(1 if number else self.batch)}
                for size in passes.chunks if every_length else ():
                    for first, count in sorted(places | {(0, self.batch)}):
                        if size <= span.shape[0]:
                            x = passes.prefill(passes.rows(first, count), span, size, rare)
                            if (first, count) == (0, 1):  # as `_score_prompt`
                                passes.logits(x)
