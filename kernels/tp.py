"""Shard a target over several processes (tensor parallel), started by torchrun: *ranks*.

All ranks run the same step on the same requests. They exchange sums of layers' outputs, token scores and the
draft tree, never host values. torch.compile traces and CUDA graphs capture the collectives: NCCL on GPUs,
gloo on CPUs.

As in Megatron-LM, `wqkv` and `w_gate_up` are sharded by outputs, `wo` and `w_down` by inputs, with an
all-reduce after each of the latter two. DeltaNet layers are sharded by heads: `w_in` like `wqkv`, `w_out`
like `wo`. The lm_head is sharded by tokens: each rank sends the top-1 token of its shard. Norms, routers of
experts and the embedding table are replicated; the drafter too, unless `Ranks.heads`.
"""
from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.errors import InputError, first_line
from common.hashes import hash56
from common.torchrun import exit_with_torchrun
from kernels.quantized import EMBED, MXFP4_GROUP, W8A8_GROUP
from kernels.rank_step import sharded_step
from kernels.scheme import Scheme
from kernels.stored import ROW, Kind
from model import Block, Linear, ModelArgs, Transformer

REPLY_TIMEOUT = timedelta(minutes=10)  # another rank may be compiling
LOST_RANK_ERRORS = "closed by peer", "reset by peer", "Broken pipe", "Timed out", "Socket", "gloo", "onnect"
OUTPUTS, INPUTS = -2, -1  # dimensions of a weight [..., outputs, inputs]
# Parts of a tensor's name that are not the layer's name.
NAME_AFFIXES = re.compile(
    r"^(layers|more_layers)\.\d+\.|^(layer|prefix_layer)\.|(?<=mlp\.)routed\.|\.(weight|bias|scale|codes)$"
)
# Layer -> sharded dimension, and names of the spans of `Shard` along it.
SHARDED_DIMENSIONS = {
    "wqkv": (OUTPUTS, ("queries", "keys", "keys", "gate")),  # keys, then values
    "sinks": (INPUTS, ("queries",)),
    "wo": (INPUTS, ("queries",)),
    "mlp.gate_up_bias": (INPUTS, ("inner", "inner")),
    "mlp.w_gate_up": (OUTPUTS, ("inner", "inner")),  # also each expert of a stack
    "mlp.w_down": (INPUTS, ("inner",)),
    "mlp.shared.w_gate_up": (OUTPUTS, ("shared", "shared")),
    "mlp.shared.w_down": (INPUTS, ("shared",)),
    "w_in": (OUTPUTS, (*("delta_keys",) * 2, *("delta_values",) * 2, *("delta_heads",) * 2)),
    "taps": (OUTPUTS, ("delta_keys", "delta_keys", "delta_values")),
    "log_decay": (INPUTS, ("delta_heads",)),
    "step_bias": (INPUTS, ("delta_heads",)),
    "w_out": (INPUTS, ("delta_values",)),
    "lm_head": (OUTPUTS, ("tokens",)),
}
ALL_REDUCED = ("wo", "w_out", "mlp")  # modules of a layer with an all-reduce of their outputs
RANK0_BIASES = "wo.bias", "mlp.w_down.bias", "mlp.down_bias"


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `count` in torch's process group `group`.

    heads: the drafter is sharded too. Otherwise it is replicated.
    """

    rank: int
    count: int
    group: str
    heads: bool = False

    @property
    def for_heads(self) -> Ranks | None:
        """The ranks over which the draft head is sharded, if it is."""
        return self if self.heads else None

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather x [...] of all ranks -> [count, ...], in rank order."""
        ops = torch.ops._c10d_functional
        gathered = ops.all_gather_into_tensor(x.contiguous()[None], self.count, self.group)
        return ops.wait_tensor(gathered)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x [...] over all ranks.

        On CPUs, values are added in rank order, so that the sum is batch-invariant and equal on all ranks.
        """
        if x.is_cuda:
            ops = torch.ops._c10d_functional
            return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", self.group))
        total, *others = self.all_gather(x).unbind(0)
        for other in others:
            total = total + other
        return total

    def concatenate(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Concatenate the parts x [..., sizes[rank]] of all ranks to [..., sum(sizes)]."""
        parts = self.all_gather(F.pad(x, (0, max(sizes) - x.shape[-1])))
        return torch.cat([part[..., :size] for part, size in zip(parts.unbind(0), sizes)], -1)

    def argmax(self, value: Tensor, token: Tensor) -> Tensor:
        """Return the token [...] with the largest float32 value [...] over all ranks; ties: the lowest rank.

        A token and its value are sent as two float64, which represent both exactly.
        """
        values, tokens = self.all_gather(torch.stack((value.double(), token.double()))).unbind(1)
        return tokens.gather(0, values.argmax(0, keepdim=True))[0].long()

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x [...]."""
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.broadcast(x.contiguous(), 0, self.group))

    def check_equal(self, settings: str, device: torch.device | str) -> None:
        """Raise InputError unless all ranks have the same settings."""
        digests = self.all_gather(torch.tensor(hash56(settings), device=device)).tolist()
        if others := [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise InputError(
                f"{self.count} ranks: rank {', '.join(others)} differs from rank 0; start all ranks with the"
                f" same command on equal machines (this rank: {settings:.300})"
            )

    def digest(self, text: str, device: torch.device | str) -> str:
        """Return a digest of rank 0's text."""
        return f"{self.broadcast(torch.tensor(hash56(text), device=device)).item():x}"


