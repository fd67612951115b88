"""Load one rank's shard of a target or head (tensor parallel, `kernels.tp`)."""
from __future__ import annotations

import math
from pathlib import Path

import torch

from checkpoint.load import ADVICE, WEIGHTS, build_module, check_config, load_weights
from checkpoint.weights import bytes_of, listed
from head import Head
from kernels.quantized import Scheme
from kernels.tp import Ranks, Share, deal
from model import Transformer


def load_shard(
    folder: Path, config: dict, device: torch.device | str, dtype: torch.dtype | None, ranks: Ranks
) -> Transformer | Head:
    """Load this rank's shard of the module that a config.json describes, and let it compute with the others.

    Raises InputError, the same on every rank, if they cannot share it.
    """
    shares = shares_of(config, ranks.count)
    share = shares[ranks.rank]
    module = build_module(config, share.args(check_config(config)), share.tokens.count)
    load_weights(module, folder / WEIGHTS, device, dtype, share.take)
    deal(module, shares, ranks)
    return module


def shares_of(config: dict, count: int) -> list[Share]:
    """Return what each of `count` ranks has of the target, or the head, that a config.json describes.

    Raises InputError, with the numbers, if `count` ranks cannot share it; every rank raises the same.
    """
    args = check_config(config)
    scheme = Scheme.read(config["quantization"]) if "quantization" in config else None
    tokens = config.get("draft_vocab_size")
    return [Share.of(args, scheme, rank, count, tokens) for rank in range(count)]


def weigh(folder: Path, dtype: torch.dtype | None, shares: list[Share]) -> tuple[int, int, int]:
    """Return the bytes of a target's weights in this dtype (None: as stored).

    In all, of the rank that holds most, and of what every rank holds. Only the file's header is read. Raises
    InputError if there is no such file, or it is damaged.
    """
    held, whole, total = [0] * len(shares), 0, 0
    for name, stored in listed(folder / WEIGHTS, ADVICE).items():
        size, shape = bytes_of(name, stored, dtype), stored.shape
        total += math.prod(shape) * size
        whole += math.prod(shape) * size if shares[0].cut(name, shape) is None else 0
        for rank, share in enumerate(shares):
            held[rank] += math.prod(share.shape(name, shape)) * size
    return total, max(held), whole
