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

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels.gpu.device import INTERPRETED, gpu_of
from kernels.gpu.fallback import with_fallback
from kernels.gpu.launch import arrival_counters, launch_options
from kernels.gpu.products import product_kernel, program_count
from model import MLP, Linear, PassInputs, RMSNorm, TargetBlock, Transformer, _finish, _project, silu_gate

MAX_TOKENS = 16  # BLOCK_M; cuBLAS is faster for more tokens
BLOCK_N, BLOCK_K = 64, 128
TILE = {"BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "num_warps": 4, "num_stages": 4}
PREFETCHED = 3  # steps of weights that a program asks L2 for before it waits


@torch.library.custom_op("eagle_gpu::dense", mutates_args=())
def dense(
    x: Tensor, weight: Tensor, squares: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    norm: Tensor | None, eps: float, gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `product_kernel` over x [M, K] -> (out [M, N], weighted [M, N], squares [tiles, MAX_TOKENS]).

    Without `norm`, the last two are empty.
    """
    (M, K), N = x.shape, weight.shape[0]
    programs = program_count(N // BLOCK_N, triton.cdiv(K, BLOCK_K), gpu_of(x.device).multiprocessors, 1)
    out, weighted, next_squares = allocate(x, weight, squares, bias, residual, norm, eps, gated)
    partial_sums = torch.empty(2 * programs * MAX_TOKENS * BLOCK_N, dtype=torch.float32, device=x.device)
    product_kernel[1, programs](
        x.contiguous(), weight, None, None, None, squares, bias, residual, out, norm, weighted, next_squares,
        partial_sums, arrival_counters(x.device, programs), M, N, K, 0 if squares is None else len(squares),
        eps, BITS=16, FLOATS=False, GROUP=0, GATED=gated, EVEN_K=K % BLOCK_K == 0, PRECISION="tf32",
        BLOCK_M=MAX_TOKENS, **TILE, PREFETCHED=PREFETCHED, **launch_options(x.device),
    )
    return out, weighted, next_squares


@dense.register_fake
def allocate(x, weight, squares, bias, residual, norm, eps, gated):
    out = x.new_empty(len(x), len(weight) // (2 if gated else 1))
    if norm is None:
        return out, x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    return out, torch.empty_like(out), x.new_empty(len(weight) // BLOCK_N, MAX_TOKENS, dtype=torch.float32)


def defined(x, weight, squares, bias, residual, norm, eps, gated):
    """Compute `dense` in PyTorch."""
    y = F.linear(x, weight).float()
    if squares is not None:
        y = y * torch.rsqrt(squares.sum(0)[: len(x), None] / x.shape[1] + eps)
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    if gated:
        y = silu_gate(*y.chunk(2, -1))
    y = y if residual is None else residual + y
    if norm is None:
        return y, x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    tiles = y.float().square().unflatten(-1, (-1, BLOCK_N)).sum(-1)
    return y, y * norm, F.pad(tiles.t(), (0, MAX_TOKENS - len(x)))


@with_fallback("dense", defined)
def product(x, weight, squares, bias, residual, norm, eps, gated):
    """`dense`, or its definition where the kernel is wrong."""
    return dense(x, weight, squares, bias, residual, norm, eps, gated)


def forward(
    model: Transformer, tokens: Tensor, positions: Tensor, slots: Tensor, visible, caches,
    aux_layers: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """`Transformer.forward`: in `dense` products for up to MAX_TOKENS tokens, else as it is there."""
    shared, eps = PassInputs(model.args, model.inv_freq, positions, slots, visible), model.args.norm_eps
    stream = [None, None]  # what the next product reads: the residual stream, weighted, and its squares

    def apply(i: int, layer: TargetBlock, x: Tensor) -> Tensor:
        if tokens.numel() > MAX_TOKENS:
            return _finish(layer, x, layer.attend(caches[i], _project(layer, x), shared))
        x = x.flatten(0, 1)
        if i == 0:
            squares = x.float().square().sum(-1)
            stream[:] = x * layer.attn_norm.weight, F.pad(squares[None], (0, MAX_TOKENS - len(squares)))
        qkv, *_ = product(stream[0], layer.wqkv.weight, stream[1], layer.wqkv.bias, None, None, eps, False)
        attended = layer.attend(caches[i], qkv.unflatten(0, tokens.shape), shared).flatten(0, 1)
        norm = layer.mlp_norm.weight
        x, weighted, squares = product(attended, layer.wo.weight, None, None, x, norm, eps, False)
        hidden, *_ = product(weighted, layer.mlp.w_gate_up.weight, squares, None, None, None, eps, True)
        norm = model.layers[i + 1].attn_norm.weight if i + 1 < len(model.layers) else None
        x, *stream[:] = product(hidden, layer.mlp.w_down.weight, None, None, x, norm, eps, False)
        return x.unflatten(0, tokens.shape)

    return model.run_layers(tokens, aux_layers, apply)


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
