"""Load one rank's shard of a target or head (tensor parallel, `kernels.tp`)."""
from __future__ import annotations

from pathlib import Path

import torch

from checkpoint.load import WEIGHTS, build_module, check_config, load_weights
from head import Head
from kernels.scheme import Scheme
from kernels.tp import Ranks, Shard, shard_module
from model import Transformer


def load_shard(
    folder: Path, config: dict, device: torch.device | str, dtype: torch.dtype | None, ranks: Ranks
) -> Transformer | Head:
    """Load this rank's shard of the module that a config.json describes, and connect it to the other ranks.

    Raises InputError, the same on every rank, if the target cannot be sharded.
    """
    shards = shards_of(config, ranks.count)
    shard = shards[ranks.rank]
    _, first, last = shard.spans["tokens"]
    module = build_module(config, shard.args(check_config(config)), last - first)
    load_weights(module, folder / WEIGHTS, device, dtype, shard.read)
    shard_module(module, shards, ranks)
    return module


def shards_of(config: dict, count: int) -> list[Shard]:
    """Return the shards over `count` ranks of the target, or the head, that a config.json describes.

    Raises InputError, the same on every rank, if it cannot be sharded.
    """
    args = check_config(config)
    scheme = Scheme.from_config(config["quantization"]) if "quantization" in config else None
    tokens = config.get("draft_vocab_size")
    return [Shard.for_rank(args, scheme, rank, count, tokens) for rank in range(count)]
