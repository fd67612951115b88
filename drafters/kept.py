"""The tokens whose keys and values a head keeps, and their slots in its caches.

All of them, a slot each; or the last ones, in a ring. The papers' heads are trained on 2,048 tokens, and a
head that attends to all of a long text reads more in every draft pass than the pass has weights.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from drafters.base import constants
from kernels.backend import TorchBackend
from model import KVCaches

MOST = 64  # rows that are moved in one call, whose entries a GPU holds in registers


class EveryToken(nn.Module):
    """Token i of a text is in slot i."""

    reach = 0  # tokens that are kept, 0: all

    def allocate(self, room: int, device: torch.device | str) -> None:
        """Make what is needed on this device. room: rows that a pass may have after the committed ones."""

    def count(self, slots: int, room: int) -> int:
        """Return the number of slots of the head's caches, where the target's have `slots`."""
        return slots

    def live(self, slots: Tensor) -> Tensor:
        """Return the slots that a pass attends to [n], where it would attend to these."""
        return slots

    def first(self, length: Tensor) -> Tensor:
        """Return the slot after the committed rows of these lengths [B]: a pass's own begin there."""
        return length

    def rows(self, backend: TorchBackend, positions: Tensor, visible):
        """Return the slots of rows that follow each other in the text at positions [B, T], and what they
        see."""
        return positions, visible

    def reusable(self, same: int, held: int, length: int) -> int:
        """See `drafters.base.Drafter.reusable`."""
        return same


class Ring(EveryToken):
    """Token i is in slot i mod N until token i + N takes its place; a pass's own rows stand behind the ring.

    So all slots before `first` are committed ones, as in a cache of the whole text, and attention needs no
    other mask than there. Their order is another, which attention does not mind: keys are rotated by their
    places in the text before they are stored, and only the distance of a query counts (RoPE). No distance is
    above N and the rows of a pass, so that places need not be counted anew from the ring's oldest token: it
    would give the same.
    """

    def __init__(self, reach: int):
        super().__init__()
        self.reach = reach
        self.allocate(0, "cpu")

    def allocate(self, room: int, device: torch.device | str) -> None:
        constants(self, slots=torch.arange(self.count(0, room), device=device))

    def count(self, slots: int, room: int) -> int:
        return self.reach + room + 1  # the last one is moved onto itself, by rows that are not kept

    def live(self, slots: Tensor) -> Tensor:
        return self.slots

    def first(self, length: Tensor) -> Tensor:
        return length.clamp(max=self.reach)

    def rows(self, backend: TorchBackend, positions: Tensor, visible):
        first, count = self.first(positions[:, 0]), positions.shape[1]
        own = first[:, None] + torch.arange(count, device=positions.device)
        return own, backend.visible_before(self.slots, first, count)

    def keep(self, caches: KVCaches, start: Tensor, rows: int, known: Tensor) -> None:
        """Keep the first `known` [B] of the `rows` rows that a pass has written from `first(start)` on.

        start [B]: how many were committed before.
        """
        row, known, spare = torch.arange(rows, device=start.device), known[:, None], len(self.slots) - 1
        # If there are more rows than slots in the ring, keep the last ones: no row is overwritten by another.
        kept = (row < known) & (row >= known - self.reach)
        source = torch.where(kept, self.first(start)[:, None] + row, spare)
        target = torch.where(kept, (start[:, None] + row) % self.reach, spare)
        for some, there in zip(source.split(MOST, 1), target.split(MOST, 1)):
            caches.move(some, there)

    def reusable(self, same: int, held: int, length: int) -> int:
        # A longer text has written over what stood before the end of the shorter one. What the new text's
        # prompt reaches is written again.
        return same if held <= max(self.reach, length) else max(0, same - self.reach)


def kept(reach: int) -> EveryToken:
    """Return the store for the last `reach` tokens, or for all if that is 0."""
    return Ring(reach) if reach else EveryToken()
