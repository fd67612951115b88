"""Sampling in kernels: the noise of a step, made once, and the cut to top-k and top-p without sorting."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import begin, options

CHUNK = 1024  # numbers of noise of a program


@triton.jit
def mixed(x):
    """`sampling.noise._mix` of 32-bit numbers."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def gumbel_kernel(key, positions, temperature, out, W, V, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """See `gumbel`."""
    begin(EARLY)
    row, id = tl.program_id(0), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    b = row // W
    low, high = tl.load(key + 2 * b).to(tl.uint32), tl.load(key + 2 * b + 1).to(tl.uint32)
    position = tl.load(positions + row).to(tl.uint32)
    first = mixed(mixed(position + low) ^ high)
    second = mixed(mixed(position ^ high) + 0x5851F42D + low)
    bits = mixed(mixed(id.to(tl.uint32) * 0x1E3779B9 + first) ^ second)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    # log(1 - u) to the last bit but one also where 1 - u is rounded: the rounding is divided out.
    left = 1.0 - u
    log_left = tl.where(left == 1.0, -u, tl.log(left) * (-u) / tl.where(left == 1.0, 1.0, left - 1.0))
    noise = -tl.log(-log_left) * tl.load(temperature + b)
    tl.store(out + row.to(tl.int64) * V + id, noise, mask=id < V)


@torch.library.custom_op("eagle_gpu::gumbel", mutates_args=())
def gumbel(key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int) -> Tensor:
    """temperature [B] times `sampling.noise.gumbel` [B, W, V] of key [B, 2] and positions [B, W]."""
    B, W = positions.shape
    out = torch.empty(B, W, vocabulary, dtype=torch.float32, device=key.device)
    gumbel_kernel[(B * W, triton.cdiv(vocabulary, CHUNK))](
        key.contiguous(), positions.contiguous(), temperature, out, W, vocabulary, CHUNK=CHUNK, num_warps=4,
        **options(key.device),
    )
    return out


@gumbel.register_fake
def _(key, positions, temperature, vocabulary):
    return key.new_empty((*positions.shape, vocabulary), dtype=torch.float32)


@triton.jit
def ordered(x):
    """Integers that are ordered as the float32 numbers x are."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of(x, top, warm):
    """The weight of logits x in whole 2^-32 of the likeliest one's."""
    return (tl.exp(x / warm - top / warm) * 4294967296.0).to(tl.int64)


@triton.jit
def heavier(logits, V, floor, bars, top, warm, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """Count the logits of a row that are at least each of the bars [n] (ordered integers) and `floor`, or, if
    MASS, sum their weights.
    """
    sums = tl.zeros((CHUNK, bars.shape[0]), tl.int64)
    for start in range(0, V, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(logits + at, mask=at < V, other=float("-inf"))
        order = ordered(x)
        counts = ((at < V) & (order >= floor))[:, None] & (order[:, None] >= bars[None])
        if MASS:
            sums += tl.where(counts, weight_of(x, top, warm)[:, None], 0)
        else:
            sums += counts.to(tl.int64)
    return tl.sum(sums, 0)


@triton.jit
def highest_bar(logits, V, floor, need, top, warm, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """Find the highest ordered integer that `need` logits, or this much of their weight, reach.

    Eleven passes find it: each looks at eight bars and leaves an eighth of a range of 2^32.
    """
    low, apart = tl.full((), -(2**31), tl.int64), tl.full((), 2**29, tl.int64)
    for _ in range(11):
        bars = low + apart * tl.arange(0, 8)
        enough = heavier(logits, V, floor, bars, top, warm, MASS, CHUNK) >= need
        # The first is always reached: what is not are the highest ones.
        low += apart * (tl.sum(enough.to(tl.int64), 0) - 1)
        apart = tl.maximum(apart >> 3, 1)
    return low.to(tl.int32)


@triton.jit
def restrict_kernel(logits, temperature, top_k, top_p, out, T, V, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """One row; see `restrict`."""
    begin(EARLY)
    row = tl.program_id(0)
    b = row // T
    warm, k, p = tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b)
    logits += row.to(tl.int64) * V
    out += row.to(tl.int64) * V
    floor, bar = tl.full((), -(2**31), tl.int32), tl.full((), -(2**31), tl.int32)
    if warm > 0:
        if (k > 0) & (k < V):
            floor = highest_bar(logits, V, floor, k, 0.0, 1.0, False, CHUNK)
        if p < 1:
            tops = tl.full((CHUNK,), float("-inf"), tl.float32)
            for start in range(0, V, CHUNK):
                at = start + tl.arange(0, CHUNK)
                tops = tl.maximum(tops, tl.load(logits + at, mask=at < V, other=float("-inf")))
            top = tl.max(tops, 0)
            lowest = tl.zeros((1,), tl.int32) + bar
            all_of = tl.sum(heavier(logits, V, floor, lowest, top, warm, True, CHUNK), 0)
            need = tl.ceil(all_of.to(tl.float64) * p.to(tl.float64)).to(tl.int64)
            bar = highest_bar(logits, V, floor, need, top, warm, True, CHUNK)
    for start in range(0, V, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = tl.load(logits + at, mask=at < V, other=0.0)
        order = ordered(x)
        tl.store(out + at, tl.where((order >= floor) & (order >= bar), x, float("-inf")), mask=at < V)


@torch.library.custom_op("eagle_gpu::restrict", mutates_args=())
def restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`sampling.restrict.restrict` of float32 logits [B, T, V]; the others [B]."""
    B, T, V = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    restrict_kernel[(B * T,)](
        logits.contiguous(), temperature, top_k, top_p, out, T, V,
        CHUNK=min(1024, triton.next_power_of_2(V)), num_warps=16, **options(logits.device),
    )
    return out


@restrict.register_fake
def _(logits, temperature, top_k, top_p):
    return logits.new_empty(logits.shape, dtype=torch.float32)
