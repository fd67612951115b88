"""Checks of ranks before loading weights."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint.load import read_config
from checkpoint.sharded import shards_of
from common.errors import InputError
from engine.target import Runtime
from kernels.tp import Ranks


def check_ranks(checkpoint: Path, runtime: Runtime, log: Callable[[str], None], ranks: Ranks) -> None:
    """Raise InputError if the ranks differ, or if the target cannot be sharded."""
    if runtime.autotune:
        raise InputError("--autotune: ranks could choose different kernels; leave it out")
    config, device = read_config(checkpoint, "target"), torch.device(runtime.device_name)
    ranks.check_equal(
        f"torch {torch.__version__}, {device.type}, kernels for {runtime.isa_name},"
        f" {torch.get_num_threads()} threads, {config.get('name')}", device
    )
    shards_of(config, ranks.count)
    log(f"{ranks.count} ranks: each holds a shard of the target")


def shared_memory(ranks: Ranks, device: torch.device, free: int) -> int:
    """Return the bytes available to each rank: the minimum over ranks. free: free bytes of its device."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    return int(ranks.all_gather(torch.tensor([free // local_ranks], device=device)).min())
