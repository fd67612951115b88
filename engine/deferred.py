"""Deferred draft head: it processes the tokens of steps that skipped it before it drafts again.

A scheduler may skip the head (`Scheduler.skips_head`), and a request may be plain. Such a step stores the
target's features of the tokens that it commits (`Drafter.defers_head`, `State.keep_features`). Before its
next step the head runs over them, as it must process every token.
"""
from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.draft import Drafter
from engine.request import Request
from engine.runner import ModelRunner, SlotRange
from engine.state import Slots, State
from engine.step import Step


class DeferredHead:
    """Runs the head over the tokens that steps without it have committed.

    unread: by slot, an upper bound on the number of committed tokens that the head has not read.
    """

    def __init__(self, runner: ModelRunner, slots: Slots):
        self.runner, self.unread = runner, [1] * slots.batch
        slots.lists_by_slot.append(self.unread)
        slots.max_uncached = 1  # not max_commit: `assign` runs the head over unread tokens first

    def before_step(
        self, group: SlotRange, live_slots: Tensor, drafter: Drafter, requests: list[Request]
    ) -> None:
        """Run the head over committed tokens that it has not read, if a step with `drafter` needs that.

        On a CPU one call per request, on a GPU one for all.
        """
        runner, max_commit = self.runner, drafter.shape.max_commit
        slots = [r.slot for r in requests]
        # A step with the head reads at most W unread tokens; one without it adds up to `max_commit`.
        limit = runner.max_unread - max_commit if drafter.defers_head else runner.max_commit
        for batch in [slots] if runner.on_cuda else [[slot] for slot in slots]:
            unread = max(self.unread[slot] for slot in batch)
            if unread > limit:
                self.prefill(group if runner.on_cuda else runner.slot_range(batch[0], 1), live_slots, unread)
                unread = 1
            for slot in batch:
                self.unread[slot] = unread + max_commit if drafter.defers_head else runner.max_commit

    def assign(self, slot: int, source: int, shared: int, cached: int) -> None:
        """Prepare `slot` for a request that reuses the first `shared` of the `cached` tokens of `source`.

        The head first reads those that it has not read.
        """
        if shared > max(0, cached + 1 - self.unread[source]):
            live_slots = self.runner.live_slots(int(self.runner.state.length[source]))
            with torch.no_grad():
                self.prefill(self.runner.slot_range(source, 1), live_slots, self.unread[source])
            self.unread[source] = 1
        self.unread[slot] = 1

    def prefill(self, group: SlotRange, live_slots: Tensor, unread: int) -> None:
        """Run the head over up to `unread` tokens. The last one still counts as unread, for `catch_up`."""
        first, runner = 0, self.runner
        drafter = group.drafter_view(runner.drafter)
        while first < unread:
            size = runner.chunk_size(unread - first)
            arguments = runner.device_step, drafter, group.state, live_slots, first, runner.slot_ids[:size]
            key = "prefill_unread", first, size, live_slots.shape[0]
            runner.run(group, key, partial(prefill_features, *arguments))
            first += size
        runner.run(group, ("keep_last_unread",), partial(keep_last_unread, group.state))


def prefill_features(
    step: Step, drafter: Drafter, state: State, live_slots: Tensor, first: int, offsets: Tensor
) -> None:
    """Run a drafter over unread tokens from number `first` on. offsets [size]: 0, 1, ..., size - 1."""
    size = offsets.shape[0]
    # A sequence with fewer unread tokens writes past its committed ones, where nothing is kept.
    start = torch.minimum(state.length - state.n_unread + first, state.length)
    features = state.features[:, first : first + size]
    if padding := size - features.shape[1]:
        features = F.pad(features, (0, 0, 0, padding))
    visible = step.causal_mask(live_slots, start, size)
    drafter.prefill(state, features, start[:, None] + offsets, visible)


def keep_last_unread(state: State) -> None:
    """Drop the features of all unread tokens but the last, after the drafter has processed them."""
    rows, width = state.features.shape[1:]
    last = (state.n_unread - 1).clamp(0, rows - 1)[:, None, None].expand(-1, 1, width)
    state.features[:, :1] = state.features.gather(1, last)
    state.n_unread.clamp_(max=1)
