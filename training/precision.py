"""Which dtype a machine trains in: the target's own, or float32 where a CPU multiplies that sooner."""
from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch

from model import Transformer

ROWS, WIDTH = 512, 1024  # of the products that are timed
ROUNDS = 5
CLEARLY = 1.1  # times as fast: what is about equal stays in the target's dtype, which takes half the memory


def training_copy(
    target: Transformer, agreed: Callable[[bool], bool] = lambda faster: faster
) -> Transformer:
    """The target as a head learns from it: in float32 if this CPU multiplies that sooner, else the target.

    Processors whose bfloat16 products are slower than two products of floats are common: those without such
    an instruction, and Intel's that have it but no tiles. agreed: what one of several processes has measured.
    """
    weight = target.embed.weight
    if weight.device.type != "cpu" or weight.dtype == torch.float32:
        return target
    if not agreed(float32_is_faster(weight.dtype)):
        return target
    return copy.deepcopy(target).float()


def float32_is_faster(dtype: torch.dtype) -> bool:
    """Whether products in float32 are clearly faster here than in `dtype`, as measured now."""
    operands = {kind: torch.ones(ROWS, WIDTH, dtype=kind) for kind in (torch.float32, dtype)}
    best = dict.fromkeys(operands, float("inf"))
    for _ in range(ROUNDS):  # in turns, so that what else runs hits both
        for kind, x in operands.items():
            began = time.perf_counter()
            torch.nn.functional.linear(x, x)
            best[kind] = min(best[kind], time.perf_counter() - began)
    return best[dtype] > CLEARLY * best[torch.float32]
