"""The decoder: it takes a batch of prompts, and replays the step until every text ends.

A step never reads a value back to the host. The device decides where a text stops (stop ids, token limit) and
cuts it exactly there; a finished sequence stays in the batch and stops moving. The host learns what was
emitted from one small buffer, on CUDA one step late.
"""
from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import Drafter
from engine.body import SPAN, Body, Emission, Kind, arrived, mask
from engine.memory import bytes_per_step
from engine.run import Output, Run
from engine.switching import Switch
from engine.tuning import Plan
from model import Transformer
from sampling.options import Modes, Sampling
from tokens.grammar import Guide
from tokens.ids import common_prefix
from tree import Tree, TreeShape

REHEARSAL = 5  # steps of each kind at warm-up


class Unread(NamedTuple):
    """A pass whose emission has not been read."""

    kind: Kind | None  # None: a pass over prompts
    shape: TreeShape | None  # what the switch chose
    emission: Emission


class Decoder(Body):
    """Decodes token-id prompts with one target and one drafter. Text: see `engine.text_decoder`.

    batch: sequences decoded together. lag: how many steps the host reads late; None is 1 on CUDA, 0
    elsewhere. plan: draft its trees in turn (see `engine.switching`), with `drafter`, which is a
    `HeadDrafter`. The other arguments and errors are those of `Body`.
    """

    def __init__(
        self, target: Transformer, drafter: Drafter | None = None, *, batch: int = 1, max_seq_len: int = 2048,
        stop_ids: Iterable[int] = (), compile: bool = True, say: Callable[[str], None] | None = None,
        chunks: tuple[int, ...] | None = None, lag: int | None = None, plan: Plan | None = None,
        guide: Callable[[str], Guide] | None = None,
    ):
        plans = (plan,) if plan else ()
        super().__init__(
            target, drafter, batch, max_seq_len, stop_ids, compile, say, chunks, plans, guide, bool(plan)
        )
        self.lag = int(self.device.type == "cuda") if lag is None else lag
        self.switch = Switch(plan) if plan else None
        self._observer: Callable[[Tree, Tensor], None] | None = None
        self._serial, self._guides = 0, []  # of the text at hand
        self._behind = 1  # tokens of it that the head has not read, at most

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
            same = self.drafter.reusable(same, len(cached[i]), len(prompt))
            # One token back: the drafter's last row was read together with the token that followed it then.
            self._start.append(max(0, min(same, len(prompt)) - 1))
            goes_on &= 2 * same > len(prompt)
            self.state.begin(i, prompt, request, self.max_seq_len)
            self.drafter.begin(i, prompt)
            if guides[i]:
                mask(self.state.allowed[i], guides[i], [0], [0])
        for i in range(len(prompts), self.batch):
            self.state.rest(i)
        self._modes = Modes.of(sampling, few=self.compiled)
        self._length = [len(p) - 1 for p in prompts]  # what the host knows of state.length
        self._shape, self._behind, self.taken = None, self.window, Counter()
        if self.switch:
            self.switch.begin([s.temperature for s in sampling], goes_on)
        self._done = [False] * len(prompts)

    def _cached(self) -> list[list[int]]:
        """The tokens of each sequence that all caches hold: committed, and read by the drafter too."""
        if self._behind > self.window:
            with torch.no_grad():
                self.read_behind(self.whole, self.span(int(self.state.length.max())), self._behind)
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
            size = self.chunk_size(remaining)
            span = self.span(max(start) + size)
            self.chunk_start.copy_(torch.tensor(start + [0] * (self.batch - len(start))))
            with torch.no_grad():
                self._launch_prefill(span, size)
            start = [min(s + size, len(p)) for s, p in zip(start, self._prompts)]
            yield

    def _run_step(self, unread: int):
        """Launch one step; returns its kind and (tree, path).

        Each of the `unread` steps may have committed up to W tokens that the host does not know of.
        """
        span = self.span(max(self._length) + unread * self.window + self.extra)
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
        if self.asks and not self.drafter.has_guess(self.state, span):
            return self.plain
        if self.switch is None or self._observer:
            return self.usual
        self._shape = self.switch.next(max(self._length))
        kind = self.without_head(self.whole, span) if self._shape is None else self.trees[self._shape]
        if self.switch.trees:  # else the head never drafts, and need not keep up
            self._behind = self.keep_up(self.whole, span, kind, self._behind)
        return kind

    def _launch_step(self, span: Tensor, kind: Kind):
        guides = {i: g for i, g in enumerate(self._guides) if g and not self._done[i]}
        return self.launch_step(self.whole, span, kind, self._modes, guides)

    def _launch_prefill(self, span: Tensor, size: int) -> None:
        self.launch_prefill(self.whole, span, size, self._modes)

    def _out_to_host(self, kind: Kind | None = None) -> Unread:
        """Start copying what a step of this kind, or a pass over prompts, emitted; `_read` waits for it."""
        return Unread(kind, self._shape, self.out_to_host(self.state, self._modes.scored))

    def _read(self, unread: deque[Unread], keep: int) -> Iterator[list[list[int]]]:
        """Read finished steps, oldest first, until only `keep` are unread."""
        while len(unread) > keep:
            step = unread.popleft()
            emitted = list(arrived(step.emission, self._sampling))
            self.drafted, self.scores = [e.drafted for e in emitted], [e.scores for e in emitted]
            for i, (ids, _, done, _) in enumerate(emitted):
                self._length[i] += len(ids)
                self._done[i] = done
                if guide := self._guides[i]:
                    guide.take(ids)
                    if guide.error:
                        raise ValueError(guide.error)
            if self.switch:
                lengths = [len(e.ids) for e in emitted if e.ids]
                self.switch.record(step.shape, max(self._length), lengths)
            yield [e.ids for e in emitted]

    # -- from start to end --------------------------------------------------------------------

    def warm_up(self, sampling: Sampling = Sampling(), every_length: bool = False) -> None:
        """Compile (and on CUDA capture) what a request with this sampling runs, so that the request is fast.

        every_length: on CUDA, capture what texts of every length need, up to `max_seq_len`.
        """
        stop_ids = self.state.stop_ids.clone()
        self.state.stop_ids.fill_(-1)  # the first token might be one of them, and no step would run
        try:
            for prompt in ([0], [0] * 16) if self.asks else ([0],):  # the second: there is a guess
                self.generate([prompt], replace(sampling, max_new_tokens=2))
            self._rehearse(sampling)
            if self.captured and every_length:
                with self.still(), torch.no_grad():
                    for size in sorted({self.span(n).shape[0] for n in range(1, self.slots + 1, SPAN)}):
                        self._launch_step(self.span(size), self.usual)
                        for rows in self.chunks:
                            if rows <= size:
                                self._launch_prefill(self.span(size), rows)
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
