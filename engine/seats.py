"""Requests come and go: continuous batching over the static places of a body.

A request is admitted between two steps into a free place, its prompt is read in chunks by passes of its own,
and the others go on decoding between them. Whoever ends leaves at once. Places are in groups: first those
that decode, then those whose prompts are being read, then the free ones. So a step works on as many sequences
as there are, and its tree shrinks as they become more, by what was measured.

A free place keeps its text. A request that begins like one, or like one that is being decoded, reads only the
rest.
"""
from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from drafters.base import Drafter
from engine.body import Body, Emission, Emitted, Kind, Rows, Score, arrived, mask
from engine.run import Output
from engine.state import State
from engine.switching import Ease, Switch
from engine.tuning import Plan
from model import Transformer
from sampling.adjust import scores
from sampling.options import MOST_LOGPROBS, Modes, Sampling
from tokens.grammar import Guide
from tokens.ids import common_prefix
from tree import AnyTree, PathTree, TreeShape

FAST, PLAIN, READING = range(3)  # groups: decoding with drafts, or without as they asked for, reading
WORTH_COPYING = 32  # tokens of a text in another place, beyond what a free place holds


@dataclass(eq=False)
class Text:
    """A request in its place."""

    prompt: list[int]
    sampling: Sampling
    guide: Guide | None
    place: int
    cached: int  # tokens of the prompt that were in the caches already
    read: int  # that are there now
    watched: bool  # whether its trees are wanted
    plain: bool  # whether it is to be decoded without drafts
    prompt_scores: list[Score] | None  # of the prompt's tokens that have been read, but for the first
    ids: list[int] = field(default_factory=list)
    done: bool = False
    behind: int = 1  # tokens that the drafter has not read, at most
    ease: Ease | None = None
    steps: Counter = field(default_factory=Counter)  # by shape of the tree

    @property
    def length(self) -> int:
        """Tokens before the root, as far as the host knows."""
        return len(self.prompt) + len(self.ids) - 1


class Draft(NamedTuple):
    """The tree of a step, and the path through it that was accepted."""

    tokens: list[int]
    parent: list[int]
    path: list[int]


class Event(NamedTuple):
    """What a text emitted in a pass. nodes: of the tree that was drafted for it, the root not counted.

    error: why it cannot go on; what it emitted does not count then.
    """

    text: Text
    emitted: Emitted
    nodes: int
    draft: Draft | None
    error: str | None


class _Pending(NamedTuple):
    """A pass whose emission has not been read."""

    texts: list[Text]
    shape: TreeShape | PathTree | AnyTree | None  # None: of a prompt
    emission: Emission
    drafts: list[Draft] | None
    switch: Switch | None


