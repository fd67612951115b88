"""The processes among which a target is dealt, as torchrun starts them, and what they tell each other.

Each has a number, its *rank*. All of them run the same step on the same texts. They exchange sums of what
layers give, scores of tokens and the drafted tree, never anything of the host's. The operators are those that
torch.compile traces and CUDA graphs capture: NCCL on GPUs, gloo on CPUs.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.errors import InputError, first_line
from common.torchrun import check_group, end_with_torchrun, waiting_for_others

PATIENCE = timedelta(minutes=10)  # for a rank that lives and does not answer: it may be compiling
LOST = "closed by peer", "reset by peer", "Broken pipe", "Timed out", "Socket", "gloo", "onnect"


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a target: number `rank` of `count`, in torch's group `group`.

    heads: what drafts is dealt too; else it is whole on every rank.
    """

    rank: int
    count: int
    group: str
    heads: bool = False

    @property
    def of_heads(self) -> Ranks | None:
        """The ranks that what drafts is dealt among, if it is."""
        return self if self.heads else None

    def every(self, x: Tensor) -> Tensor:
        """x [...] of all ranks [count, ...], in their order."""
        ops = torch.ops._c10d_functional
        all_of_them = ops.all_gather_into_tensor(x.contiguous()[None], self.count, self.group)
        return ops.wait_tensor(all_of_them)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x [...] over all ranks, on each.

        On a CPU it is added in the order of the ranks: what it gives for a row does not depend on how many
        rows there are, as with all our kernels there, and is the same bits on each rank.
        """
        if x.is_cuda:
            ops = torch.ops._c10d_functional
            return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", self.group))
        total, *others = self.every(x).unbind(0)
        for other in others:
            total = total + other
        return total

    def join(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Parts x [..., sizes[rank]] of all ranks, side by side [..., sum(sizes)]."""
        most = max(sizes)
        parts = self.every(F.pad(x, (0, most - x.shape[-1])))
        return torch.cat([part[..., :size] for part, size in zip(parts.unbind(0), sizes)], -1)

    def best(self, value: Tensor, token: Tensor) -> Tensor:
        """Of all ranks' best tokens [...] those with the largest value [...], float32. Of equals the first.

        A token and its value travel as two float64, which hold both exactly.
        """
        values, tokens = self.every(torch.stack((value.double(), token.double()))).unbind(1)
        return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()

    def first(self, x: Tensor) -> Tensor:
        """What rank 0 has of x [...]."""
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.broadcast(x.contiguous(), 0, self.group))

    def agree(self, what: str, device: torch.device | str) -> None:
        """Raise InputError unless all ranks say the same of what their steps depend on."""
        said = self.every(_digest(what, device)).tolist()
        if len(set(said)) > 1:
            raise InputError(
                f"{self.count} ranks that differ: start all with one command, on machines alike (this one:"
                f" {what:.300})"
            )

    def agree_on(self, command: str, device: torch.device | str) -> None:
        """Raise InputError unless all ranks were started alike. command: see `common.torchrun`."""
        said = self.every(_digest(command, device)).tolist()
        if len(set(said)) > 1:
            others = ", ".join(str(i) for i, one in enumerate(said) if one != said[0])
            raise InputError(
                f"{self.count} ranks with different options, prompts or questions (rank {others} has not"
                " those of rank 0): start all with one command"
            )

    def name(self, what: str, device: torch.device | str) -> str:
        """A digest of what rank 0 says."""
        return f"{self.first(_digest(what, device)).item():x}"


def _digest(what: str, device: torch.device | str) -> Tensor:
    return torch.tensor(int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "little"), device=device)


def own_device(device: str) -> str:
    """The device of this process: of those on a machine that share "cuda", each takes a GPU of its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device


def is_loss(error: RuntimeError) -> bool:
    """Whether an error says that another rank is lost."""
    return isinstance(error, dist.DistError) or any(words in str(error) for words in LOST)


@contextlib.contextmanager
def joined(device: str, heads: bool = False) -> Iterator[Ranks]:
    """The ranks that torchrun's environment describes, within this context. heads: see `Ranks`.

    Raises InputError if it describes a part of them only, if they do not find each other, or, out of the
    context, if one of them is lost or torchrun ends this one.
    """
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise InputError(f"{', '.join(missing)}: not set; start several processes with torchrun")
    check_group()
    end_with_torchrun()
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(torch.device(own_device(device)))
    try:
        with waiting_for_others(PATIENCE):
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as e:
        raise InputError(f"the ranks do not find each other: {first_line(e)}") from None
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name, heads)
    this = f"rank {ranks.rank} of {ranks.count}"
    try:
        with _ended_by_a_signal(this):
            yield ranks
    except RuntimeError as e:
        if not is_loss(e):
            raise
        raise InputError(
            f"{this} has lost another one ({first_line(e)}), so all end; torchrun's report says which, the"
            " system's log may say why"
        ) from e
    dist.destroy_process_group()


@contextlib.contextmanager
def _ended_by_a_signal(this: str) -> Iterator[None]:
    """A context that SIGTERM, which torchrun sends when a rank has died, leaves with an InputError."""
    def end(number: int, frame: object) -> None:
        raise InputError(f"{this} is ended: torchrun, or another rank, has died or was told to end")

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except BaseException:  # a last line is not to be cut off
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def short_sums_in_shared_memory(ranks: Ranks, device: torch.device) -> str:
    """Let GPUs that see each other's memory add short rows there (torch's symmetric memory), if they can; say
    which way it is.

    torch.compile then makes such a sum one kernel instead of NCCL's. Never run on a GPU so far.
    """
    import torch._inductor.config as settings

    try:
        from torch.distributed import _symmetric_memory as shared

        most = settings._collective.one_shot_all_reduce_threshold_bytes
        with warnings.catch_warnings():  # PyTorch 2.13 says that it is needless, and asks for it
            warnings.simplefilter("ignore")
            shared.enable_symm_mem_for_group(ranks.group)
        tried = shared.empty(128, dtype=torch.bfloat16, device=device).fill_(1)
        shared.rendezvous(tried, ranks.group)
        total = torch.ops.symm_mem.one_shot_all_reduce(tried, "sum", ranks.group)
        can, why = bool((total == ranks.count).all()), "it adds up wrongly"
    except (ImportError, AttributeError, RuntimeError) as e:
        can, why = False, first_line(e)
    if bool(ranks.every(torch.tensor(can, device=device).int()).all()):
        settings._collective.auto_select = True
        return f"in symmetric memory up to {most:,} bytes, else by NCCL"
    return f"by NCCL; symmetric memory cannot be had ({why if not can else 'on another rank'})"
