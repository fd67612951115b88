"""The pass of a dense 16-bit target over few tokens: four products and one attention kernel for each layer.

A product reads its weights once and does what else stands between it and its neighbors: it multiplies by the
RMSNorm's factor, adds the bias, applies SwiGLU or adds to the residual stream, multiplies that by the weight
of the next norm, and sums its squares for that norm's factor. No other kernel touches a layer's activations.
Work is divided as in `kernels.gpu.products`. One program runs on each multiprocessor, with half of the shared
memory, so that with programmatic dependent launch the next kernel's programs start beside it and load their
first weights before they wait for its results.

Used with EAGLE_DENSE=1 in the environment, until complete steps with it are measured.
"""
from __future__ import annotations

import os

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import INTERPRETED, gpu_of
from kernels.gpu.fallback import with_fallback
from kernels.gpu.launch import arrival_counters, launch_options
from kernels.gpu.products import program_count, sum_partials
from model import MLP, Linear, PassInputs, RMSNorm, TargetBlock, Transformer, _finish, _project, silu_gate

MAX_TOKENS = 16  # BLOCK_M; cuBLAS is faster for more tokens
BLOCK_N, BLOCK_K, WARPS, STAGES = 64, 128, 4, 4
PREFETCHED = 2  # steps of weights that a program asks L2 for before it waits
TO_FLOAT32 = tl.constexpr(INTERPRETED)  # the interpreter has no 16-bit products


@triton.jit
def prefetch(pointers):
    """Load the cache lines at `pointers` into L2."""
    text: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(text, "=r,l", [pointers], tl.int32, False, 1)


