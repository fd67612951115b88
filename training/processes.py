"""The processes of a data-parallel run, as torchrun starts them; alone without it."""
from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import InputError


class Processes:
    """Rank and number of the processes. Every method is a no-op where there is only one."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @classmethod
    def from_environment(cls, device: str) -> Processes:
        """Join the group torchrun describes (gloo on CPU, NCCL on CUDA); alone if there is none."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        if not all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
            raise InputError(
                "WORLD_SIZE is set but not what belongs to it: start several processes with torchrun, or unset it"
            )
        # Waiting for a process that decodes its share of the text may take long.
        dist.init_process_group(
            "nccl" if torch.device(device).type == "cuda" else "gloo", timeout=timedelta(days=2)
        )
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this one prints, logs and writes files."""
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Whether piece `number` of some shared work is this process's."""
        return number % self.count == self.rank

    def wait(self) -> None:
        """Until all have come here."""
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
        """Take the group down."""
        if self.count > 1:
            dist.destroy_process_group()
