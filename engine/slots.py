"""The slots of a batch: which request holds which, and the prefixes that free slots keep in the caches.

Slots are compact: decoding requests come first, then requests in prefill, then free slots. So a step runs on
the first slots only. A free slot keeps its KV cache: a new prompt that shares a prefix with it, or with a
running request, reuses that prefix.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.draft import Drafter
from engine.request import Request
from engine.runner import ModelRunner
from tokens.tokenizer import common_prefix

if TYPE_CHECKING:
    from engine.deferred import DeferredHead

MIN_COPIED_PREFIX = 32  # a prefix is copied from another slot only if it is this many tokens longer


class Slots:
    """The slots of an engine.

    decoding, prefilling: numbers of requests; their slots come first, in this order. lag: see `Engine`.
    lists_by_slot: lists that `swap` permutes. deferred: None if no step skips the draft head.
    """

    def __init__(self, runner: ModelRunner, drafter: Drafter, batch: int, lag: int):
        self.runner, self.drafter, self.batch, self.lag = runner, drafter, batch, lag
        self.decoding = self.prefilling = 0
        self.requests: list[Request | None] = [None] * batch  # by slot, as the next two
        self.cached: list[list[int]] = [[] for _ in range(batch)]  # tokens in the caches of a free slot
        self.last_used = [0] * batch  # `_clock` when a slot was assigned or released
        self.lists_by_slot: list[list] = [self.requests, self.cached, self.last_used]
        self.deferred: DeferredHead | None = None
        # Maximum number of a decoding request's tokens that a cache lacks: a head reads the tokens of a step
        # in the next one.
        self.max_uncached = runner.max_commit if runner.has_head else 1
        self._clock = 0

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self.batch - self.decoding - self.prefilling

    def assign(self, request: Request) -> int:
        """Assign the first free slot to a request. Returns the length of the cached prefix in it.

        That is the longest cached prefix of the prompt. It is copied if its slot is in use, or if its slot
        holds much more than the prefix.
        """
        first = self.decoding + self.prefilling
        free = range(first, self.batch)
        held = {slot: self.cached[slot] for slot in free}
        held |= {one.slot: self._cached_tokens(one) for one in self.requests if one}
        shared = {
            slot: self.runner.caches.reusable_prefix(slot, common_prefix(request.prompt, tokens))
            for slot, tokens in held.items()
        }
        source = max(shared, key=shared.__getitem__)
        taken = min(free, key=self.last_used.__getitem__)  # least recently used
        lost = len(self.cached[source]) - shared[source]
        # Reuse `source` in place if that discards few tokens, or at most half of what evicting `taken` would.
        if source in free and (lost <= MIN_COPIED_PREFIX or 2 * lost <= len(self.cached[taken])):
            taken = source
        elif shared[source] < shared[taken] + MIN_COPIED_PREFIX:
            source = taken
        if self.deferred:
            self.deferred.assign(taken, source, shared[source], len(held[source]))
        self.swap(taken, first)
        if source != taken:
            now = taken if source == first else source  # the swap may have moved the source
            for target, origin in zip(*(self._sequence(slot, shared[source]) for slot in (first, now))):
                target.copy_(origin)
        request.slot = first
        self.requests[first], self.cached[first] = request, []
        self.prefilling += 1
        self._touch(first)
        return shared[source]

    def start_decoding(self, request: Request) -> None:
        """Move a request from prefill to decoding."""
        self.runner.caches.save_prefix(request.slot)
        self.swap(request.slot, self.decoding)
        self.decoding += 1
        self.prefilling -= 1

    def release(self, request: Request) -> None:
        """Free the slot of a request. The caches keep its tokens."""
        slot = request.slot
        request.active, self.requests[slot], self.cached[slot] = False, None, self._cached_tokens(request)
        self._touch(slot)
        if slot < self.decoding:
            self.decoding -= 1
            self.swap(slot, self.decoding)
            slot = self.decoding
        else:
            self.prefilling -= 1
        self.swap(slot, self.decoding + self.prefilling)

    def swap(self, one: int, other: int) -> None:
        """Swap two slots: caches, state and requests."""
        if one == other:
            return
        if length := max(self._max_used_slots(one), self._max_used_slots(other)):
            for a, b in zip(self._sequence(one, length), self._sequence(other, length)):
                saved = a.clone()  # one layer at a time: a copy of all layers would take gigabytes
                a.copy_(b)
                b.copy_(saved)
        self.runner.state.swap(one, other)
        for values in self.lists_by_slot:
            values[one], values[other] = values[other], values[one]
        for slot in (one, other):
            if request := self.requests[slot]:
                request.slot = slot

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self.last_used[slot] = self._clock

    def _cached_tokens(self, request: Request) -> list[int]:
        """Return the tokens of a request that all caches hold."""
        if request.slot >= self.decoding:
            return request.prompt[: request.prefilled]
        return request.tokens[: max(0, request.length - self.max_uncached)]

    def _max_used_slots(self, slot: int) -> int:
        """Return an upper bound on the cache slots in use in a batch slot."""
        if request := self.requests[slot]:
            return min(request.length + (self.lag + 1) * self.runner.max_commit, self.runner.cache_slots)
        return len(self.cached[slot])

    def _sequence(self, slot: int, length: int) -> list[torch.Tensor]:
        """Return views of the first `length` cache slots of a batch slot, and of its drafter's state."""
        return self.runner.caches.sequence(slot, length) + self.drafter.sequence(slot, length)
