"""Heads that training goes on from: another head's weights, in one of the same kind or a near one."""
from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint.folder import HEADS, check_args, read_config
from checkpoint.loading import load_head
from common.errors import InputError
from model import Transformer
from networks.block import BlockArgs
from networks.eagle import PEagleArgs
from networks.head import Head, HeadArgs
from training.choices import check_start
from training.new_head import DRAFTS, join, lend_new
from training.shapes import Shape

RIDGE = 1e-4  # of the mean square of a column: for heads of fewer tokens than columns


class Start(NamedTuple):
    """A head to begin with."""

    head: Head
    kind: str


def load_start(folder: str, target: Transformer) -> Start:
    """The head in a converted folder. Raises InputError as `load_head`."""
    try:
        return Start(load_head(folder, target), read_config(folder)["kind"])
    except InputError as e:
        raise InputError(f"--start: {e}") from None


def begun_args(start: Start, kind: str, draft_vocab_size: int, shape: Shape) -> HeadArgs:
    """The arguments of a head of this kind that begins as `start`: its sizes, its states.

    Raises ValueError where it cannot begin so.
    """
    check_start(start.kind, kind)
    given = replace(start.head.args, draft_vocab_size=draft_vocab_size)
    layers = max(given.num_layers, shape.num_layers)
    if given.recycle_normed or (kind == "eagle3" and layers > 1):
        raise ValueError(
            "--start: EAGLE-3 heads of several layers, or that read their own normed output, are not trained"
        )
    if kind == "eagle3":
        return given
    args = {field.name: getattr(given, field.name) for field in fields(given)} | {"num_layers": layers}
    if start.kind == "eagle3":
        args |= {"mask_id": shape.mask_id, "drafts": shape.drafts or DRAFTS}
    elif shape.drafts and kind == "p-eagle":
        args["drafts"] = shape.drafts
    elif shape.drafts:
        args["block"] = shape.drafts + (not args["from_anchor"])
    has = args.get("markov_rank", 0)
    if has and shape.markov_rank not in (0, has):
        raise ValueError(f"--markov-rank {shape.markov_rank}: the head of --start has {has}")
    if not has:
        args |= {"markov_rank": shape.markov_rank, "confidence_reads_markov": shape.markov_rank > 0}
    args["confidence"] = args.get("confidence", False) or shape.confidence
    made = (PEagleArgs if kind == "p-eagle" else BlockArgs)(**args)
    check_args(made)
    return made


def begun_head(
    target: Transformer, kind: str, start: Start, draft_ids: Tensor, shape: Shape, seed: int
) -> tuple[Head, set[str]]:
    """A head in float32 that begins as another one, and the names of the tensors that it took from there.

    What the other has not begins as in a new head, and further layers add nothing yet. Tokens that it could
    not draft are scored as `_foreseen` says. Raises ValueError as `begun_args`.
    """
    torch.manual_seed(seed)
    head = HEADS[kind](begun_args(start, kind, len(draft_ids), shape))
    taken = {name: t.cpu() for name, t in start.head.own_state().items() if t.is_floating_point()}
    draft_ids, held = draft_ids.cpu(), start.head.draft_ids.cpu()
    for name in {"lm_head.weight", "markov_out.weight"} & taken.keys():  # a row for each draft id
        rows: Tensor | float = 0.0
        if name == "lm_head.weight":
            rows = _foreseen(target.lm_rows.detach().float().cpu(), held, taken[name].float())[draft_ids]
        taken[name] = _rows_of(draft_ids, held, taken[name], rows)
    with torch.no_grad():
        for name, p in head.named_parameters():
            if name in taken:
                p.copy_(taken[name])
            elif p.ndim == 2:
                adds = name.endswith(("wo.weight", "w_down.weight"))
                torch.nn.init.normal_(p, std=0.0 if adds else 0.02)
        lend_new(head, target, taken)
    return join(head, target, draft_ids), set(taken)


def _foreseen(of_target: Tensor, held: Tensor, table: Tensor) -> Tensor:
    """What a head's lm_head may have for every token of the vocabulary [V, H].

    The target's rows [V, Ht], turned as those of the tokens that the head holds [m] best become its own
    table [m, H], by least squares. Rows as the target has them would be read with states that are not the
    target's: most of the head's choices would be tokens that it does not know.
    """
    known = of_target[held].double()
    square = known.T @ known
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    turn = torch.linalg.solve(square + ridge, known.T @ table.double())
    return of_target @ turn.float()


def _rows_of(wanted: Tensor, held: Tensor, table: Tensor, others: Tensor | float) -> Tensor:
    """The rows of a table for `wanted` ids [n], ascending as `held` [m] are, whose rows it has [m, H].

    others: the rows of those that are not held.
    """
    places = torch.searchsorted(held, wanted).clamp(max=len(held) - 1)
    return torch.where((held[places] == wanted)[:, None], table.float()[places], others)
