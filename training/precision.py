"""Which dtype a machine trains in: the target's own, or float32 where a CPU multiplies that sooner."""
from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from typing_extensions import TypedDict

from common.files import read_json, write_text
from common.schema import Flag, Schema
from model import Transformer

CHOICE = "precision.json"  # in the folder of --work
KEPT = Schema(TypedDict("Kept", {"float32": Flag}))
ROWS, WIDTH = 512, 1024  # of the products that are timed
ROUNDS = 5
CLEARLY = 1.1  # times as fast: what is about equal stays in the target's dtype, which takes half the memory


def training_copy(
    target: Transformer, work: Path, agreed: Callable[[bool], bool] = lambda faster: faster
) -> Transformer:
    """The target as a head learns from it: in float32 if this CPU multiplies that sooner, else the target.

    Processors whose bfloat16 products are slower than two products of floats are common: those without such
    an instruction, and Intel's that have it but no tiles. What was measured first is kept in the folder
    `work`, and holds for all that go on there: a training is one of numbers of one dtype. agreed: what one of
    several processes has found. Raises InputError if what is kept there is damaged.
    """
    weight = target.embed.weight
    if weight.device.type != "cpu" or weight.dtype == torch.float32:
        return target
    kept = work / CHOICE
    known = KEPT.require(read_json(kept), kept, "delete it")["float32"] if kept.exists() else None
    faster = agreed(float32_is_faster(weight.dtype) if known is None else known)
    if known is None:
        write_text(kept, json.dumps({"float32": faster}) + "\n")
    return copy.deepcopy(target).float() if faster else target


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
