"""Before a target is dealt among ranks: whether they are alike, and what each of them will hold."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint.folder import read_config
from checkpoint.loading import shares_of, weigh
from common.errors import InputError
from engine.memory import free_memory
from engine.runtime import Runtime
from kernels.tp import Ranks


def prepare(checkpoint: Path, runtime: Runtime, say: Callable[[str], None], ranks: Ranks) -> None:
    """Tell, before weights are read, what each rank will hold.

    Raises InputError, with the numbers, if the ranks differ, or the target cannot be dealt or does not fit.
    """
    if runtime.autotune:
        raise InputError("--autotune: ranks would choose different kernels by time; leave it out")
    config, device = read_config(checkpoint, "target"), torch.device(runtime.device_name)
    ranks.agree(
        f"torch {torch.__version__}, {device.type}, kernels for {runtime.isa_name},"
        f" {torch.get_num_threads()} threads, {config.get('name')}", device
    )
    shares = shares_of(config, ranks.count)
    total, most, whole = weigh(checkpoint, runtime.torch_dtype, shares)
    cached = 2 * config["num_layers"] * max(share.keys.count for share in shares)
    line = (
        f"{ranks.count} ranks: each holds at most {most / 1e9:.2f} GB of the target's {total / 1e9:.2f} GB"
        f" ({whole / 1e9:.2f} GB are whole on each), and caches {cached:,} numbers a token"
    )
    # GPUs have a memory each; the ranks of a machine share that of its processors.
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    free = free_memory(device)
    if free is not None and most * sharing > free:
        raise InputError(
            f"{line}; {free / 1e9:.2f} GB are free for {sharing} of them here: take more ranks or"
            " machines, or quantise"
        )
    say(line)
