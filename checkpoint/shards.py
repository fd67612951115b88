"""What each of several ranks reads of a target's file, and what it weighs."""
from __future__ import annotations

import math
from pathlib import Path

import torch

from checkpoint.folder import check_config
from checkpoint.names import ADVICE, WEIGHTS
from checkpoint.weights import bytes_of, listed
from kernels.quantized import Scheme
from kernels.tp import Share


def shares_of(config: dict, count: int) -> list[Share]:
    """What each of `count` ranks has of the target, or the head, that a config.json describes.

    Raises InputError, with the numbers, if it cannot be dealt to so many; every rank raises the same.
    """
    args = check_config(config)
    scheme = Scheme.read(config["quantization"]) if "quantization" in config else None
    tokens = config.get("draft_vocab_size")
    return [Share.of(args, scheme, rank, count, tokens) for rank in range(count)]


def weigh(folder: Path, dtype: torch.dtype | None, shares: list[Share]) -> tuple[int, int, int]:
    """Bytes of a target's weights in this dtype (None: as stored): in all, what the rank that has most of
    them holds, and what is whole on every rank. Only the file's header is read.

    Raises InputError if there is no such file, or it is damaged.
    """
    held, whole, total = [0] * len(shares), 0, 0
    for name, stored in listed(folder / WEIGHTS, ADVICE).items():
        size, shape = bytes_of(name, stored, dtype), stored.shape
        total += math.prod(shape) * size
        whole += math.prod(shape) * size if shares[0].cut(name, shape) is None else 0
        for rank, share in enumerate(shares):
            held[rank] += math.prod(share.shape(name, shape)) * size
    return total, max(held), whole