class Seats(Body):
    """Decodes up to `places` requests, whenever they come.

    lag: how many steps the host reads late; None is 1 on CUDA, 0 elsewhere. plans: for so many sequences, the
    trees to draft in turn, with `drafter`, which is a `HeadDrafter`; without plans the drafter's own. counts:
    for how many sequences there are steps, `places` last; default `Seats.counts`. The other arguments and
    errors are those of `Body`.
    """

    def __init__(
        self, target: Transformer, drafter: Drafter | None = None, *, places: int = 4,
        max_seq_len: int = 2048, stop_ids: Iterable[int] = (), compile: bool = True,
        say: Callable[[str], None] | None = None, chunks: tuple[int, ...] | None = None,
        lag: int | None = None, plans: dict[int, Plan] | None = None,
        guide: Callable[[str], Guide] | None = None, counts: tuple[int, ...] | None = None,
    ):
        plans = plans or {}
        drafts = not plans or any(plan.shapes for plan in plans.values())
        # Whether a network is to know all texts, also those that are decoded plainly for now.
        self._follows = drafts and drafter is not None and drafter.network is not None
        super().__init__(
            target, drafter, places, max_seq_len, stop_ids, compile, say, chunks, tuple(plans.values()),
            guide, self._follows,
        )
        self.lag = int(self.device.type == "cuda") if lag is None else lag
        self.switches = {count: Switch(plan) for count, plan in sorted(plans.items())}
        self._counts = counts or self.counts(places, self.device)
        self._stop_ids = set(self.state.stop_ids.tolist())
        self._texts: list[Text | None] = [None] * places
        self._kept: list[list[int]] = [[] for _ in range(places)]  # what the caches of a free place hold
        self._behind = [1] * places  # how much of that the drafter has not read, at most
        self._used = [0] * places  # when a place was left
        self._sizes = [0, 0, 0]  # of the groups, which lie one after the other
        self._serial = 0
        self._pending: deque[_Pending] = deque()
        self._states: dict[tuple[int, int], State] = {}
        self._modes: list[Modes | None] = [None, None]  # of FAST, PLAIN; None: they have changed
        self.prompt_seconds = 0.0  # of the host, on prompts; on a GPU it does not wait for them

    @staticmethod
    def counts(places: int, device: torch.device) -> tuple[int, ...]:
        """For how many sequences there are steps. On a GPU they are few, as each is compiled."""
        below = (1 << i for i in range(16)) if device.type == "cuda" else range(1, places)
        return *(count for count in below if count < places), places

    @property
    def free(self) -> int:
        """How many requests could be admitted now."""
        return self.batch - sum(self._sizes)

    @property
    def busy(self) -> bool:
        """Whether there is anything to decode."""
        return any(self._sizes)

    @property
    def texts(self) -> list[Text]:
        """The requests that are here."""
        return [text for text in self._texts if text]

    # -- coming and going ---------------------------------------------------------------------

    def admit(
        self, prompt: list[int], sampling: Sampling, guide: Guide | None = None, watch: bool = False,
        score_prompt: bool = False, plain: bool = False,
    ) -> Text:
        """Give a request a free place.

        guide: of its JSON schema, if that has been made already. watch: give its trees too. score_prompt:
        collect what the target thinks of the prompt's tokens, which are all read for it. plain: decode it
        without drafts, as if it were alone in that. Raises ValueError, with the numbers, if the request
        cannot be decoded; RuntimeError if no place is free.
        """
        if not self.free:
            raise RuntimeError(f"all {self.batch} places are taken")
        self.check(prompt)
        self.check_request(sampling)
        if sampling.json_schema is not None and guide is None:
            guide = self.guide(sampling.json_schema)
        place, same = self._place_for(prompt)
        start = 0 if score_prompt else max(0, min(same, len(prompt)) - 1)  # one back, see `Decoder.start`
        prompt_scores = [] if score_prompt else None
        text = Text(prompt, sampling, guide, place, start, start, watch, plain, prompt_scores)
        self._texts[place], self._kept[place] = text, []
        self._sizes[READING] += 1
        self._serial += 1
        self._used[place] = self._serial
        self.state.begin(place, prompt, sampling, self.max_seq_len)
        self.state.done[place] = True  # held still until its prompt is read
        self.drafter.begin(place, prompt)
        if guide:
            mask(self.state.allowed[place], guide, [0], [0])
        return text

    def _place_for(self, prompt: list[int]) -> tuple[int, int]:
        """The first free place, now with the longest beginning of the prompt that there is, and its length.

        A text that would be lost for a short beginning is copied from instead.
        """
        first = sum(self._sizes)
        free = range(first, self.batch)
        held = {place: self._kept[place] for place in free}
        held |= {text.place: self._held(text) for text in self.texts}
        same = {
            place: self.drafter.reusable(common_prefix(prompt, tokens), len(tokens), len(prompt))
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
        taken = None if source == target else self._take(source, same[source])
        self._exchange(target, first)
        if taken:
            self._put(first, taken)
        return first, same[source]

    def _let_read(self, place: int, tokens: int) -> None:
        """Let the drafter read what it has not of the first tokens in a place."""
        text = self._texts[place]
        held, behind = (self._held(text), text.behind) if text else (self._kept[place], self._behind[place])
        if not self._follows or tokens <= len(held) + 1 - behind:
            return
        self.read_behind(self.rows(place, 1), self.span(int(self.state.length[place])), behind)
        if text:
            text.behind = 1
        self._behind[place] = 1

    def _held(self, text: Text) -> list[int]:
        """The tokens of a text that the target's caches hold, and the drafter's but for `behind` - 1."""
        if self._group(text) == READING:
            return text.prompt[: text.read]
        return (text.prompt + text.ids)[: max(0, text.length - 1)]

    def leave(self, text: Text) -> None:
        """Free the place of a text, whether it has ended or not. What the caches hold of it is kept."""
        place = text.place
        if self._texts[place] is not text:
            return
        text.done = True
        self.state.done[place], self.state.reading[place] = True, False
        group = self._group(text)
        if group != READING:
            self._modes[group] = None
        self._behind[place] = text.behind
        self._kept[place], self._texts[place] = self._held(text), None
        self._serial += 1
        self._used[place] = self._serial
        # The last of each group takes the place that becomes free before it.
        for following in range(group, len(self._sizes)):
            last = sum(self._sizes[: following + 1]) - 1
            if following == group or self._sizes[following]:
                self._exchange(place, last)
                place = last
        self._sizes[group] -= 1

    def _group(self, text: Text) -> int:
        """The group that a text's place is in."""
        return next(group for group in range(3) if text.place < sum(self._sizes[: group + 1]))

    def _decode(self, text: Text) -> None:
        """A text whose prompt has been read joins those that decode."""
        group = PLAIN if text.plain else FAST
        for passed in range(READING, group, -1):
            self._exchange(text.place, sum(self._sizes[:passed]))
            self._sizes[passed] -= 1
            self._sizes[passed - 1] += 1
        self._modes[group] = None

    def _exchange(self, one: int, other: int) -> None:
        """All that is in two places changes places."""
        if one == other:
            return
        if slots := max(self._live(one), self._live(other)):
            a, b = self._take(one, slots), self._take(other, slots)
            self._put(one, b)
            self._put(other, a)
        self.state.exchange(one, other)
        for of_place in (self._texts, self._kept, self._behind, self._used):
            of_place[one], of_place[other] = of_place[other], of_place[one]
        for place in (one, other):
            if text := self._texts[place]:
                text.place = place

    def _live(self, place: int) -> int:
        """Slots of a place that mean something, at most."""
        if text := self._texts[place]:
            return min(text.length + (self.lag + 1) * self.window, self.slots)
        return len(self._kept[place])

    def _take(self, place: int, slots: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.caches.take(place, slots), self.drafter.take(place, slots)

    def _put(self, place: int, taken: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        self.caches.put(place, taken[0])
        self.drafter.put(place, taken[1])

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile (and on CUDA capture) what requests run, greedy or sampling, so that they are fast."""
        stop_ids = self.state.stop_ids.clone()
        self.state.stop_ids.fill_(-1)  # the first token might be one of them, and no step would run
        try:
            for temperature in (0.0, 1.0):
                self.admit([0], Sampling(8, temperature))
                while self.busy:
                    self.advance()
            if self.captured or self.compiled:
                with self.still():
                    for count in self._counts:
                        plan = self.switches[count].plan if self.switches else None
                        kinds = [self.trees[shape] for shape in plan.shapes] if plan else [self.usual]
                        for kind in dict.fromkeys((self.plain, *kinds)):
                            for modes in (Modes(), Modes(noisy=True)):
                                self.launch_step(self.rows(0, count), self.span(1), kind, modes)
        finally:
            self.state.stop_ids.copy_(stop_ids)

    # -- passes -------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self) -> list[Event]:
        """One chunk of one prompt, if there is one to read, and one step of all that decode.

        Returns what has been emitted; who has ended has left.
        """
        events: list[Event] = []
        if reading := self._members(READING):
            text = min(reading, key=lambda text: self._used[text.place])
            began = time.perf_counter()
            last = self._read_chunk(text)
            self.prompt_seconds += time.perf_counter() - began
            if last:
                events += self._read(0)
        keep = 0
        for group in (FAST, PLAIN):
            if self._sizes[group]:
                self._step(group)
                keep = 0 if self._modes[group].guided else self.lag
                events += self._read(keep)
        return events if keep else events + self._read(0)

    def generate(
        self, prompts: list[list[int]], sampling: list[Sampling],
        ended: Callable[[int, Output], None] = lambda number, output: None,
    ) -> list[Output]:
        """Decode prompts (any number) to the end, with nobody else here: who ends makes room for the next.

        `ended` is called with the number of a prompt and its output as soon as it is there. Raises ValueError
        as `admit` does. The outputs have no acceptance lengths, scores and times.
        """
        outputs: list[Output | None] = [None] * len(prompts)
        here: dict[int, Text] = {}
        admitted = 0
        while here or admitted < len(prompts):
            while self.free and admitted < len(prompts):
                here[admitted] = self.admit(prompts[admitted], sampling[admitted])
                admitted += 1
            self.advance()
            for number in [number for number, text in here.items() if text.done]:
                text = here.pop(number)
                outputs[number] = Output(text.ids, self._finish(text), [], [], 0.0, 0.0)
                ended(number, outputs[number])
        return outputs

    def _finish(self, text: Text) -> str:
        """Why a text has ended, as in `engine.run.Output`."""
        if text.ids[-1] in self._stop_ids:
            return "stop"
        return "cache" if len(text.prompt) + len(text.ids) >= self.max_seq_len else "length"

    def _members(self, group: int) -> list[Text]:
        """The texts of a group."""
        first = sum(self._sizes[:group])
        return self._texts[first : first + self._sizes[group]]

    def _read_chunk(self, text: Text) -> bool:
        """Read one chunk of a prompt; returns whether it was the last one, after which it decodes."""
        remaining = len(text.prompt) - text.read
        size = self.chunk_size(remaining)
        rows, modes = self.rows(text.place, 1), Modes.of([text.sampling], few=self.compiled)
        last = remaining <= size
        rows.chunk_start.fill_(text.read)
        if last:
            rows.state.done.fill_(False)
        x = self.launch_prefill(rows, self.span(text.read + size), size, modes)
        if text.prompt_scores is not None:
            self._score_prompt(text, x)
        text.read += min(size, remaining)
        if last:
            emission = self.out_to_host(rows.state, modes.scored)
            self._pending.append(_Pending([text], None, emission, None, None))
            self._decode(text)
        return last

    def _score_prompt(self, text: Text, x: torch.Tensor) -> None:
        """What the target thinks of the tokens after those of a chunk, whose last states are x [1, C, H]."""
        after = text.prompt[text.read + 1 : text.read + 1 + x.shape[1]]
        if not after:
            return
        with self.here():
            logits = self.target.logits(x[:, : len(after)])
        own, top, ids = scores(logits, torch.tensor([after], device=x.device), MOST_LOGPROBS)
        found = zip(own[0].tolist(), top[0].tolist(), ids[0].tolist())
        wanted = text.sampling.logprobs or 0
        text.prompt_scores += [Score(o, list(zip(i, t))[:wanted]) for o, t, i in found]

    def _step(self, group: int) -> None:
        """Launch one step of a group that decodes."""
        texts, first = self._members(group), sum(self._sizes[:group])
        count = next(c for c in self._counts if c >= len(texts))
        rows = self.rows(min(first, self.batch - count), count)
        offset = first - rows.first  # of the group's texts in those rows
        context = max(text.length for text in texts)
        span = self.span(context + len(self._pending) * self.window + self.extra)
        switch = self.switches[count] if self.switches and group == FAST else None
        if self._modes[group] is None:
            self._modes[group] = Modes.of([text.sampling for text in texts], few=self.compiled)
            if switch:
                for text in texts:
                    text.ease = text.ease or switch.new_text()
                switch.turn_to([t.sampling.temperature for t in texts], [t.ease for t in texts])
        modes = self._modes[group]
        kind, shape = self._choose(group, rows, span, texts, switch, context)
        began = time.perf_counter()
        guides = {offset + i: text.guide for i, text in enumerate(texts) if text.guide}
        with self._held_still(rows, group):
            tree, path = self.launch_step(rows, span, kind, modes, guides)
        if switch and self.device.type == "cpu":  # elsewhere a step is only launched by now
            switch.time(shape, context, time.perf_counter() - began)
        drafts = None
        if any(text.watched for text in texts):
            parts = (x[offset:].tolist() for x in (tree.tokens, tree.parent, path))
            drafts = [Draft(*x) for x in zip(*parts)]
        emission = self.out_to_host(self._state_of(first, len(texts)), modes.scored)
        self._pending.append(_Pending(texts, kind.drafter.shape, emission, drafts, switch))

    @contextlib.contextmanager
    def _held_still(self, rows: Rows, group: int) -> Iterator[None]:
        """Hold the texts of the other group still that are among these rows, as there are steps for few
        numbers of sequences.
        """
        others = [t.place - rows.first for t in self._members(PLAIN if group == FAST else FAST)]
        others = [place for place in others if 0 <= place < rows.count]
        if not others:
            yield
            return
        before = rows.state.done[others]
        rows.state.done[others] = True
        yield
        rows.state.done[others] = before

    def _state_of(self, first: int, count: int) -> State:
        """The state of some sequences, as few as there are."""
        if (first, count) not in self._states:
            self._states[first, count] = self.state.rows(first, count)
        return self._states[first, count]

    def _choose(
        self, group: int, rows: Rows, span: torch.Tensor, texts: list[Text], switch: Switch | None,
        context: int,
    ) -> tuple[Kind, TreeShape | None]:
        """What kind of step comes next, and what the switch said."""
        shape, kind = None, self.plain if group == PLAIN else self.usual
        if group == FAST and self.asks and not rows.drafter.has_guess(rows.state, span):
            kind = self.plain
        elif switch:
            shape = switch.next(context)
            kind = self.without_head(rows, span) if shape is None else self.trees[shape]
        if self._follows:
            self._keep_up(rows, span, kind, texts)
        return kind, shape

    def _keep_up(self, rows: Rows, span: torch.Tensor, kind: Kind, texts: list[Text]) -> None:
        """Let the drafter read what it must of each text: where a call costs little, no more than that."""
        if self.device.type == "cpu":
            for text in texts:
                text.behind = self.keep_up(self.rows(text.place, 1), span, kind, text.behind)
            return
        behind = self.keep_up(rows, span, kind, max(text.behind for text in texts))
        for text in texts:
            text.behind = behind

    def _read(self, keep: int) -> list[Event]:
        """What passes have emitted, oldest first, until only `keep` are unread."""
        events = []
        while len(self._pending) > keep:
            texts, shape, emission, drafts, switch = self._pending.popleft()
            for i, emitted in enumerate(arrived(emission, [text.sampling for text in texts])):
                text = texts[i]
                if text.done:  # it has left
                    continue
                nodes = 0
                if shape is not None:
                    nodes = shape.nodes - 1
                    text.steps[shape] += 1
                    if switch and shape in switch.plan.shapes:
                        text.ease.record(len(emitted.ids) - 1, switch.usual(shape, text.length))
                text.ids += emitted.ids
                if text.guide:
                    text.guide.take(emitted.ids)
                draft = drafts[i] if drafts and text.watched else None
                error = text.guide.error if text.guide else None
                events.append(Event(text, emitted, nodes, draft, error))
                if emitted.done or error:
                    self.leave(text)
        return events
