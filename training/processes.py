"""The processes of a data-parallel run, as torchrun starts them, and the teams that share a target."""
from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import InputError, first_line
from common.torchrun import check_group, end_with_torchrun, waiting_for_others
from engine.runtime import use_device
from kernels.tp import Ranks

# A process may wait long for another one that decodes its share of the text.
PATIENCE = timedelta(days=2)


class Processes:
    """Rank and number of the processes. With a single process every method does nothing.

    Each `team_size` that follow each other are a *team*, which holds one target together; a process alone is
    a team too. store: where processes count what they take from queues.
    """

    def __init__(self, rank: int = 0, count: int = 1, team_size: int = 1, store: dist.Store | None = None):
        self.rank, self.count, self.team_size, self.store = rank, count, team_size, store
        self.team, self.teams = rank // team_size, count // team_size
        self.group: dist.ProcessGroup | None = None  # the team's, if it has several processes
        if team_size > 1:
            groups = [
                dist.new_group(list(range(first, first + team_size)), timeout=PATIENCE)
                for first in range(0, count, team_size)
            ]
            self.group = groups[self.team]

    @classmethod
    def from_environment(cls, device: str, team_size: int = 1) -> Processes:
        """Join the group that torchrun describes (gloo on CPU, NCCL on CUDA); without one, a single process.

        Raises InputError if the environment describes a part of a group only, or none that can be, if its
        processes do not find each other, or if they do not make up teams.
        """
        check_group()
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count % team_size:
            raise InputError(
                f"--target-ranks {team_size}: {count} {'process is' if count == 1 else 'processes are'} no"
                f" multiple of it; start them with torchrun, such as --nproc-per-node {team_size}"
            )
        if count == 1:
            return cls()
        if not all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
            raise InputError(
                "WORLD_SIZE is set but not what belongs to it:"
                " start several processes with torchrun, or unset it"
            )
        end_with_torchrun()
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        try:
            with waiting_for_others(PATIENCE):
                store, rank, count = next(dist.rendezvous("env://", timeout=PATIENCE))
                # The store may outlive processes that torchrun starts again (--max-restarts).
                store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
                group = dist.PrefixStore("group", store)
                dist.init_process_group(backend, store=group, rank=rank, world_size=count, timeout=PATIENCE)
        except (RuntimeError, ValueError) as e:
            raise InputError(f"the processes do not find each other: {first_line(e)}") from None
        return cls(rank, count, team_size, dist.PrefixStore("queue", store))

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

    @property
    def leads(self) -> bool:
        """Whether this process speaks and writes for its team."""
        return self.rank % self.team_size == 0

    @property
    def ranks(self) -> Ranks | None:
        """The team, as those among whom a target is dealt; None if it is this process alone."""
        if self.group is None:
            return None
        return Ranks(self.rank % self.team_size, self.team_size, self.group.group_name)

    def mine(self, number: int) -> bool:
        """Whether piece `number` of some shared work belongs to this process."""
        return number % self.count == self.rank

    def ours(self, number: int) -> bool:
        """Whether piece `number` of such work belongs to this process's team."""
        return number % self.count // self.team_size == self.team

    def queue(self, name: str, count: int) -> Iterator[int]:
        """The numbers below `count` that this process's team takes: the next one whenever it asks.

        Each number is taken once in a run. All of a team ask together.
        """
        if self.count == 1:
            yield from range(count)
            return
        while (number := self.told(self.store.add(name, 1) - 1 if self.leads else None)) < count:
            yield number

    def told(self, what):
        """What the lead of the team says, which can be pickled."""
        if self.group is None:
            return what
        box = [what]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def first_says(self, what):
        """What the first process says, which can be pickled."""
        if self.count == 1:
            return what
        box = [what]
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
