"""What several ranks that share a target check and say before weights are read."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint.load import read_config
from checkpoint.sharded import shard_bytes, shards_of
from common.errors import InputError
from common.machine import free_memory
from engine.runtime import Runtime
from kernels.tp import Ranks


def check_ranks(checkpoint: Path, runtime: Runtime, log: Callable[[str], None], ranks: Ranks) -> None:
    """Log what each rank will hold.

    Raises InputError, with the numbers, if the ranks differ, or the target cannot be sharded or does not fit.
    """
    if runtime.autotune:
        raise InputError("--autotune: ranks would choose different kernels by time; leave it out")
    config, device = read_config(checkpoint, "target"), torch.device(runtime.device_name)
    ranks.agree(
        f"torch {torch.__version__}, {device.type}, kernels for {runtime.isa_name},"
        f" {torch.get_num_threads()} threads, {config.get('name')}", device
    )
    shards = shards_of(config, ranks.count)
    total, largest, whole = shard_bytes(checkpoint, runtime.torch_dtype, shards)
    attending = config["num_layers"] - sum(config.get("delta_layers", ()))
    cached = 2 * attending * max(shard.keys.count for shard in shards)
    line = (
        f"{ranks.count} ranks: each holds at most {largest / 1e9:.2f} GB of the target's {total / 1e9:.2f} GB"
        f" ({whole / 1e9:.2f} GB are whole on each), and caches {cached:,} numbers a token"
    )
    free, sharing = free_memory(device), ranks_sharing(device)
    if free is not None and largest * sharing > free:
        raise InputError(
            f"{line}; {free / 1e9:.2f} GB are free for {sharing} of them here: take more ranks or"
            " machines, or quantize"
        )
    log(line)


def shared_memory(ranks: Ranks, device: torch.device, free: int) -> int:
    """Return the least memory that a rank has for itself, in bytes. free: bytes that are free here."""
    return int(ranks.all_gather(torch.tensor([free // ranks_sharing(device)], device=device)).min())


def ranks_sharing(device: torch.device) -> int:
    """Return how many ranks share a memory: ranks of a machine share its main memory, GPUs have their own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
