"""The heads that training starts from: one entry a kind, new heads, and heads that begin as another one."""
from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint.load import check_args, class_of
from head import Eagle1Head, Eagle3Head, Head, HeadArgs, eagle3_aux_layers
from model import ModelArgs, Transformer
from networks.block import DSparkHead, spread_layers
from networks.markov import MarkovArgs
from networks.p_eagle import PEagleHead
from networks.weights import own_state
from training.losses import BlockObjective, Eagle1Objective, Eagle3Objective, Objective, PEagleObjective

DRAFTS = 7  # tokens that a block drafts
MARKOV_RANK = 128  # of a DSpark head
RIDGE = 1e-4  # of the mean square of a column: for heads of fewer tokens than columns


class TrainedKind(NamedTuple):
    """A kind of head that can be trained. options: those of train.py that only some kinds have."""

    title: str  # on the model card
    speculate: str  # the method of generate.py that drafts with it
    objective: type[Objective]
    options: tuple[str, ...] = ()


COMMON = "draft_vocab", "states", "loss", "start"
BLOCK = *COMMON, "layers", "drafts"
MARKOV = *BLOCK, "markov_rank"
TRAINED = {
    "eagle3": TrainedKind("EAGLE-3 head", "eagle3", Eagle3Objective, (*COMMON, "steps")),
    "p-eagle": TrainedKind("P-EAGLE head", "p-eagle", PEagleObjective, MARKOV),
    "dflash": TrainedKind("DFlash head", "dflash", BlockObjective, BLOCK),
    "dspark": TrainedKind("DSpark head", "dspark", BlockObjective, MARKOV),
    "eagle": TrainedKind("EAGLE-1/EAGLE-2 head", "eagle2", Eagle1Objective),
}


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head that a user may choose. None takes the usual ones, or those of --start."""

    num_layers: int | None = None
    states: int | None = None  # of the target that it reads
    drafts: int | None = None  # tokens that a block drafts
    markov_rank: int | None = None
    mask_id: int = 0
    longest: int = 0  # tokens of the longest text that it is trained on


def aux_layers(network: type[Head], count: int, states: int | None) -> tuple[int, ...]:
    """Return the layers whose states a head reads. count: layers of the target. Raises ValueError."""
    if network is Eagle1Head:
        return (count,)
    if issubclass(network, Eagle3Head):
        if count < 4:
            raise ValueError(f"an EAGLE-3 head reads three states, the target has {count} layers")
        if states is None:
            low, middle, high = eagle3_aux_layers(count)
            return low, max(middle, 3), max(high, 4)  # of a shallow target the next ones that differ
    return spread_layers(count, states or min(5, max(1, count - 3)))


def head_args(
    a: ModelArgs, kind: str, draft_vocab_size: int, shape: HeadShape, start: Head | None = None
) -> HeadArgs:
    """Return the arguments of a head for a target of arguments `a`, those of `start` where it begins so.

    Raises ValueError on a shape that cannot be, or that takes away what `start` has.
    """
    network = class_of({"kind": kind, **(asdict(start.args) if start else {})})
    if start is None:
        args = {
            "vocab_size": a.vocab_size, "hidden_size": a.hidden_size,
            "intermediate_size": a.intermediate_size, "num_layers": shape.num_layers or 1,
            "num_heads": a.num_heads, "num_kv_heads": a.num_kv_heads, "head_dim": a.head_dim,
            "norm_eps": a.norm_eps, "rope_base": a.rope_base, "rope_scaling": None,
            "max_seq_len": a.max_seq_len, "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": a.hidden_size, "own_embedding": False,
            "own_lm_head": network is not Eagle1Head,
            "aux_layers": aux_layers(network, a.num_layers, shape.states),
        }
    else:
        args = _args_of(start, network, shape) | {"draft_vocab_size": draft_vocab_size}
        args["own_lm_head"] |= draft_vocab_size < a.vocab_size  # the target's has a row for every id
    args["draft_window"] = max(shape.longest, args.get("draft_window", 0))
    if issubclass(network.Args, MarkovArgs):
        has, rank = args.get("markov_rank", 0), shape.markov_rank
        if has and rank not in (None, has):
            raise ValueError(f"--markov-rank {rank}: the head of --start has {has}, and keeps it")
        if rank is None:
            rank = MARKOV_RANK if start is None and network is DSparkHead else has
        if rank and not has:
            args |= {"markov_rank": rank, "confidence": True, "confidence_reads_markov": True}
        args.setdefault("mask_id", shape.mask_id)
        if shape.drafts or not {"block", "drafts"} & args.keys():
            drafts, from_anchor = shape.drafts or DRAFTS, args.get("from_anchor", network is DSparkHead)
            block = {"block": drafts + (not from_anchor), "from_anchor": from_anchor}
            args |= {"drafts": drafts} if network is PEagleHead else block
    made = network.Args(**args)
    check_args(made)
    return made


def _args_of(start: Head, network: type[Head], shape: HeadShape) -> dict:
    """Return the arguments of `start`, with further layers if asked for. Raises ValueError as `head_args`."""
    given = start.args
    layers = shape.num_layers or given.num_layers
    if type(start) is not network and not (isinstance(start, Eagle3Head) and network is PEagleHead):
        raise ValueError(f"--start: {network.__name__} cannot start from {type(start).__name__}")
    several = layers > 1 and isinstance(start, Eagle3Head) and network is not PEagleHead
    if several or getattr(given, "recycle_normed", False):
        raise ValueError("--start: EAGLE-3 heads of several layers, or that read their own normed output, are"
                         " not trained")
    if layers < given.num_layers:
        raise ValueError(f"--layers {layers}: the head of --start has {given.num_layers}, and keeps them")
    args = {field.name: getattr(given, field.name) for field in fields(given)}
    return args | {"num_layers": layers, "draft_window": given.draft_window or given.max_seq_len}


def own_weights(head: Head) -> dict[str, Tensor]:
    """Return the weights of a head that are its own, by name."""
    return {name: tensor for name, tensor in own_state(head).items() if tensor.is_floating_point()}


def new_head(
    target: Transformer, kind: str, draft_ids: Tensor, shape: HeadShape, seed: int, start: Head | None = None
) -> Head:
    """Make a head in float32. Random except for what `start` has, else for what the target can lend.

    Without `start` lm_head begins as the target's rows, and the final norm as a third of the target's (the
    full one makes an untrained head overconfident); `fc` passes the highest captured layer on. Each of these
    was worth several points of held-out accuracy after the same short run. EAGLE-1: `fc` passes the feature
    on. Beside `start` further parts begin in this way, and further layers add nothing yet. Raises ValueError
    as `head_args`.
    """
    args = head_args(target.args, kind, len(draft_ids), shape, start)
    torch.manual_seed(seed)
    head = class_of({"kind": kind, **asdict(args)})(args)
    taken = _taken(start, target, draft_ids.cpu()) if start else {}
    adding = 0.0 if start else 0.02 / math.sqrt(2)  # of what is added to the residual stream
    with torch.no_grad():
        for name, p in head.named_parameters():
            if name in taken:
                p.copy_(taken[name])
            elif p.ndim == 2:
                adds = name.endswith(("wo.weight", "w_down.weight"))
                torch.nn.init.normal_(p, std=adding if adds else 0.02)
        if start is None:
            head.fc.weight.mul_(0.3)
            head.fc.weight[:, -args.hidden_size :] += torch.eye(args.hidden_size)
            if args.own_lm_head:
                head.lm_head.weight.copy_(target.lm_head_weight.float().cpu()[draft_ids.cpu()])
                head.norm.weight.copy_(target.norm.scale.float().cpu() * 0.3)
        _lend(head, target, taken)
    head.draft_ids.copy_(draft_ids)
    head = head.to(target.embed.weight.device)
    head.use_target(target)  # frozen: not the head's own
    return head


def _taken(start: Head, target: Transformer, draft_ids: Tensor) -> dict[str, Tensor]:
    """Return the weights that a head of these draft ids takes from `start`.

    lm_head rows of ids that `start` cannot draft are predicted; the Markov head's are zero.
    """
    taken = {name: tensor.float().cpu() for name, tensor in own_weights(start).items()}
    held = start.draft_ids.cpu()
    places = torch.searchsorted(held, draft_ids).clamp(max=len(held) - 1)
    known = (held[places] == draft_ids)[:, None]
    for name in {"lm_head.weight", "markov_out.weight"} & taken.keys():  # a row for each draft id
        others: Tensor | float = 0.0
        if name == "lm_head.weight":
            others = _predicted(target.lm_head_weight.detach().float().cpu(), held, taken[name])[draft_ids]
        taken[name] = torch.where(known, taken[name][places], others)
    if "lm_head.weight" not in taken and len(draft_ids) < len(held):  # it had the target's
        taken["lm_head.weight"] = target.lm_head_weight.detach().float().cpu()[draft_ids]
    return taken


def _lend(head: Head, target: Transformer, taken: Container[str]) -> None:
    """Start what only block heads have, unless it was taken from another head.

    The Markov head reads the target's embedding on its principal axes and adds nothing yet.
    """
    if isinstance(head, PEagleHead) and "mask_hidden" not in taken:
        torch.nn.init.normal_(head.mask_hidden, std=0.02)
    if (rank := getattr(head.args, "markov_rank", 0)) and "markov_in.weight" not in taken:
        table = target.embed.weight.float().cpu()
        axes = torch.linalg.svd(table.T @ table)[0][:, :rank]
        begun = torch.nn.functional.pad(table @ axes, (0, rank - axes.shape[1]))
        head.markov_in.weight.copy_(begun / begun.std())
        head.markov_out.weight.zero_()
    if getattr(head.args, "confidence", False) and "confidence.weight" not in taken:
        head.confidence.weight.zero_()
        head.confidence.bias.zero_()


def _predicted(rows: Tensor, held: Tensor, table: Tensor) -> Tensor:
    """Predict a head's lm_head row of every token [V, H] from the target's rows [V, Ht].

    A linear map, fitted by least squares, turns the target's rows of the tokens that the head holds [m] into
    the head's own table [m, H]. Untransformed rows would be read with states that are not the target's: most
    of the head's choices would be tokens that it does not know.
    """
    known = rows[held].double()
    square = known.T @ known
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
    return rows @ torch.linalg.solve(square + ridge, known.T @ table.double()).float()
