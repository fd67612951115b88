"""The pass of a dense 16-bit target over few tokens: four products and one attention kernel for each layer.

A product reads its weights once and does what else stands between it and its neighbors: it multiplies by the
RMSNorm's factor, adds the bias, applies SwiGLU or adds to the residual stream, multiplies that by the weight
of the next norm, and sums its squares for that norm's factor. No other kernel touches a layer's activations.
Work is divided as in `kernels.gpu.products`. One program runs on each multiprocessor, with half of the shared
memory, so that with programmatic dependent launch the next kernel's programs start beside it and ask L2 for
their first weights before they wait for its results.

Used with EAGLE_DENSE=1 in the environment, until complete steps with it are measured.
"""
from __future__ import annotations

import os
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from kernels.gpu.device import INTERPRETED
from kernels.gpu.fallback import with_fallback
from kernels.gpu.products import linear
from model import MLP, Linear, PassInputs, RMSNorm, TargetBlock, Transformer, _finish, _project, silu_gate

MAX_TOKENS, BLOCK_N = 16, 64  # BLOCK_M and BLOCK_N; cuBLAS is faster for more tokens


def product(x: Tensor, weight: Tensor, *args, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Run `linear` on a 16-bit weight [N, K]. args, options: from `bias` on."""
    return linear(x, weight, None, None, None, len(weight), 16, False, 0, *args, **options, block=MAX_TOKENS)


def run(
    model: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, visible, caches,
    aux_layers: tuple[int, ...] = (), max_tokens: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """`Transformer.forward`: in `product`s for up to `max_tokens` tokens, else as it is there."""
    shared, eps = PassInputs(model.args, model.inv_freq, positions, slots, visible), model.args.norm_eps
    stream = [None, None]  # what the next product reads: the residual stream, weighted, and its squares

    def apply(i: int, layer: TargetBlock, x: Tensor) -> Tensor:
        if tokens.numel() > max_tokens:
            return _finish(layer, x, layer.attend(caches[i], _project(layer, x), shared))
        x = x.flatten(0, 1)
        if i == 0:
            squares = x.float().square().sum(-1)
            stream[:] = x * layer.attn_norm.weight, F.pad(squares[None], (0, MAX_TOKENS - len(squares)))
        qkv, *_ = product(stream[0], layer.wqkv.weight, layer.wqkv.bias, None, stream[1], eps=eps)
        attended = layer.attend(caches[i], qkv.unflatten(0, tokens.shape), shared).flatten(0, 1)
        norm = layer.mlp_norm.weight
        x, weighted, squares = product(attended, layer.wo.weight, None, x, None, norm)
        hidden, *_ = product(weighted, layer.mlp.w_gate_up.weight, None, None, squares, eps=eps, gated=True)
        norm = model.layers[i + 1].attn_norm.weight if i + 1 < len(model.layers) else None
        x, *stream[:] = product(hidden, layer.mlp.w_down.weight, None, x, None, norm)
        return x.unflatten(0, tokens.shape)

    return model.run_layers(tokens, aux_layers, apply)


forward = with_fallback("dense", run)(partial(run, max_tokens=MAX_TOKENS))


def fuse(model: Transformer) -> None:
    """Let a target run `forward` if all its layers are standard and in 16 bits."""
    chosen = INTERPRETED or (os.environ.get("EAGLE_DENSE") == "1" and model.embed.dtype.itemsize == 2)
    if chosen and type(model) is Transformer and model.ranks is None and all(
        type(layer) is TargetBlock and layer.standard and layer.sinks is None
        and type(layer.mlp) is MLP and layer.mlp.gate is silu_gate
        and all(type(norm) is RMSNorm for norm in (layer.attn_norm, layer.mlp_norm))
        and all(type(linear) is Linear and linear.weight.shape[0] % BLOCK_N == 0
                for linear in (layer.wqkv, layer.wo, layer.mlp.w_gate_up, layer.mlp.w_down))
        for layer in model.layers
    ):
        model.fused = forward
