"""Batch slots: their static buffers (`State`), and their assignment to requests (`Slots`)."""
from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

import extensions
from engine.sampling import Sampling, seed_keys
from model import view_of_slots
from tokens.tokenizer import common_prefix
from tree import gather_tokens

if TYPE_CHECKING:
    from engine.deferred import DeferredHead
    from engine.draft import Drafter
    from engine.request import Request
    from engine.runner import ModelRunner

SHARED = "stop_ids", "ahead"  # buffers that all sequences share


def batch_buffer(
    module: nn.Module, batch: int, aligned: bool, device: torch.device | str, name: str, *shape: int,
    dtype: torch.dtype = torch.int64, fill: float = 0,
) -> None:
    """Register a buffer [batch, *shape].

    aligned: the data of each slot starts at a multiple of 16 bytes, unless it is a single element. So a graph
    compiled for one slot works for all.
    """
    size, unit = prod(shape), 16 // dtype.itemsize if aligned else 1
    padded = -(-size // unit) * unit if size > 1 else size  # kernels need [B] and [B, 1] contiguous
    rows = torch.full((batch, padded), fill, dtype=dtype, device=device)[:, :size]
    module.register_buffer(name, rows.view(batch, *shape), persistent=False)


class State(nn.Module):
    """Decoding state of B sequences: tokens, lengths, sampling parameters, and what the last step emitted.

    tokens [B, S']     prompt and output
    length [B]         N, how many tokens are committed: the target's cache holds their keys and values
    root [B, 1]        tokens[b, N], emitted but not committed
    n_unread [B]       how many of the last committed tokens the drafter has not read yet
    features [B, R, F] the target's features of these tokens, R >= W
    limit [B]          the value of N at which generation stops
    done [B]           the sequence is finished or paused: steps do not change it
    prefilling [B]     the prompt is still in prefill
    stop_ids [n]       any of them ends a sequence; the first, -1, if logits are not finite
    ahead [W]          1, 2, ... W
    key [B, 2], temperature, top_k, top_p, min_p [B]   how each request samples
    zero [B, 1], one [B, 1, 1]   constants: parent, depth and mask of a tree that is only the root
    out [B, >=W+3]     the last step's tokens [W] and padding; last three columns: tokens emitted, of these
                       drafted, done

    S' is the buffer's length, W max_commit, R the number of features kept, F the feature width.
    noise: cache of `Step.gumbel`, shared by all views.
    """

    def __init__(
        self, batch: int, slots: int, max_commit: int, *, feature_width: int = 0,
        stop_ids: Iterable[int] = (), dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", unread: int = 0, vocabulary: int = 1, nodes: int = 1,
        aligned: bool = True,
    ):
        """max_commit: W, the maximum number of tokens that a step commits. unread: R, if that is more.
        vocabulary: V. nodes: T of the largest tree. aligned: see `batch_buffer`.
        """
        super().__init__()
        self.max_commit, self.vocabulary, self.nodes, self.aligned = max_commit, vocabulary, nodes, aligned
        self.noise = []
        # In a view, `_make_processors` makes the view of the whole state's processors.
        self._processors, self._make_processors = None, None
        buffer = partial(batch_buffer, self, batch, aligned, device)
        for name in ("length", "limit", "n_unread", "top_k"):
            buffer(name)
        for name in ("temperature", "min_p"):
            buffer(name, dtype=torch.float32)
        buffer("top_p", dtype=torch.float32, fill=1)
        buffer("tokens", slots)
        buffer("root", 1)
        buffer("done", dtype=torch.bool, fill=True)
        buffer("prefilling", dtype=torch.bool)
        buffer("features", max(max_commit, unread), feature_width, dtype=dtype)
        buffer("out", max_commit + 3 + (max_commit + 1) % 2)  # even: aligned rows are contiguous for kernels
        buffer("zero", 1)
        buffer("one", 1, 1, dtype=torch.bool, fill=True)
        buffer("key", 2)
        stop_ids = torch.tensor([-1, *stop_ids], dtype=torch.int64, device=device)
        self.register_buffer("stop_ids", stop_ids, persistent=False)
        self.register_buffer("ahead", torch.arange(1, max_commit + 1, device=device), persistent=False)

    def rows(self, first: int, count: int) -> State:
        """Return views of batch slots first ... first + count - 1."""
        view = view_of_slots(self, first, count, SHARED)
        view._modules = {**self._modules, "_processors": None}
        view._make_processors = lambda: view_of_slots(self.processors, first, count)
        return view

    @property
    def processors(self) -> nn.Module:
        """The logits processors of `extensions.PROCESSORS`: penalties, biases, grammars, log-probabilities.

        Created on first use.
        """
        if self._processors is None:
            make = self._make_processors or partial(extensions.load(extensions.PROCESSORS), self)
            self._processors = make()
        return self._processors

    def start_request(self, slot: int, prompt: list[int], sampling: Sampling, max_seq_len: int) -> None:
        """Start a sequence of at most `max_seq_len` tokens with a prompt in a batch slot."""
        N = len(prompt) - 1
        self.tokens[slot, : N + 1] = torch.tensor(prompt, device=self.tokens.device)
        values = {
            "length": N, "root": prompt[-1], "n_unread": 0, "done": False, "prefilling": True,
            "limit": min(N + sampling.max_new_tokens, max_seq_len - 1), "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p,
        }
        for name, value in values.items():
            self.get_buffer(name)[slot] = value
        self.key[slot] = seed_keys([sampling.seed], self.key.device)[0]
        if sampling.needs_processors or self._processors is not None:
            self.processors.start_request(slot, self.tokens[slot, : N + 1], sampling)

    def emit(self, tokens: Tensor, count: Tensor) -> Tensor:
        """Append the first `count` [B] of tokens [B, W], cut after the first stop id and at the limit.

        The last one appended becomes the root and `length` its position. Sets `done` and `out`. Returns how
        many were appended [B].
        """
        W, drafted = tokens.shape[1], count - 1
        offsets = torch.arange(W, device=tokens.device)
        count = torch.where(self.done, 0, torch.minimum(count, self.limit - self.length))
        stops = (tokens[..., None] == self.stop_ids).any(-1) & (offsets < count[:, None])
        first_stop = torch.where(stops, offsets, W).amin(-1)
        count = torch.minimum(count, first_stop + 1)
        positions = self.length[:, None] + 1 + offsets
        appended = torch.where(
            offsets < count[:, None], tokens.clamp(min=0), self.tokens.gather(1, positions)
        )
        self.tokens.scatter_(1, positions, appended)
        self.length.add_(count)
        self.root.copy_(self.tokens.gather(1, self.length[:, None]))
        self.done.logical_or_((first_stop < W) | (self.length >= self.limit))
        counts = torch.stack((count, torch.minimum(drafted, count).clamp(min=0), self.done.long()), 1)
        self.out[:, :W], self.out[:, -3:] = tokens, counts
        return count

    def keep_features(
        self, features: Tensor | None, path: Tensor, count: Tensor, active: Tensor, append: bool = False
    ) -> None:
        """Keep the features of the `count` [B] tokens just committed, for the drafter's catch-up.

        features [B, T, F]: the target's, of a pass. path [B, <=W]: the nodes of these tokens. active [B]:
        the sequences to change. append: append to the features that the drafter has not read yet.
        """
        if features is not None:
            features = gather_tokens(features, path)
            index = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
            if append:
                index = (index + self.n_unread[:, None]).clamp(max=self.features.shape[1] - 1)
            index = index[..., None].expand_as(features)
            old = self.features.gather(1, index)
            self.features.scatter_(1, index, torch.where(active[:, None, None], features, old))
        unread = self.n_unread + count if append else count
        self.n_unread.copy_(torch.where(active, unread, self.n_unread))


MIN_COPIED_PREFIX = 32  # copy another slot's prefix only if it is this many tokens longer than the own one


class Slots:
    """The slots of an engine: the request of each, and the prefixes that free slots keep in the caches.

    Slots are compact: decoding requests come first, then requests in prefill, then free slots. So a step
    runs on the first slots only. A free slot keeps its KV cache: a new prompt that shares a prefix with it,
    or with a running request, reuses that prefix.

    decoding, prefilling: numbers of requests in these phases. lag: see `Engine`.
    lists_by_slot: lists that `swap` permutes. deferred: None if no step skips the draft head.
    """

    def __init__(self, runner: ModelRunner, drafter: Drafter, batch: int, lag: int):
        self.runner, self.drafter, self.batch, self.lag = runner, drafter, batch, lag
        self.decoding = self.prefilling = 0
        self.requests: list[Request | None] = [None] * batch  # by slot, like the next two lists
        self.cached: list[list[int]] = [[] for _ in range(batch)]  # tokens in the caches of a free slot
        self.last_used = [0] * batch  # larger for later assignments and releases
        self.lists_by_slot: list[list] = [self.requests, self.cached, self.last_used]
        self.deferred: DeferredHead | None = None
        # Maximum number of a decoding request's tokens that a cache lacks: a head reads the tokens of a step
        # in the next one.
        self.max_uncached = runner.max_commit if runner.has_head else 1

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
        cached = {slot: self.cached[slot] for slot in free}
        cached |= {r.slot: self._cached_tokens(r) for r in self.requests if r}
        shared = {
            slot: self.runner.caches.reusable_prefix(slot, common_prefix(request.prompt, tokens))
            for slot, tokens in cached.items()
        }
        source = max(shared, key=shared.__getitem__)
        evicted = min(free, key=self.last_used.__getitem__)  # least recently used
        lost = len(self.cached[source]) - shared[source]
        # Reuse `source` in place if that discards few tokens, or at most half of what eviction would.
        if source in free and (lost <= MIN_COPIED_PREFIX or 2 * lost <= len(self.cached[evicted])):
            evicted = source
        elif shared[source] < shared[evicted] + MIN_COPIED_PREFIX:
            source = evicted
        if self.deferred:
            self.deferred.assign(evicted, source, shared[source], len(cached[source]))
        self.swap(evicted, first)
        if source != evicted:
            moved = evicted if source == first else source  # where the swap has left the source
            for target, origin in zip(*(self._sequence(slot, shared[source]) for slot in (first, moved))):
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
        """Free the slot of a request. The caches keep its tokens, unless it failed."""
        slot = request.slot
        request.active, self.requests[slot], self.cached[slot] = False, None, self._cached_tokens(request)
        if request.error:
            # Masked attention would spread NaN: zero times NaN is NaN. The padding of chunks reads `tokens`.
            self.cached[slot] = []
            for x in (*self._sequence(slot, self.runner.cache_slots), self.runner.state.tokens[slot]):
                x.zero_()
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
        length = max(self._max_used_slots(one), self._max_used_slots(other))
        for a, b in zip(*(self._sequence(slot, length) + self._state(slot) for slot in (one, other))):
            saved = a.clone()  # one layer at a time: a copy of all layers would take gigabytes
            a.copy_(b)
            b.copy_(saved)
        for values in self.lists_by_slot:
            values[one], values[other] = values[other], values[one]
        for slot in (one, other):
            if request := self.requests[slot]:
                request.slot = slot

    def _touch(self, slot: int) -> None:
        self.last_used[slot] = max(self.last_used) + 1

    def _cached_tokens(self, request: Request) -> list[int]:
        """Return the tokens of a request that all caches hold."""
        if request.slot >= self.decoding:
            return request.prompt[: request.prefilled]
        return request.tokens[: max(0, request.length - self.max_uncached)]

    def _max_used_slots(self, slot: int) -> int:
        """Return an upper bound on the cache slots in use in a batch slot."""
        if request := self.requests[slot]:
            passes = (self.lag + 1) * self.runner.max_commit + self.runner.chunks[-1]
            return min(request.length + passes, self.runner.cache_slots)
        return len(self.cached[slot])

    def _state(self, slot: int) -> list[torch.Tensor]:
        """Return views of the buffers of a batch slot in the state and its logits processors."""
        state = self.runner.state
        modules = filter(None, (state, state._processors))
        return [x[slot] for module in modules for name, x in module._buffers.items() if name not in SHARED]

    def _sequence(self, slot: int, length: int) -> list[torch.Tensor]:
        """Return views of the first `length` cache slots of a batch slot, and of its drafter's state."""
        return self.runner.caches.sequence(slot, length) + self.drafter.sequence(slot, length)