def local_device(device: str) -> str:
    """Return the device of this process: "cuda" becomes the GPU of its local rank."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device


@contextlib.contextmanager
def process_group(
    device: str, heads: bool = False, reply_timeout: timedelta | None = None
) -> Iterator[Ranks]:
    """Join torchrun's process group in this context. heads: see `Ranks`.

    reply_timeout: of collectives (default `REPLY_TIMEOUT`). Raises InputError without torchrun, if the ranks
    cannot connect, or, in the context, if a rank is lost.
    """
    exit_with_torchrun()
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(torch.device(local_device(device)))
    try:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=reply_timeout or REPLY_TIMEOUT)
    except (RuntimeError, ValueError) as e:
        raise InputError(f"the ranks cannot connect: {first_line(e)}") from None
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name, heads)
    try:
        yield ranks
    except RuntimeError as e:
        if not isinstance(e, dist.DistError) and not any(message in str(e) for message in LOST_RANK_ERRORS):
            raise
        raise InputError(f"rank {ranks.rank} of {ranks.count} has lost another rank ({first_line(e)}); all"
                         " ranks exit; see torchrun's report and the system log") from e
    dist.destroy_process_group()


class Span(NamedTuple):
    """The range first ... last - 1 of a dimension of this size."""

    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Shard:
    """One rank's spans of a target, by their names in `SHARDED_DIMENSIONS`. kinds: layer -> `Kind`.

    Query heads are on the rank of their key/value head. With more ranks than key/value heads, these are
    replicated. Value heads of DeltaNet layers are on the rank of their key head.
    """

    spans: dict[str, Span]
    kinds: dict[str, Kind]

    @classmethod
    def for_rank(
        cls, args: ModelArgs, scheme: Scheme | None, rank: int, ranks: int, tokens: int | None = None
    ) -> Shard:
        """Return the shard of a rank. tokens: rows of the lm_head, if different from the vocabulary size.

        Raises InputError if the target cannot be sharded over this number of ranks.
        """
        def refuse(reason: str, advice: str = "choose another --nproc-per-node") -> None:
            raise InputError(f"{ranks} ranks: {reason}; {advice}")

        nh, nkv, hd, inner = args.num_heads, args.num_kv_heads, args.head_dim, args.intermediate_size
        nk, nv, dk, dv, shared = (getattr(args, name, 0) for name in (
            "delta_key_heads", "delta_heads", "delta_key_dim", "delta_value_dim", "shared_expert_size"))
        kinds = {name: Kind.parse(kind) for name, kind in ((scheme and scheme.kinds) or {}).items()}
        if not getattr(args, "shardable", True):
            refuse("a target of this family runs in one process only", "leave out torchrun")
        if (args.tie_embeddings and EMBED in kinds) or any(kind.ordered for kind in kinds.values()):
            refuse("an lm_head tied to quantized embeddings, or inputs reordered by GPTQ's desc_act, cannot"
                   " be sharded", "convert the source with --dtype bf16")
        if nkv < ranks and (ranks % nkv or nh % ranks):
            refuse(f"{nkv} key/value heads for {nh} query heads can be sharded over at most {nkv} ranks, or"
                   f" over a multiple of {nkv} that divides {nh}")
        # Inputs of a quantization group stay together; without quantization pairs, which the kernels read.
        mode, unit = (scheme.mode, scheme.group) if scheme else (None, 0)
        unit = W8A8_GROUP if mode == "w8a8" else max([unit, *(max(kind[1:3]) for kind in kinds.values())])
        pair = max(unit, MXFP4_GROUP if scheme and scheme.experts else 0) or 2 - inner % 2
        values_per_key = nv // max(nk, 1)
        sizes = {  # name -> (size, size of the units that are not split)
            "queries": (nh * hd, (nh // nkv if nkv >= ranks else 1) * hd), "keys": (nkv * hd, hd),
            "inner": (inner, pair), "shared": (shared, pair), "tokens": (tokens or args.vocab_size, 1),
            "delta_keys": (nk * dk, dk), "delta_values": (nv * dv, values_per_key * dv),
            "delta_heads": (nv, values_per_key),
        }
        spans = {}
        for name, (size, piece) in sizes.items():
            count = size // max(piece, 1)
            first, last = count * rank // ranks, count * (rank + 1) // ranks
            last = max(last, first + 1) if name == "keys" else last
            spans[name] = Span(size, first * piece, last * piece)
            if count * piece != size or (0 < count < ranks and name != "keys"):
                refuse(f"{size} {name.replace('_', ' ')}, in units of {piece}, cannot be sharded over these"
                       " ranks")
            _, begin, end = spans[name]
            if unit and name in ("queries", "delta_values") and (begin % unit or end % unit):
                refuse(f"{mode} has groups of {unit} inputs, but rank {rank} would have {name} {begin} to"
                       f" {end}")
        spans["gate"] = spans["queries"] if getattr(args, "delta_layers", ()) else Span(0, 0, 0)
        return cls(spans, kinds)

    def args(self, full: ModelArgs) -> ModelArgs:
        """Return the args of this rank's model. Its vocab_size is full, as embeddings are replicated."""
        def count(name: str) -> int:
            return self.spans[name].last - self.spans[name].first

        delta_args = {
            "shared_expert_size": count("shared"), "delta_heads": count("delta_heads"),
            "delta_key_heads": count("delta_keys") // max(full.delta_key_dim, 1),
        } if hasattr(full, "delta_heads") else {}
        return replace(
            full, num_heads=count("queries") // full.head_dim, num_kv_heads=count("keys") // full.head_dim,
            intermediate_size=count("inner"), **delta_args,
        )

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]] | None:
        """Return a tensor's sharded dimension, and this rank's ranges along it; None: it is replicated.
        """
        layer = NAME_AFFIXES.sub("", name)
        if layer not in SHARDED_DIMENSIONS:
            return None
        dimension, span_names = SHARDED_DIMENSIONS[layer]
        if name.endswith(".bias"):
            if dimension == INPUTS:  # rank 0 adds it, see `shard_module`
                return None
            dimension = -1
        spans = [self.spans[span] for span in span_names]
        module, _, leaf = name.rpartition(".")
        if (kind := self.kinds.get(module)) and dimension == INPUTS and leaf in ("scale", "codes"):
            if leaf == "scale" and kind.unit == ROW:
                return None
            spans *= 1 + kind.minima
        length, total = shape[dimension], sum(span.size for span in spans)
        if length == 1 and dimension == INPUTS:  # one scale per row
            return None
        ranges, before = [], 0
        for size, first, last in spans:  # scaled: bytes have two values, groups one scale
            ranges.append(((before + first) * length // total, (before + last) * length // total))
            before += size
        return dimension % len(shape), ranges

    def read(self, name: str, file) -> Tensor:
        """Read only this rank's shard of a tensor from an open safetensors file."""
        stored = file.get_slice(name)
        if (cut := self.cut(name, tuple(stored.get_shape()))) is None:
            return file.get_tensor(name)  # a view of the mapped file, which a machine's ranks share
        dimension, ranges = cut
        before = (slice(None),) * dimension
        return torch.cat([stored[(*before, slice(a, b))] for a, b in ranges if a < b], dimension)


class AllReduced(nn.Module):
    """A layer (or an MLP) followed by an all-reduce."""

    def __init__(self, layer: nn.Module, ranks: Ranks):
        super().__init__()
        self.layer, self.ranks = layer, ranks

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., H], summed over the ranks, plus `residual` [..., H]."""
        y = self.ranks.all_reduce(self.layer(x, None))
        return y if residual is None else residual + y


class ShardedHead(nn.Module):
    """An lm_head sharded by tokens. layer: this rank's shard. tokens: number of tokens of each rank."""

    def __init__(self, layer: nn.Module, tokens: tuple[int, ...], ranks: Ranks):
        super().__init__()
        self.layer, self.tokens, self.ranks = layer, tokens, ranks
        self.first = sum(tokens[: ranks.rank])

    def logits(self, x: Tensor) -> Tensor:
        """x [..., H] -> float32 logits of all tokens [..., V], on every rank."""
        return self.ranks.concatenate(self.layer.logits(x), self.tokens)


def shard_module(model: nn.Module, shards: list[Shard], ranks: Ranks) -> None:
    """Add collectives to a target or head that has this rank's weights, in place.

    shards: of all ranks. An lm_head that a head shares with its target is not changed.
    """
    tokens = [shard.spans["tokens"] for shard in shards]
    for layer in [module for module in model.modules() if isinstance(module, Block)]:
        for name, bias in layer.named_parameters() if ranks.rank else ():
            if name in RANK0_BIASES:
                bias.data = torch.zeros_like(bias)
        for name, part in list(layer.named_children()):
            if name in ALL_REDUCED:
                setattr(layer, name, AllReduced(part, ranks))
    if isinstance(model, Transformer):
        model.ranks, model.make_sharded_step = ranks, sharded_step
        if model.lm_head is None:  # tied: use a view of the embedding table
            model.lm_head = Linear(1, 1, bias=False, device="meta")
            rows = model.embed.weight.detach()[tokens[ranks.rank].first : tokens[ranks.rank].last]
            model.lm_head.weight = nn.Parameter(rows, requires_grad=False)
    if model.lm_head is not None:
        model.lm_head = ShardedHead(model.lm_head, tuple(span.last - span.first for span in tokens), ranks)
