"""The shape of a new head: what a user may choose of it, and what it takes from the target otherwise.

Judged before torch is there.
"""
from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from checkpoint.folder import check_args
from model import ModelArgs
from networks.read_states import eagle3_aux_layers, spread_layers

MARKOV_RANK = 128  # of a DSpark head


@dataclass(frozen=True)
class Shape:
    """What a user may choose about a head; None takes the target's, or what is usual for its kind."""

    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    num_layers: int = 1
    states: int | None = None  # of the target that it reads
    drafts: int | None = None  # tokens that a block drafts (DRAFTS, or those of the head that it begins as)
    mask_id: int = 0
    markov_rank: int = 0
    confidence: bool = False


def shape_of(o: argparse.Namespace) -> Shape:
    """What the options of train.py say of it."""
    rank = o.markov_rank
    if rank is None:
        rank = MARKOV_RANK if o.kind == "dspark" and not o.start else 0
    return Shape(
        o.hidden_size, o.intermediate_size, o.heads, o.kv_heads, o.head_dim, o.layers or 1, o.states,
        o.drafts, markov_rank=rank, confidence=rank > 0 if o.confidence is None else o.confidence,
    )


def head_sizes(target: Mapping[str, int], kind: str, shape: Shape) -> dict:
    """The sizes of a head of this kind, not Medusa or Hydra, and the `aux_layers` that it reads.

    target: its sizes, named as in its config.json. Raises ValueError on a shape that cannot be, Wrong if that
    is a single size.
    """
    hidden = shape.hidden_size or target["hidden_size"]
    if hidden != target["hidden_size"] and kind == "eagle":
        raise ValueError("--hidden-size: an EAGLE-1 head predicts the target's features and has their width")
    num_heads, count = shape.num_heads or target["num_heads"], target["num_layers"]
    aux_layers: tuple[int, ...] = (count,)
    if kind in ("eagle3", "p-eagle"):
        if count < 4:
            raise ValueError(
                f"an EAGLE-3 head reads three states of its target, which has {count} layers:"
                " use --kind eagle"
            )
        low, middle, high = eagle3_aux_layers(count)
        aux_layers = low, max(middle, 3), max(high, 4)  # of a shallow target the next ones that differ
    if kind in ("dflash", "dspark") or (shape.states and kind != "eagle"):
        aux_layers = spread_layers(count, shape.states or min(5, max(1, count - 3)))
    sizes = {
        "hidden_size": hidden, "intermediate_size": shape.intermediate_size or target["intermediate_size"],
        "num_layers": shape.num_layers, "num_heads": num_heads,
        "num_kv_heads": shape.num_kv_heads or min(target["num_kv_heads"], num_heads),
        "head_dim": shape.head_dim or target["head_dim"],
    }
    check_args(ModelArgs(vocab_size=1, **sizes))
    return sizes | {"aux_layers": aux_layers}