@triton.jit
def row_of(tile, BLOCK_N: tl.constexpr, N, GATED: tl.constexpr):
    """Return the weight's rows of a tile [BLOCK_N]. GATED: half of them gates, half the same rows of `up`."""
    n = tl.arange(0, BLOCK_N)
    if GATED:
        n = tile * (BLOCK_N // 2) + n % (BLOCK_N // 2) + n // (BLOCK_N // 2) * (N // 2)
    else:
        n += tile * BLOCK_N
    return n.to(tl.int64)


@triton.jit
def store_outputs(
    sums, tile, squares, bias, residual, out, norm, weighted, next_squares, M, N, K, TILES, eps,
    GATED: tl.constexpr,
):
    """Compute a tile's outputs from its sums [BLOCK_N, BLOCK_M], see `dense_kernel`."""
    BLOCK_N: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.arange(0, BLOCK_M)
    if squares is not None:
        total, block = tl.zeros((BLOCK_M,), tl.float32), tl.arange(0, 16)
        for first in range(0, TILES, 16):
            at, mask = (first + block)[:, None] * BLOCK_M + row[None], (first + block < TILES)[:, None]
            total += tl.sum(tl.load(squares + at, mask=mask, other=0.0), 0)
        sums *= tl.rsqrt(total / K + eps)[None]
    if bias is not None:
        sums += tl.load(bias + row_of(tile, BLOCK_N, N, GATED)).to(tl.float32)[:, None]
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        gate, up = tl.split(sums.reshape(2, WIDTH, BLOCK_M).permute(1, 2, 0))
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        sums = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        N = N // 2
    column = tile * WIDTH + tl.arange(0, WIDTH)
    at, valid = row[:, None] * N + column[None], (row < M)[:, None]
    y = tl.trans(sums).to(dtype)
    if residual is not None:
        y = (tl.load(residual + at, mask=valid, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(out + at, y, mask=valid)
    if norm is not None:
        y = y.to(tl.float32)
        tl.store(weighted + at, (y * tl.load(norm + column)[None].to(tl.float32)).to(dtype), mask=valid)
        tl.store(next_squares + tile * BLOCK_M + row, tl.sum(tl.where(valid, y * y, 0.0), 1))


@triton.jit
def dense_kernel(
    x, weight, squares, bias, residual, out, norm, weighted, next_squares, partial_sums, arrived, M, N, K,
    TILES, eps, EVEN_K: tl.constexpr, GATED: tl.constexpr, PREFETCHED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """Compute out = x [M, K] @ weight [N, K]^T, and what follows it in a layer, in this order.

    squares [TILES, BLOCK_M]: sums of squares of each token, whose RMSNorm's factor multiplies the product.
    bias [N]. GATED: SwiGLU of the first and the second half of the N outputs. residual [M, N]: is added.
    norm [N]: also write weighted = out * norm, and out's sums of squares by tile. The other arguments are
    those of `product_kernel`.
    """
    worker, workers = tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(K, BLOCK_K)
    work = (N // BLOCK_N) * steps
    share = tl.cdiv(work, workers)
    first = worker * share
    end = tl.minimum(first + share, work)
    k, row = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_M)
    valid = (row < M)[:, None]
    first_tile = first // steps
    dtype: tl.constexpr = tl.float32 if TO_FLOAT32 else x.dtype.element_ty
    if PDL:  # weights do not depend on the kernel before this one
        at = weight + row_of(first_tile, BLOCK_N, N, GATED)[:, None] * K + (first % steps * BLOCK_K + k)[None]
        first_weights = tl.load(at, mask=(EVEN_K | (first % steps * BLOCK_K + k < K))[None], other=0.0)
        line = tl.arange(0, BLOCK_K // 64) * 64
        for step in range(first + 1, tl.minimum(first + 1 + PREFETCHED, end)):
            lines = step % steps * BLOCK_K + line
            prefetch(weight + row_of(step // steps, BLOCK_N, N, GATED)[:, None] * K + lines[None])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for tile in range(first_tile, tl.cdiv(end, steps)):
        start, stop = tl.maximum(first - tile * steps, 0), tl.minimum(end - tile * steps, steps)
        weights = weight + row_of(tile, BLOCK_N, N, GATED)[:, None] * K + k[None]
        inputs = x + row[:, None] * K + k[None]
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        begin = start
        if PDL:  # noqa: SIM102
            if tile == first_tile:
                inside = valid & (EVEN_K | (start * BLOCK_K + k < K))[None]
                a = tl.load(inputs + start * BLOCK_K, mask=inside, other=0.0)
                sums = tl.dot(first_weights, tl.trans(a), sums)
                begin += 1
        for step in range(begin, stop):
            inside = (EVEN_K | (step * BLOCK_K + k < K))[None]
            a = tl.load(inputs + step * BLOCK_K, mask=valid & inside, other=0.0).to(dtype)
            b = tl.load(weights + step * BLOCK_K, mask=inside, other=0.0).to(dtype)
            sums = tl.dot(b, tl.trans(a), sums, input_precision="ieee" if TO_FLOAT32 else "tf32")
        is_last = stop - start == steps
        if stop - start < steps:
            first_worker = tile * steps // share
            others = (tile * steps + steps - 1) // share - first_worker
            is_last, sums = sum_partials(
                partial_sums, arrived, worker, first_worker, others, tl.minimum(start, 1), sums, row < M
            )
        if is_last:
            store_outputs(
                sums, tile, squares, bias, residual, out, norm, weighted, next_squares, M, N, K, TILES, eps,
                GATED,
            )


def stages(shared: int) -> int:
    """Return how many steps of loads fit in `shared` bytes, of those that pay."""
    return min(STAGES, shared // (2 * BLOCK_K * (BLOCK_N + MAX_TOKENS)))


@torch.library.custom_op("eagle_gpu::dense", mutates_args=())
def dense(
    x: Tensor, weight: Tensor, squares: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    norm: Tensor | None, eps: float, gated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `dense_kernel` over x [M, K] -> (out [M, N], weighted [M, N], squares [tiles, MAX_TOKENS]).

    Without `norm`, the last two are empty.
    """
    (M, K), N, gpu = x.shape, weight.shape[0], gpu_of(x.device)
    programs = program_count(N // BLOCK_N, triton.cdiv(K, BLOCK_K), gpu.multiprocessors, 1)
    out, weighted, next_squares = allocate(x, weight, squares, bias, residual, norm, eps, gated)
    partial_sums = torch.empty(2 * programs * MAX_TOKENS * BLOCK_N, dtype=torch.float32, device=x.device)
    dense_kernel[(programs,)](
        x.contiguous(), weight, squares, bias, residual, out, norm, weighted, next_squares, partial_sums,
        arrival_counters(x.device, programs), M, N, K, 0 if squares is None else len(squares), eps,
        EVEN_K=K % BLOCK_K == 0, GATED=gated, PREFETCHED=PREFETCHED, BLOCK_M=MAX_TOKENS, BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, num_warps=WARPS, num_stages=stages(gpu.shared_memory),
        **launch_options(x.device),
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
