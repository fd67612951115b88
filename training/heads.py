"""The kinds of heads that can be trained, and their initialization, also from another head (--start)."""
from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint.eagle_layouts import eagle3_aux_layers
from checkpoint.load import check_args, class_of
from head import Eagle1Head, Eagle3Head, Head, HeadArgs
from model import ModelArgs, Transformer
from networks.block import DSparkHead, evenly_spaced_layers
from networks.markov import MarkovArgs
from networks.p_eagle import PEagleHead
from networks.weights import own_state
from training.losses import BlockObjective, Eagle1Objective, Eagle3Objective, Objective, PEagleObjective

BLOCK_DRAFTS = 7  # draft tokens of a block
MARKOV_RANK = 128  # of a new DSpark head
RIDGE = 1e-4  # regularization / mean diagonal, for heads with fewer draft ids than lm_head columns


class TrainedKind(NamedTuple):
    """A kind of head that can be trained. options: of train.py, which only some kinds take."""

    title: str  # on the model card
    objective: type[Objective]
    options: tuple[str, ...] = ()


COMMON = "draft_vocab", "states", "loss", "start"
BLOCK = *COMMON, "layers", "drafts"
MARKOV = *BLOCK, "markov_rank"
TRAINED = {
    "eagle3": TrainedKind("EAGLE-3 head", Eagle3Objective, (*COMMON, "steps")),
    "p-eagle": TrainedKind("P-EAGLE head", PEagleObjective, MARKOV),
    "dflash": TrainedKind("DFlash head", BlockObjective, BLOCK),
    "dspark": TrainedKind("DSpark head", BlockObjective, MARKOV),
    "eagle": TrainedKind("EAGLE-1/EAGLE-2 head", Eagle1Objective),
}
HEAD_OPTIONS = "kind", *dict.fromkeys(name for kind in TRAINED.values() for name in kind.options)


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head that users may set. None: the default, or that of --start."""

    num_layers: int | None = None
    states: int | None = None  # hidden states of the target that it reads
    drafts: int | None = None  # draft tokens of a block
    markov_rank: int | None = None
    mask_id: int = 0
    max_length: int = 0  # tokens of the longest training row


def aux_layers(network: type[Head], count: int, states: int | None) -> tuple[int, ...]:
    """Return the layers whose input states a head reads. count: layers of the target. Raises ValueError."""
    if network is Eagle1Head:
        return (count,)
    if issubclass(network, Eagle3Head):
        if count < 4:
            raise ValueError(f"an EAGLE-3 head reads three states, the target has {count} layers")
        if states is None:
            low, middle, high = eagle3_aux_layers(count)
            return low, max(middle, 3), max(high, 4)  # in a shallow target, the next distinct layers
    return evenly_spaced_layers(count, states or min(5, max(1, count - 3)))


def head_args(
    target: ModelArgs, kind: str, draft_vocab_size: int, shape: HeadShape, start: Head | None = None
) -> HeadArgs:
    """Return the arguments of a head for a target with arguments `target`, based on those of `start`, if any.

    Raises ValueError on an invalid shape, or one that drops a part of `start`.
    """
    network = class_of({"kind": kind, **(asdict(start.args) if start else {})})
    if start is None:
        args = {
            "vocab_size": target.vocab_size, "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size, "num_layers": shape.num_layers or 1,
            "num_heads": target.num_heads, "num_kv_heads": target.num_kv_heads, "head_dim": target.head_dim,
            "norm_eps": target.norm_eps, "rope_base": target.rope_base, "rope_scaling": None,
            "max_seq_len": target.max_seq_len, "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": target.hidden_size, "own_embedding": False,
            "own_lm_head": network is not Eagle1Head,
            "aux_layers": aux_layers(network, target.num_layers, shape.states),
        }
    else:
        args = _args_of(start, network, shape) | {"draft_vocab_size": draft_vocab_size}
        args["own_lm_head"] |= draft_vocab_size < target.vocab_size  # the target's has a row for every id
    args["draft_window"] = max(shape.max_length, args.get("draft_window", 0))
    if issubclass(network.Args, MarkovArgs):
        start_rank, rank = args.get("markov_rank", 0), shape.markov_rank
        if start_rank and rank not in (None, start_rank):
            raise ValueError(f"--markov-rank {rank}: the head of --start has rank {start_rank}, which cannot"
                             " change; leave the option out")
        if rank is None:
            rank = MARKOV_RANK if start is None and network is DSparkHead else start_rank
        if rank and not start_rank:
            args |= {"markov_rank": rank, "confidence": True, "confidence_reads_markov": True}
        args.setdefault("mask_id", shape.mask_id)
        if shape.drafts or not {"block", "drafts"} & args.keys():
            drafts, from_anchor = shape.drafts or BLOCK_DRAFTS, args.get("from_anchor", network is DSparkHead)
            block = {"block": drafts + (not from_anchor), "from_anchor": from_anchor}
            args |= {"drafts": drafts} if network is PEagleHead else block
    checked = network.Args(**args)
    check_args(checked)
    return checked


def _args_of(start: Head, network: type[Head], shape: HeadShape) -> dict:
    """Return the arguments of `start`, with additional layers if requested. Raises ValueError."""
    args = start.args
    layers = shape.num_layers or args.num_layers
    if type(start) is not network and not (isinstance(start, Eagle3Head) and network is PEagleHead):
        raise ValueError(f"--start: {network.__name__} cannot start from {type(start).__name__}")
    several_layers = layers > 1 and isinstance(start, Eagle3Head) and network is not PEagleHead
    if several_layers or getattr(args, "recycle_normed", False):
        raise ValueError("--start: training EAGLE-3 heads with several layers, or that read their own normed"
                         " output, is not supported")
    if layers < args.num_layers:
        raise ValueError(f"--layers {layers}: the head of --start has {args.num_layers}; pass at least that")
    fields_of_start = {field.name: getattr(args, field.name) for field in fields(args)}
    return fields_of_start | {
        "num_layers": layers, "draft_window": args.draft_window or args.max_seq_len}


def own_weights(head: Head) -> dict[str, Tensor]:
    """Return the weights that a head does not share with its target, by name."""
    return {name: tensor for name, tensor in own_state(head).items() if tensor.is_floating_point()}


def new_head(
    target: Transformer, kind: str, draft_ids: Tensor, shape: HeadShape, seed: int, start: Head | None = None
) -> Head:
    """Make a head in float32, initialized from `start`, else from the target; the rest is random.

    Without `start`, lm_head has the target's rows, and the final norm 0.3 times the target's weights (with
    the full ones an untrained head is overconfident); `fc` copies the highest captured layer (EAGLE-1: the
    feature). Each of these gained several points of held-out accuracy in equally short runs. With `start`,
    additional layers add zero to the residual stream. Raises ValueError as `head_args`.
    """
    args = head_args(target.args, kind, len(draft_ids), shape, start)
    torch.manual_seed(seed)
    head = class_of({"kind": kind, **asdict(args)})(args)
    copied = _weights_of(start, target, draft_ids.cpu()) if start else {}
    residual_std = 0.0 if start else 0.02 / math.sqrt(2)
    with torch.no_grad():
        for name, p in head.named_parameters():
            if name in copied:
                p.copy_(copied[name])
            elif p.ndim == 2:
                into_residual = name.endswith(("wo.weight", "w_down.weight"))
                torch.nn.init.normal_(p, std=residual_std if into_residual else 0.02)
        if start is None:
            head.fc.weight.mul_(0.3)
            head.fc.weight[:, -args.hidden_size :] += torch.eye(args.hidden_size)
            if args.own_lm_head:
                head.lm_head.weight.copy_(target.output_layer.weight.float().cpu()[draft_ids.cpu()])
                head.norm.weight.copy_(target.norm.scale.float().cpu() * 0.3)
        _initialize_block_weights(head, target, copied)
    head.draft_ids.copy_(draft_ids)
    head = head.to(target.embed.device)
    head.use_target(target)  # shared and frozen
    return head


def _weights_of(start: Head, target: Transformer, draft_ids: Tensor) -> dict[str, Tensor]:
    """Return the weights of `start` for a head with these draft ids.

    For ids outside the draft vocabulary of `start`, lm_head rows are predicted and Markov rows are zero.
    """
    copied = {name: tensor.float().cpu() for name, tensor in own_weights(start).items()}
    start_ids = start.draft_ids.cpu()
    index = torch.searchsorted(start_ids, draft_ids).clamp(max=len(start_ids) - 1)
    known = (start_ids[index] == draft_ids)[:, None]
    for name in {"lm_head.weight", "markov_out.weight"} & copied.keys():  # a row for each draft id
        others: Tensor | float = 0.0
        if name == "lm_head.weight":
            rows = target.output_layer.weight.detach().float().cpu()
            others = _predict_lm_head(rows, start_ids, copied[name])[draft_ids]
        copied[name] = torch.where(known, copied[name][index], others)
    if "lm_head.weight" not in copied and len(draft_ids) < len(start_ids):  # it shared the target's
        copied["lm_head.weight"] = target.output_layer.weight.detach().float().cpu()[draft_ids]
    return copied


def _initialize_block_weights(head: Head, target: Transformer, copied: Container[str]) -> None:
    """Initialize the weights that only block heads have, unless they were copied.

    The Markov head reads the target's embedding projected on its principal axes, and its output is zero.
    """
    if isinstance(head, PEagleHead) and "mask_hidden" not in copied:
        torch.nn.init.normal_(head.mask_hidden, std=0.02)
    if (rank := getattr(head.args, "markov_rank", 0)) and "markov_in.weight" not in copied:
        table = target.embed.weight.float().cpu()
        axes = torch.linalg.svd(table.T @ table)[0][:, :rank]
        projected = torch.nn.functional.pad(table @ axes, (0, rank - axes.shape[1]))
        head.markov_in.weight.copy_(projected / projected.std())
        head.markov_out.weight.zero_()
    if getattr(head.args, "confidence", False) and "confidence.weight" not in copied:
        head.confidence.weight.zero_()
        head.confidence.bias.zero_()


def _predict_lm_head(rows: Tensor, start_ids: Tensor, table: Tensor) -> Tensor:
    """Predict a head's lm_head row of every token [V, H] from the target's rows [V, Ht].

    The prediction is a least-squares map from the target's rows of `start_ids` [m] to the head's own `table`
    [m, H]. The head's hidden states are not the target's: with the target's rows unchanged, most top-1 tokens
    would be new ids.
    """
    known = rows[start_ids].double()
    square = known.T @ known
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    return rows @ torch.linalg.solve(square + ridge, known.T @ table.double()).float()
