"""Models on our GPU kernels: attention from wqkv to wo as one kernel, the caches of all layers as one tensor.

The products stay torch's, or those of `kernels.quantized`.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

import model
from kernels.gpu.attention import attend
from kernels.gpu.cache import LayerCache, move
from kernels.parts import Sight, once
from kernels.quantized import QuantizedLinear
from model import Block, ModelArgs, Pass, TargetBlock, Transformer
from networks.head import Head


def attention(block: Block, qkv: Tensor, cache: LayerCache, shared: Pass) -> Tensor:
    """`model.attention` as one kernel; by its definition where the mask is given whole."""
    sight = shared.visible
    if not isinstance(sight, Sight):
        return model.attention(block, qkv, cache, shared)
    norms = (None, None, 0.0)
    if block.q_norm is not None:
        norms = block.q_norm.weight, block.k_norm.weight, block.q_norm.eps
    return attend(qkv, *shared.angles(_angles), *norms, cache.kv, cache.layer, sight.length, sight.local)


def _angles(args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`model.rope_table`."""
    cos, sin = model.rope_table(args, inv_freq, positions)
    return once(cos), once(sin)


@torch.compiler.nested_compile_region
def _first(layer: TargetBlock, x: Tensor) -> Tensor:
    return layer.project(x)


@torch.compiler.nested_compile_region
def _enter(layer: TargetBlock, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    x = x + more
    return x, layer.project(x)


@torch.compiler.nested_compile_region
def _leave(layer: TargetBlock, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    x = layer.wo(attended, x)
    return x, layer.mlp(layer.mlp_norm(x), None)


def run_layers(
    target: Transformer, x: Tensor, caches: nn.ModuleList, shared: Pass, aux_layers: tuple[int, ...]
):
    """`model.run_layers`. What a layer's MLP gives is added where the next layer begins.

    torch.compile makes one kernel of that sum and the norm after it, as it does of the sum after attention.
    Products that add to the residual stream themselves gain nothing by this.
    """
    features, more = [], None
    for i, cache in enumerate(caches):
        layer = target.layer(i, x if more is None else more)
        if more is None:
            qkv = _first(layer, x)
        else:
            x, qkv = _enter(layer, x, more)
        if i in aux_layers:
            features.append(x)
        x, more = _leave(layer, x, layer.attention(layer, qkv, cache, shared))
    x = x + more
    if len(target.layers) in aux_layers:
        features.append(x)
    return x, torch.cat(features, dim=-1) if features else None


def _adds_itself(product: nn.Module) -> bool:
    """Whether a product adds to the residual stream in its own kernel."""
    return isinstance(product, QuantizedLinear) and product.mode != "fp8"


def put_on_kernels(*models: nn.Module) -> None:
    """Let targets and heads, on a GPU, run on our kernels."""
    for each in models:
        if isinstance(each, Transformer):
            each.reads_length = True
            if not any(_adds_itself(module) for module in each.layers.modules()):
                each.run_layers = run_layers
        if isinstance(each, Transformer | Head):
            each.Cache, each.move = LayerCache, move
        for block in each.modules():
            if isinstance(block, Block):
                block.attention = attention
