"""The processes of a data-parallel run, as torchrun starts them."""
from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import InputError, first_line
from common.torchrun import check_group, end_with_torchrun, several

START = timedelta(minutes=10)  # for all processes to come up
# A process may wait long for another one that decodes its share of the text.
PATIENCE = timedelta(days=2)


class Processes:
    """Rank and number of the processes. With a single process every method does nothing.

    store: where processes count what they take from queues.
    """

    def __init__(self, rank: int = 0, count: int = 1, store: dist.Store | None = None):
        self.rank, self.count, self.store = rank, count, store

    @classmethod
    def from_environment(cls, device: str) -> Processes:
        """Join the group that torchrun describes (gloo on CPU, NCCL on CUDA); without one, a single process.

        Raises InputError if the environment describes no process of a group, or if they do not find each
        other.
        """
        if not several():
            return cls()
        check_group()
        end_with_torchrun()
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        try:
            store, rank, count = next(dist.rendezvous("env://", timeout=START))
            # The store may outlive processes that torchrun starts again (--max-restarts).
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
            group = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=group, rank=rank, world_size=count, timeout=PATIENCE)
        except (RuntimeError, ValueError) as e:
            raise InputError(f"the processes do not find each other: {first_line(e)}") from None
        return cls(rank, count, dist.PrefixStore("queue", store))

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

    def from_first(self, value):
        """Return the value, which can be pickled, of the first process."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

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

    def leave(self) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()
