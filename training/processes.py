"""The processes of a data-parallel run, as torchrun starts them."""
from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import InputError
from engine.runtime import use_device


class Processes:
    """Rank and number of the processes. With a single process every method does nothing."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @classmethod
    def from_environment(cls, device: str) -> Processes:
        """Join the group that torchrun describes (gloo on CPU, NCCL on CUDA); without one, a single process.

        Raises InputError if the environment describes a part of a group only.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        if not all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
            raise InputError(
                "WORLD_SIZE is set but not what belongs to it:"
                " start several processes with torchrun, or unset it"
            )
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        # A process may wait long for another one that decodes its share of the text.
        dist.init_process_group(backend, timeout=timedelta(days=2))
        return cls(dist.get_rank(), dist.get_world_size())

    def own_device(self, device: str) -> str:
        """The device of this process, made the current one: of several that share "cuda", each takes a GPU of
        its own.
        """
        if self.count > 1 and device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        if device.startswith("cuda"):
            use_device(torch.device(device), kernels=True)
        return device

    @property
    def first(self) -> bool:
        """Whether this process prints, logs and writes files."""
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Whether piece `number` of some shared work belongs to this process."""
        return number % self.count == self.rank

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
