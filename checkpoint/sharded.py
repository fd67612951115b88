"""Load one rank's shard of a target or head (tensor parallel, `kernels.tp`)."""
from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from checkpoint.load import ADVICE, WEIGHTS, Stored, build_module, check_config, load_weights, stored_tensors
from head import Head
from kernels.quantized import Scheme
from kernels.tp import Ranks, Shard, shard_module
from model import Transformer


def load_shard(
    folder: Path, config: dict, device: torch.device | str, dtype: torch.dtype | None, ranks: Ranks
) -> Transformer | Head:
    """Load this rank's shard of the module that a config.json describes, and let it compute with the others.

    Raises InputError, the same on every rank, if the target cannot be sharded.
    """
    shards = shards_of(config, ranks.count)
    shard = shards[ranks.rank]
    module = build_module(config, shard.args(check_config(config)), shard.tokens.count)
    load_weights(module, folder / WEIGHTS, device, dtype, shard.read)
    shard_module(module, shards, ranks)
    return module


def shards_of(config: dict, count: int) -> list[Shard]:
    """Return the shards over `count` ranks of the target, or the head, that a config.json describes.

    Raises InputError, with the numbers, if it cannot be sharded; every rank raises the same.
    """
    args = check_config(config)
    scheme = Scheme.from_config(config["quantization"]) if "quantization" in config else None
    tokens = config.get("draft_vocab_size")
    return [Shard.for_rank(args, scheme, rank, count, tokens) for rank in range(count)]


def shard_bytes(folder: Path, dtype: torch.dtype | None, shards: list[Shard]) -> tuple[int, int, int]:
    """Return the bytes of a target's weights in this dtype (None: as stored).

    They are those of the target, of the largest shard, and of tensors that every rank holds whole. Only the
    file's header is read. Raises InputError if there is no such file, or it is damaged.
    """
    held, whole, total = [0] * len(shards), 0, 0
    for name, stored in stored_tensors(folder / WEIGHTS, ADVICE).items():
        size, shape = bytes_of(name, stored, dtype), stored.shape
        total += math.prod(shape) * size
        whole += math.prod(shape) * size if shards[0].cut(name, shape) is None else 0
        for rank, shard in enumerate(shards):
            held[rank] += math.prod(shard.shape(name, shape)) * size
    return total, max(held), whole


def bytes_of(name: str, stored: Stored, dtype: torch.dtype | None) -> int:
    """Return the bytes of one number of a tensor after loading it in this dtype; None: in the stored one."""
    if dtype is not None and stored.dtype in ("F32", "BF16", "F16") and not name.endswith(".scale"):
        return dtype.itemsize
    return int(re.search(r"\d+", stored.dtype)[0]) // 8  # BF16, F8_E4M3
