"""The static buffers of a step."""
from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod

import torch
import torch.nn as nn
from torch import Tensor

import extensions
from engine.sampling import Sampling, seed_keys
from model import view_of_slots
from tree import gather_tokens

SHARED = "stop_ids", "ahead"  # buffers that all sequences share


def batch_buffer(
    module: nn.Module, batch: int, aligned: bool, device: torch.device | str, name: str, *shape: int,
    dtype: torch.dtype = torch.int64, fill: float = 0,
) -> None:
    """Register a buffer [batch, *shape].

    aligned: rows of several numbers start at multiples of 16 bytes, so that a graph compiled for one slot
    serves all.
    """
    size, unit = prod(shape), 16 // dtype.itemsize if aligned else 1
    padded = -(-size // unit) * unit if size > 1 else size  # kernels need [B] and [B, 1] contiguous
    rows = torch.full((batch, padded), fill, dtype=dtype, device=device)[:, :size]
    module.register_buffer(name, rows.view(batch, *shape), persistent=False)


def swap_slots(module: nn.Module, one: int, other: int) -> None:
    """Swap two batch slots in all buffers but those in SHARED."""
    for name, buffer in module._buffers.items():
        if name not in SHARED:
            saved = buffer[one].clone()
            buffer[one] = buffer[other]
            buffer[other] = saved


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
    stop_ids [n]       any of them ends a sequence
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
        stop_ids = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self.register_buffer("stop_ids", stop_ids, persistent=False)
        self.register_buffer("ahead", torch.arange(1, max_commit + 1, device=device), persistent=False)

    def rows(self, first: int, count: int) -> State:
        """Return views of batch slots first ... first + count - 1."""
        some = view_of_slots(self, first, count, SHARED)
        some._modules = {**self._modules, "_processors": None}
        some._make_processors = lambda: view_of_slots(self.processors, first, count)
        return some

    @property
    def processors(self) -> nn.Module:
        """The logits processors of `extensions.PROCESSORS`: penalties, biases, grammars, log-probabilities.

        Created on first use.
        """
        if self._processors is None:
            make = self._make_processors or partial(extensions.load(extensions.PROCESSORS), self)
            self._processors = make()
        return self._processors

    def swap(self, one: int, other: int) -> None:
        """Swap the slots of two sequences."""
        swap_slots(self, one, other)
        if self._processors is not None:
            swap_slots(self._processors, one, other)

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
        at = torch.arange(W, device=tokens.device)
        count = torch.where(self.done, 0, torch.minimum(count, self.limit - self.length))
        stops = (tokens[..., None] == self.stop_ids).any(-1) & (at < count[:, None])
        first_stop = torch.where(stops, at, W).amin(-1)
        count = torch.minimum(count, first_stop + 1)
        where = self.length[:, None] + 1 + at
        appended = torch.where(at < count[:, None], tokens, self.tokens.gather(1, where))
        self.tokens.scatter_(1, where, appended)
        self.length.add_(count)
        self.root.copy_(self.tokens.gather(1, self.length[:, None]))
        self.done.logical_or_((first_stop < W) | (self.length >= self.limit))
        counts = torch.stack((count, torch.minimum(drafted, count).clamp(min=0), self.done.long()), 1)
        self.out.copy_(torch.cat((tokens, torch.zeros_like(self.out[:, W + 3 :]), counts), 1))
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
            at = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
            if append:
                at = (at + self.n_unread[:, None]).clamp(max=self.features.shape[1] - 1)
            at = at[..., None].expand_as(features)
            old = self.features.gather(1, at)
            self.features.scatter_(1, at, torch.where(active[:, None, None], features, old))
        unread = self.n_unread + count if append else count
        self.n_unread.copy_(torch.where(active, unread, self.n_unread))
