"""The processes of a data-parallel run, as torchrun starts them."""
from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# A process may wait long for another one that decodes its share of the text.
RANK_TIMEOUT = timedelta(days=2)


class Processes:
    """Rank and number of the processes. With a single process every method does nothing."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @property
    def first(self) -> bool:
        """True if this process prints, logs and writes files."""
        return self.rank == 0

    def share(self, work: list) -> list:
        """Return the pieces of shared work that belong to this process."""
        return work[self.rank :: self.count]

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
