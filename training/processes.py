"""Data parallelism over the processes that torchrun starts."""
from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.tp import Ranks

# A rank may wait long for another one that decodes its shard of the text.
RANK_TIMEOUT = timedelta(days=2)


class ProcessGroup:
    """The ranks of a run. With a single rank, no method communicates.

    target_ranks: the `kernels.tp.Ranks` that the target is sharded over; None: each rank has a copy. With a
    sharded target all ranks decode the same conversations; only the rows of a batch are split.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, target_ranks: Ranks | None = None):
        self.rank, self.world_size, self.target_ranks = rank, world_size, target_ranks

    @property
    def is_main(self) -> bool:
        """True on the rank that prints, logs and writes files."""
        return self.rank == 0

    def shard(self, work: list) -> list:
        """Return the items of `work` that belong to this rank."""
        return work[self.rank :: self.world_size]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all ranks, in one all-reduce."""
        if self.world_size == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(part.view_as(t))
