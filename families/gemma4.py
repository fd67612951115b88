"""Gemma 4: two head sizes, KV sharing between layers, per-layer embeddings.

Layers with a sliding window (local) have heads of `head_dim`. The others (global) have heads of
`global_head_dim`, and RoPE rotates only `global_pairs` pairs of them. The last `shared_kv_layers` layers have
queries only: they attend to the keys and values of the last earlier layer of their kind.
"""
from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.schema import Flag, SmallSize, whole
from families.experts import Experts, MixtureArgs
from families.mixed import MixedCaches
from families.norms import invariant, ordered_sum
from families.variants import Variant, VariantArgs, VariantBlock
from model import MLP, KVCache, Linear, PassInputs


@dataclass(frozen=True)
class Gemma4Args(VariantArgs, MixtureArgs):
    """The shape of a Gemma 4 target."""

    global_head_dim: SmallSize = 1
    global_kv_heads: SmallSize = 1
    global_pairs: whole(0, 2**16) = 0  # pairs of a global head that RoPE rotates
    shared_kv_layers: whole(0, 10_000) = 0  # the last layers, which reuse the keys and values of earlier ones
    value_is_key: Flag = False  # global layers: keys and values share a projection
    wide_mlp: Flag = False  # layers without keys have an MLP of twice the width
    layer_input_size: whole(0, 2**16) = 0  # size of the per-layer embeddings; 0: none

    shardable = False

    def constraints(self) -> list[tuple[str, bool, str]]:
        own, is_local = self.num_layers - self.shared_kv_layers, [window > 0 for window in self.windows]
        fits, size = self.num_heads % self.global_kv_heads == 0, self.global_head_dim
        return [
            *super().constraints(),
            ("windows", len(is_local) == self.num_layers, f"a list of {self.num_layers}"),
            ("shared_kv_layers", own > 0 and {*is_local[:own]} == {*is_local},
             "less than num_layers, with a layer of each type before them"),
            ("global_kv_heads", fits, f"a divisor of num_heads, {self.num_heads}"),
            ("global_head_dim", size % 2 == 0 and self.global_pairs <= size // 2,
             "even, and at least 2 * global_pairs"),
            ("wide_mlp", not (self.wide_mlp and self.num_experts), "false with experts"),
        ]

    def of_layer(self, layer: int) -> Gemma4Args:
        """Return the shape with heads and MLP of this layer."""
        shared = layer >= self.num_layers - self.shared_kv_layers
        sizes = {"intermediate_size": self.intermediate_size * (2 if shared and self.wide_mlp else 1)}
        if not self.windows[layer]:
            sizes |= {"head_dim": self.global_head_dim, "num_kv_heads": self.global_kv_heads}
        return replace(self, **sizes)

    def inverse_frequencies(self, length: int = 0) -> Tensor:
        """Return [2, pairs] float32, of global and local layers, padded to the same length."""
        def frequencies(base: float, head_dim: int, pairs: int) -> Tensor:
            exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.int64, device="cpu").float() / head_dim
            return F.pad(1.0 / base**exponents, (0, max(self.head_dim, self.global_head_dim) // 2 - pairs))

        local = frequencies(self.local_rope_base or self.rope_base, self.head_dim, self.head_dim // 2)
        return torch.stack((frequencies(self.rope_base, self.global_head_dim, self.global_pairs), local))


class ScaledExperts(Experts):
    """Experts whose outputs are scaled per expert. Router logits are scaled by 1/sqrt(H)."""

    own_routing = True

    def __init__(self, args: Gemma4Args):
        super().__init__(args)
        self.factor, self.expert_scale = args.hidden_size**-0.5, nn.Parameter(torch.ones(args.num_experts))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = (self.router(tokens).float() * self.factor).softmax(-1)
        weight, chosen = scores.topk(self.top_k, dim=-1)
        return weight / ordered_sum(weight)[:, None] * self.expert_scale.float()[chosen], chosen


class Gemma4Block(VariantBlock):
    """A layer of Gemma 4. With experts, a dense MLP runs in parallel, and both have their own norms.

    producer: the layer whose keys and values it reads, in a list, so that it is not a submodule; or [].
    produces: other layers read its keys and values.
    """

    def __init__(self, args: Gemma4Args, layer: int = 0, input_size: int | None = None):
        shape = args.of_layer(layer)
        super().__init__(shape, layer)
        H, size = shape.hidden_size, args.layer_input_size
        self.standard, self.other_rope = False, self.window > 0
        # Gemma 4 does not scale attention scores: the factor on q and on k cancels 1/sqrt(head_dim).
        self.pair_scaling = shape.head_dim // 2, shape.head_dim**0.25
        self.producer, self.produces = [], False
        self.value_is_key = args.value_is_key and not self.window
        queries, keys, values = self.widths
        if layer >= args.num_layers - args.shared_kv_layers:
            del self.k_norm
            keys = values = 0
        rows = queries + keys + (0 if self.value_is_key else values)
        self.wqkv = Linear(input_size or H, rows, bias=False)
        self.eps, self.layer_scalar = shape.norm_eps, nn.Parameter(torch.ones(1))
        if size:
            self.w_input_gate, self.w_input_out = Linear(H, size, bias=False), Linear(size, H, bias=False)
            self.input_norm = self.Norm(H, shape.norm_eps)
        if shape.num_experts:
            for name in ("router_norm", "experts_norm", "dense_out_norm", "experts_out_norm"):
                setattr(self, name, self.Norm(H, shape.norm_eps))

    def make_mlp(self, args: Gemma4Args) -> nn.Module:
        if not args.num_experts:
            return MLP(args)
        dense = MLP(replace(args, intermediate_size=args.dense_size))
        return nn.ModuleDict({"shared": dense, "routed": ScaledExperts(args)})

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        if not isinstance(self.mlp, nn.ModuleDict):
            return super().finish(x, attended)
        x = x + self.wo_norm(self.wo(attended))
        dense = self.dense_out_norm(self.mlp["shared"](self.mlp_norm(x), None))
        routed = self.mlp["routed"](self.experts_norm(x), None, self.router_norm(x))
        return x + self.mlp_out_norm(dense + self.experts_out_norm(routed))

    @property
    def k_norm(self) -> nn.Module:
        """The norm of the keys that it attends to."""
        return self._modules.get("k_norm") or self.producer[0].k_norm

    def layer_cos_sin(self, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = (x[..., : self.pair_scaling[0]] for x in angles)
        return super().layer_cos_sin((cos, sin))

    def project(self, x: Tensor) -> Tensor:
        qkv = self.wqkv(self.attn_norm(x))
        return qkv if self.producer else self.with_values(qkv)

    def with_values(self, qkv: Tensor) -> Tensor:
        """Return queries, keys and normed values, from the output of `wqkv`."""
        queries, keys, _ = self.widths
        v = qkv[..., -keys:].unflatten(-1, (-1, self.head_dim)).float()
        v = v / (ordered_sum(v * v) / self.head_dim + self.eps).sqrt()[..., None]
        return torch.cat((qkv[..., : queries + keys], v.flatten(-2).to(qkv.dtype)), dim=-1)

    def attend(self, cache: KVCache, qkv: Tensor, shared: PassInputs) -> Tensor:
        key = "keys and values", self.window > 0
        if self.producer:  # writes the same keys and values to the shared cache again
            qkv = torch.cat((qkv, shared.cached(key, None)), dim=-1)
        elif self.produces:
            shared.cached(key, lambda: qkv[..., self.widths[0] :])
        return super().attend(cache, qkv, shared)

    def add_input(self, x: Tensor, inputs: Tensor | None) -> Tensor:
        """Add the layer's input [B, T, size] to the stream x [B, T, H] after the layer, and scale it."""
        if inputs is not None:
            gate = invariant(lambda gate: F.gelu(gate, approximate="tanh"), self.w_input_gate(x))
            x = x + self.input_norm(self.w_input_out(gate * inputs))
        return x * self.layer_scalar


class Gemma4(Variant):
    """A Gemma 4 target. newest_caches(): the caches allocated last, read by `networks.assistant`."""

    Args, Layer, cpu_only_part = Gemma4Args, Gemma4Block, "models with two head sizes"

    def __init__(self, args: Gemma4Args):
        super().__init__(args)
        own = self.layers[: args.num_layers - args.shared_kv_layers]
        for layer in self.layers[len(own) :]:
            layer.producer = [next(x for x in reversed(own) if x.other_rope == layer.other_rope)]
            layer.producer[0].produces = True
        if size := args.layer_input_size:
            self.embed_inputs = nn.Embedding(args.vocab_size, args.num_layers * size)
            self.w_inputs = Linear(args.hidden_size, args.num_layers * size, bias=False)
            self.inputs_norm = self.Layer.Norm(size, args.norm_eps)

    def caches(self, batch: int, slots: int, device: torch.device | str | None = None) -> MixedCaches:
        embed, is_local = self.embed, [layer.other_rope for layer in self.layers]
        own = is_local[: len(is_local) - self.args.shared_kv_layers]
        order = [*dict.fromkeys(own)]
        where = batch, slots, embed.dtype, device or embed.device, self.backend
        shapes = (replace(self.args.of_layer(own.index(kind)), num_layers=own.count(kind)) for kind in order)
        # Layers without keys use the cache of the last layer of their type.
        locations = [(order.index(kind), own[: i + 1].count(kind) - 1) for i, kind in enumerate(is_local)]
        caches = MixedCaches((self.Caches.allocate(shape, *where) for shape in shapes), locations)
        self.newest_caches = weakref.ref(caches)
        return caches

    def run_layers(self, tokens: Tensor, aux_layers: tuple[int, ...], apply) -> tuple[Tensor, Tensor | None]:
        inputs = self._layer_inputs(tokens)
        return super().run_layers(
            tokens, aux_layers, lambda i, layer, x: layer.add_input(apply(i, layer, x), next(inputs)))

    def _layer_inputs(self, tokens: Tensor):
        """Return an iterator over the inputs of all layers [B, T, size], or None for each."""
        size = self.args.layer_input_size
        if not size:
            return iter([None] * len(self.layers))
        x = self.embed(tokens)
        x = self.w_inputs(x * self.args.embedding_scale(x.dtype)) * self.args.hidden_size**-0.5
        own = self.embed_inputs(tokens) * torch.tensor(size**0.5, dtype=x.dtype).item()
        inputs = self.inputs_norm(x.unflatten(-1, (-1, size))) + own.unflatten(-1, (-1, size))
        return iter((inputs * 2.0**-0.5).unbind(-2))
