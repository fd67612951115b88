"""The processes of a data-parallel run, as torchrun starts them."""
from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

# A process may wait long for another one that decodes its share of the text.
PATIENCE = timedelta(days=2)


class Processes:
    """Rank and number of the processes. With a single process every method does nothing."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @cached_property
    def store(self) -> dist.Store:
        """The store of the group, where processes count what they take from queues."""
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # It may outlive processes that torchrun starts again (--max-restarts).
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"queue {attempt}", dist.TCPStore(*place, is_master=False))

    @property
    def first(self) -> bool:
        """True if this process prints, logs and writes files."""
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Return whether piece `number` of shared work belongs to this process."""
        return number % self.count == self.rank

    def queue(self, name: str, count: int) -> Iterator[int]:
        """Yield the numbers below `count` that this process takes, each once in a run of all processes."""
        if self.count == 1:
            yield from range(count)
            return
        while (number := self.store.add(name, 1) - 1) < count:
            yield number

    def wait(self) -> None:
        """Wait until all processes have come here."""
        if self.count > 1:
            dist.barrier()

    def sum(self, tensors: list[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all processes, in one exchange."""
        if self.count == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(part.view_as(t))
