"""Checks of ranks before weights are read."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint.load import read_config
from checkpoint.sharded import shard_bytes, shards_of
from common.errors import InputError
from common.machine import free_memory
from engine.target import Runtime
from kernels.tp import Ranks


def check_ranks(checkpoint: Path, runtime: Runtime, log: Callable[[str], None], ranks: Ranks) -> None:
    """Log the memory of each rank.

    Raises InputError if the ranks differ, or if the target cannot be sharded or does not fit.
    """
    if runtime.autotune:
        raise InputError("--autotune: ranks would choose different kernels by time; leave it out")
    config, device = read_config(checkpoint, "target"), torch.device(runtime.device_name)
    ranks.check_equal(
        f"torch {torch.__version__}, {device.type}, kernels for {runtime.isa_name},"
        f" {torch.get_num_threads()} threads, {config.get('name')}", device
    )
    shards = shards_of(config, ranks.count)
    total, largest, whole = shard_bytes(checkpoint, runtime.torch_dtype, shards)
    attention_layers = config["num_layers"] - sum(config.get("delta_layers", ()))
    cached = 2 * attention_layers * max(shard.keys.count for shard in shards)
    line = (
        f"{ranks.count} ranks: each holds at most {largest / 1e9:.2f} GB of the target's {total / 1e9:.2f} GB"
        f" ({whole / 1e9:.2f} GB are replicated) and caches {cached:,} values per token"
    )
    free, sharing = free_memory(device), ranks_sharing(device)
    if free is not None and largest * sharing > free:
        raise InputError(
            f"{line}; {free / 1e9:.2f} GB are free for {sharing} ranks here: use more ranks or"
            " machines, or quantize"
        )
    log(line)


def shared_memory(ranks: Ranks, device: torch.device, free: int) -> int:
    """Return the memory available to each rank, in bytes: the minimum over ranks. free: bytes free here."""
    return int(ranks.all_gather(torch.tensor([free // ranks_sharing(device)], device=device)).min())


def ranks_sharing(device: torch.device) -> int:
    """Return the number of ranks that share a memory: those of a machine on CPUs, 1 on GPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
