"""Gemma 4's assistants (`google/gemma-4-*-it-assistant`): heads without a KV cache.

Each layer attends to the KV cache of the target's last layer of the same attention type. All queries are at
the position of the root. Source: transformers' modeling_gemma4_assistant.py.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.errors import InputError
from common.schema import whole
from families.gemma4 import Gemma4Args, Gemma4Block
from families.norms import ordered_sum
from head import Head, HeadArgs
from model import KVCache, Linear, ModelArgs, PassInputs, RMSNorm, Transformer

CACHE_SIZES = "head_dim", "num_kv_heads", "global_head_dim", "global_kv_heads"


@dataclass(frozen=True, kw_only=True)
class AssistantArgs(HeadArgs, Gemma4Args):
    """The shape of an assistant. Its vocabulary may be in clusters of equal size."""

    clusters: whole(0, 2**20) = 0  # 0: none
    active_clusters: whole(0, 2**20) = 0  # only their tokens get logits

    def constraints(self) -> list[tuple[str, bool, str]]:
        divides = not self.clusters or self.vocab_size % self.clusters == 0
        valid = divides and (self.active_clusters > 0) == (self.clusters > 0)
        return [*super().constraints(), ("clusters", valid, "a divisor of vocab_size, with some active")]

    def check_caches(self, target: ModelArgs, source: object) -> None:
        """Raise InputError unless it can read the caches of this target. source: the assistant, in errors."""
        for name in CACHE_SIZES:
            if (size := getattr(self, name)) != (target_size := getattr(target, name, None)):
                raise InputError(f"{source}: the assistant is for another target: its {name} is {size}, this"
                                 f" target's {target_size}")


class AssistantBlock(Gemma4Block):
    """A layer with queries only."""

    def __init__(self, args: AssistantArgs, layer: int = 0):
        super().__init__(replace(args, shared_kv_layers=args.num_layers), layer)
        self.window += self.window > 0  # transformers counts the distance from the last committed token

    k_norm = property(lambda self: self.q_norm)  # unused: there are no keys

    def project(self, x: Tensor) -> Tensor:
        return self.wqkv(self.attn_norm(x))

    def attend(self, cache: KVCache, queries: Tensor, shared: PassInputs) -> Tensor:
        """See `Block.attend`. Zeros are written to slots that are not attended to and later overwritten."""
        return cache.attend(self, F.pad(queries, (0, 2 * self.widths[1])), shared)


class AssistantHead(Head):
    """An assistant. It feeds back its output [..., backbone], followed by the lm_head's input [..., H]."""

    Args, reads_normed = AssistantArgs, True

    def __init__(self, args: AssistantArgs):
        super().__init__(args)
        H, backbone = args.hidden_size, args.target_hidden_size
        self.w_in, self.w_out = Linear(2 * backbone, H, bias=False), Linear(H, backbone, bias=False)
        self.layers = nn.ModuleList(AssistantBlock(args, i) for i in range(args.num_layers))
        self.norm = RMSNorm(H, args.norm_eps)
        if args.clusters:
            self.w_clusters = Linear(H, args.clusters, bias=False)
            # Tokens in order of their clusters, int32 as bytes.
            self.register_buffer("token_order", torch.zeros(args.vocab_size, 4, dtype=torch.uint8))

    def use_target(self, target: Transformer) -> None:
        super().use_target(target)
        self.args.check_caches(target.args, "--draft")
        if self.args.clusters:
            self.lm_head = nn.Identity()  # `logits` reads rows of the table
        self.target = [target]  # in a list: else it would be registered as a submodule
        # By layer: the last target layer with the same attention type, whose cache it reads.
        types = [layer.other_rope for layer in target.layers]
        self.producers = [len(types) - 1 - types[::-1].index(layer.other_rope) for layer in self.layers]

    def forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches
    ) -> Tensor:
        """See `Head.forward`. caches: those of the target."""
        target = self.target[0]
        embedded = target.embed(tokens)
        embedded = embedded * target.args.embedding_scale(embedded.dtype)
        x = self.w_in(torch.cat((embedded, feature[..., : embedded.shape[-1]]), dim=-1))
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        for layer, producer in zip(self.layers, self.producers):
            x = layer.add_input(layer(x, caches[producer], shared), None)
        x = self.norm(x)
        return torch.cat((self.w_out(x), x), dim=-1)

    def logits(self, feature: Tensor) -> Tensor:
        """See `Head.logits`. Tokens of inactive clusters get the lowest active logit minus 1."""
        x, args = feature[..., -self.args.hidden_size :].contiguous(), self.args
        if not args.clusters:
            return self.lm_head.logits(x)
        active = self.w_clusters(x).topk(args.active_clusters, dim=-1).indices
        order = self.token_order.view(torch.int32).view(args.clusters, -1)
        tokens = order[active].flatten(-2).long()
        logits = ordered_sum(self.embed(tokens).float() * x[..., None, :].float())
        inactive = (logits.amin(-1, keepdim=True) - 1).expand(*logits.shape[:-1], args.vocab_size)
        return inactive.scatter(-1, tokens, logits)
