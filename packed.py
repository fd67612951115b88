"""The model on our own kernels: the same modules with their weights laid out for them. See `kernels`.

    target, head = ...; pack(target, head)

is all there is to it. Packing is for decoding only: the packed modules have no gradient and no `weight`.
"""
from __future__ import annotations

import torch.nn as nn
from torch import Tensor

import kernels
from model import MLP, Block, KVCache, Pass, RMSNorm, Transformer


class PackedLinear(nn.Module):
    """`Linear` with its weight [N, K] packed in blocks of 32 rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.columns = weight.shape[0]
        self.packed = nn.Parameter(kernels.pack(weight.detach()), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        return kernels.linear(x, self.packed, self.columns, self.bias, onto)

    def logits(self, x: Tensor) -> Tensor:
        """The same in float32: nothing is rounded to 16 bits after the sums."""
        return kernels.linear(x, self.packed, self.columns, self.bias, mode=kernels.FLOAT32)


class PackedMLP(nn.Module):
    """`MLP`, the activation computed where gate and up are."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.inner = mlp.w_down.weight.shape[1]
        self.gate_up = nn.Parameter(kernels.pack_gated(mlp.w_gate_up.weight.detach()), requires_grad=False)
        self.w_down = PackedLinear(mlp.w_down.weight)

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        return self.w_down(kernels.linear(x, self.gate_up, self.inner, mode=kernels.GATED), onto)


class PackedNorm(nn.Module):
    """`RMSNorm` on the kernel."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


def attention(block: Block, qkv: Tensor, cache: KVCache, shared: Pass) -> Tensor:
    """`model.attention` on the kernel, which reads the mask as it is."""
    norms = () if block.q_norm is None else (block.q_norm.weight, block.k_norm.weight, block.q_norm.eps)
    return kernels.attend(qkv, shared.cos, shared.sin, cache.k, cache.v, shared.slots, shared.visible, *norms)


def run_layers(model: Transformer, x: Tensor, caches: nn.ModuleList, shared: Pass, aux_layers: tuple[int, ...]):
    """`model.run_layers` as one operator, for a target packed through and through."""
    none = x.new_empty(0)

    def of(layer: Block) -> list[Tensor]:
        norms = (none, none) if layer.q_norm is None else (layer.q_norm.weight, layer.k_norm.weight)
        bias = none if layer.wqkv.bias is None else layer.wqkv.bias
        mlp = (layer.mlp.gate_up, layer.mlp.w_down.packed)
        return [layer.attn_norm.weight, layer.wqkv.packed, bias, *norms, layer.wo.packed, layer.mlp_norm.weight, *mlp]

    weights = [tensor for layer in model.layers for tensor in of(layer)]
    k, v = [cache.k for cache in caches], [cache.v for cache in caches]
    x, features = kernels.layers(
        x, shared.cos, shared.sin, weights, k, v, shared.slots, shared.visible, model.args.norm_eps, aux_layers
    )
    return x, features if aux_layers else None


def move(caches: nn.ModuleList, source: Tensor, target: Tensor) -> None:
    """`model.move` as one operator."""
    kernels.move([t for cache in caches for t in (cache.k, cache.v)], source, target)


def pack(*models: nn.Module) -> None:
    """Let these models, which may share modules (a head its target's lm_head), run on the kernels, in place.

    `kernels.load` comes first. What the kernels cannot take (float16, odd sizes, a GPU, the experts of a mixture) is left
    as it is.
    """
    done: dict[int, PackedLinear] = {}  # the packed form of a weight that several modules share

    def packed(module: nn.Module) -> PackedLinear:
        key = id(module.weight)
        if key not in done:
            done[key] = PackedLinear(module.weight, getattr(module, "bias", None))
        return done[key]

    for model in models:
        weight = model.embed.weight
        if model.lm_head is None and kernels.takes(weight):
            model.lm_head = packed(model.embed)  # tied: the table stays, for reading embeddings
        for parent in list(model.modules()):
            if isinstance(parent, Block) and kernels.takes_heads(parent.head_dim, weight):
                parent.attention = attention
            for name, child in list(parent.named_children()):
                if isinstance(child, RMSNorm) and kernels.takes(child.weight):
                    setattr(parent, name, PackedNorm(child))
                elif isinstance(child, MLP) and kernels.takes(child.w_down.weight):
                    setattr(parent, name, PackedMLP(child))
                elif isinstance(child, nn.Linear if name != "lm_head" else nn.Linear | nn.Embedding) and kernels.takes(child.weight):
                    setattr(parent, name, packed(child))
        if isinstance(model, Transformer) and all(_is_packed(layer) for layer in model.layers):
            model.run_layers, model.move = run_layers, move


def _is_packed(layer: Block) -> bool:
    parts = ((layer.wqkv, PackedLinear), (layer.wo, PackedLinear), (layer.mlp, PackedMLP), (layer.attn_norm, PackedNorm))
    return layer.attention is attention and all(isinstance(part, kind) for part, kind in parts)
