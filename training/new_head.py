"""The heads that training starts from."""
from __future__ import annotations

import math
from collections.abc import Container

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.folder import HEADS, check_args
from model import ModelArgs, Transformer
from networks.block import BlockArgs
from networks.eagle import PEagleArgs, PEagleHead
from networks.head import Head, HeadArgs
from networks.hydra import HydraHeads
from networks.medusa import MedusaHeads, MultiTokenArgs
from training.choices import BLOCK_KINDS
from training.shapes import Shape, head_sizes

DRAFTS = 7  # tokens that a block drafts


def head_args(a: ModelArgs, kind: str, draft_vocab_size: int, shape: Shape) -> HeadArgs:
    """The arguments of a head of this kind, not Medusa or Hydra, for a target of arguments `a`.

    Raises ValueError on a shape that cannot be.
    """
    sizes = head_sizes(vars(a), kind, shape)
    args = {
        **sizes, "vocab_size": a.vocab_size, "norm_eps": a.norm_eps, "rope_base": a.rope_base,
        "rope_scaling": None, "max_seq_len": a.max_seq_len, "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": a.hidden_size, "own_embedding": sizes["hidden_size"] != a.hidden_size,
        "own_lm_head": kind != "eagle",
    }
    if kind not in BLOCK_KINDS:
        made = HeadArgs(**args)
    else:
        args |= {
            "mask_id": shape.mask_id, "markov_rank": shape.markov_rank, "confidence": shape.confidence
        }
        args["confidence_reads_markov"] = shape.markov_rank > 0
        if kind == "p-eagle":
            made = PEagleArgs(**args, drafts=shape.drafts or DRAFTS)
        else:
            anchored = kind == "dspark"
            made = BlockArgs(**args, block=(shape.drafts or DRAFTS) + (not anchored), from_anchor=anchored)
    check_args(made)
    return made


def new_head(target: Transformer, kind: str, draft_ids: Tensor, shape: Shape, seed: int) -> Head:
    """A head of this kind, not Medusa or Hydra, in float32: random except for what the target can lend.

    EAGLE-3: lm_head starts as the target's rows, and the final norm as a third of the target's (the full one
    makes an untrained head overconfident); `fc` passes the highest captured layer on. Each of these was worth
    several points of held-out accuracy after the same short run. A head narrower or wider than the target
    has an embedding of its own, which starts as the target's on its principal axes, and so does its lm_head.
    EAGLE-1: `fc` passes the feature on. P-EAGLE, DFlash, DSpark: as EAGLE-3; their Markov head reads the
    target's embedding on its principal axes, and adds nothing yet. Raises ValueError on a shape that cannot
    be.
    """
    args = head_args(target.args, kind, len(draft_ids), shape)
    torch.manual_seed(seed)
    head = HEADS[kind](args)
    for name, p in head.named_parameters():
        if p.ndim == 2:
            last = name.endswith(("wo.weight", "w_down.weight"))
            torch.nn.init.normal_(p, std=0.02 / math.sqrt(2) if last else 0.02)
    with torch.no_grad():
        if kind != "eagle":
            _lend(head, target, draft_ids.cpu())
        else:
            head.fc.weight.mul_(0.3)
            head.fc.weight[:, args.hidden_size :] += torch.eye(args.hidden_size)
    return join(head, target, draft_ids)


def new_multi_token_heads(
    target: Transformer, kind: str, draft_ids: Tensor, guesses: int, blocks: int, prefix: bool, seed: int
) -> Head:
    """Medusa or Hydra heads in float32. They share an lm_head, which starts as the target's rows; blocks pass
    their state on.

    Hydra's layer (`prefix`) has the target's shape.
    """
    a = target.args
    args = MultiTokenArgs(
        a.vocab_size, a.hidden_size, a.intermediate_size, 1, a.num_heads, a.num_kv_heads, a.head_dim,
        norm_eps=a.norm_eps, rope_base=a.rope_base, rope_scaling=None, max_seq_len=a.max_seq_len,
        draft_vocab_size=len(draft_ids), target_hidden_size=a.hidden_size, aux_layers=(a.num_layers,),
        guesses=guesses, blocks=blocks, prefix=prefix,
    )
    check_args(args)
    torch.manual_seed(seed)
    head = {"medusa": MedusaHeads, "hydra": HydraHeads}[kind](args)
    with torch.no_grad():
        for name, p in head.named_parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.02 if "prefix_layer" in name else 0.002)
            elif name.endswith("bias"):
                p.zero_()
        for stack in head.stacks:
            if stack[0].skip is not None:
                stack[0].skip.weight[:, : a.hidden_size] += torch.eye(a.hidden_size)
        head.lm_head.weight.copy_(target.lm_rows[draft_ids].float().cpu())
    return join(head, target, draft_ids)


def join(head: Head, target: Transformer, draft_ids: Tensor) -> Head:
    """Give a new head its draft vocabulary, and what it shares with the target, on the target's device."""
    head.draft_ids.copy_(draft_ids)
    head = head.to(target.embed.weight.device)
    head.use_target(target)  # frozen: not the head's own
    return head


def _principal(table: Tensor, size: int) -> Tensor:
    """The principal axes of the rows of a table [V, H], so many of them, zeros where there are no more."""
    axes = torch.linalg.svd(table.T @ table)[0][:, :size]
    return F.pad(axes, (0, size - axes.shape[1]))


def _lend(head: Head, target: Transformer, draft_ids: Tensor) -> None:
    """Start a head from the target's embedding, lm_head and last norm."""
    own = head.args.own_embedding
    table, rows = target.embed.weight.float().cpu(), target.lm_rows.float().cpu()
    hidden, width = head.args.hidden_size, target.args.hidden_size
    axes = torch.eye(width)
    if own:
        axes = _principal(table, hidden)  # [Ht, H]
        head.embed.weight.copy_(table @ axes)
    norm = target.norm.weight.float().cpu()
    head.lm_head.weight.copy_((rows[draft_ids] * (norm if own else 1)) @ axes)
    head.norm.weight.copy_(torch.full((hidden,), 0.3) if own else norm * 0.3)
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -width:] += axes.T
    lend_new(head, target)


def lend_new(head: Head, target: Transformer, taken: Container[str] = ()) -> None:
    """Start what only block heads have, unless it was taken from another head."""
    table = target.embed.weight.float().cpu()
    if isinstance(head, PEagleHead) and "mask_hidden" not in taken:
        torch.nn.init.normal_(head.mask_hidden, std=0.02)
    if getattr(head.args, "markov_rank", 0) and "markov_in.weight" not in taken:
        begun = table @ _principal(table, head.args.markov_rank)
        head.markov_in.weight.copy_(begun / begun.std())
        head.markov_out.weight.zero_()
    if getattr(head.args, "confidence", False) and "confidence.weight" not in taken:
        head.confidence.weight.zero_()
        head.confidence.bias.zero_()
