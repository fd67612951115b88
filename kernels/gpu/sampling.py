"""Sampling in kernels: the noise of a step, made once, and the cut to top-k and top-p without sorting."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import begin, options
from kernels.gpu.ranking import number_of, ordered

CHUNK = 1024  # numbers of noise of a program
SORTED = 2048  # logits of a sorted chunk


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


LEAST = tl.constexpr(-(2**31))  # below every ordered number


@triton.jit
def restricts(temperature, top_k, top_p, b, V):
    """Return whether sequence b is restricted at all, by top-k, and by top-p."""
    warm, k, p = tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b)
    by_rank, by_mass = (warm > 0) & (k > 0) & (k < V), (warm > 0) & (p < 1)
    return by_rank | by_mass, by_rank, by_mass


@triton.jit
def sort_kernel(
    logits, temperature, top_k, top_p, order, T, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sort one chunk of one row, largest first: order [B * T, CHUNKS * CHUNK], as `ordered` integers."""
    begin(EARLY)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    any_of, _, _ = restricts(temperature, top_k, top_p, row // T, V)
    if any_of:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * V + at, mask=at < V, other=0.0)
        key = tl.sort(tl.where(at < V, ordered(x), LEAST), descending=True)
        tl.store(order + row * CHUNKS * CHUNK + at, key)


@triton.jit
def weigh_kernel(
    order, temperature, top_k, top_p, mass, T, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):
    """Sum the weights of a sorted chunk from its first number on: mass [B * T, CHUNKS * CHUNK].

    A weight is in whole 2^-32 of that of the row's likeliest token.
    """
    begin(EARLY)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, by_mass = restricts(temperature, top_k, top_p, row // T, V)
    if by_mass:
        warm, order = tl.load(temperature + row // T), order + row * CHUNKS * CHUNK
        each, at = tl.arange(0, WIDE), chunk * CHUNK + tl.arange(0, CHUNK)
        top = tl.max(tl.load(order + each * CHUNK, mask=each < CHUNKS, other=LEAST), 0)
        key = tl.load(order + at)
        share = tl.exp((number_of(key) - number_of(top)) / warm)
        weight = tl.where(key == LEAST, 0, (share * 4294967296.0).to(tl.int64))
        tl.store(mass + row * CHUNKS * CHUNK + at, tl.cumsum(weight, 0))


@triton.jit
def reaching(order, bars, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr):
    """Count the numbers of each sorted chunk that are at least each of bars [n]: [WIDE, n]."""
    chunk = tl.arange(0, WIDE)[:, None]
    there = (chunk < CHUNKS) & (bars[None] >= LEAST)
    count = tl.zeros((WIDE, bars.shape[0]), tl.int32)
    step = tl.full((), CHUNK, tl.int32)
    while step > 0:
        further = count + step
        fits = there & (further <= CHUNK)
        last = tl.load(order + chunk * CHUNK + further - 1, mask=fits, other=LEAST)
        count = tl.where(fits & (last >= bars[None]), further, count)
        step >>= 1
    return count


@triton.jit
def heavier(order, mass, most, bars, MASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
            WIDE: tl.constexpr):
    """Count the numbers of a row that are at least each of bars [n], or, if MASS, sum the weights of those
    among the first `most` [WIDE, 1] of each chunk.
    """
    count = reaching(order, bars, CHUNK, CHUNKS, WIDE)
    if MASS:
        count = tl.minimum(count, most)
        at = tl.arange(0, WIDE)[:, None] * CHUNK + count - 1
        return tl.sum(tl.load(mass + at, mask=count > 0, other=0), 0)
    return tl.sum(count.to(tl.int64), 0)


@triton.jit
def highest_bar(order, mass, most, need, MASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
                WIDE: tl.constexpr):
    """Find the highest ordered integer that `need` numbers, or this much of their weight, reach.

    Each of seven rounds looks at 32 bars and leaves a 32nd of the range, of 2^32 at first.
    """
    low, apart = tl.full((), -(2**31), tl.int64), tl.full((), 2**27, tl.int64)
    for _ in range(7):
        bars = low + apart * tl.arange(0, 32)
        enough = heavier(order, mass, most, bars, MASS, CHUNK, CHUNKS, WIDE) >= need
        # The first is always reached: what is not are the highest ones.
        low += apart * (tl.sum(enough.to(tl.int64), 0) - 1)
        apart = tl.maximum(apart >> 5, 1)
    return low.to(tl.int32)


@triton.jit
def bar_kernel(
    order, mass, temperature, top_k, top_p, bars, T, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):
    """Find the lowest number of a row that stays: bars [B * T], as ordered integers."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    _, by_rank, by_mass = restricts(temperature, top_k, top_p, b, V)
    order += row * CHUNKS * CHUNK
    mass += row * CHUNKS * CHUNK
    bar, all_of = tl.full((), -(2**31), tl.int32), tl.full((WIDE, 1), CHUNK, tl.int32)
    if by_rank:
        bar = highest_bar(order, mass, all_of, tl.load(top_k + b), False, CHUNK, CHUNKS, WIDE)
    if by_mass:
        floor = tl.zeros((1,), tl.int32) + bar
        most = reaching(order, floor, CHUNK, CHUNKS, WIDE)
        whole = tl.sum(heavier(order, mass, most, floor, True, CHUNK, CHUNKS, WIDE), 0)
        need = tl.ceil(whole.to(tl.float64) * tl.load(top_p + b).to(tl.float64)).to(tl.int64)
        bar = tl.maximum(bar, highest_bar(order, mass, most, need, True, CHUNK, CHUNKS, WIDE))
    tl.store(bars + row, bar)


@triton.jit
def cut_kernel(logits, bars, out, V, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """Copy one chunk of one row; numbers below the row's bar become -inf."""
    begin(EARLY)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + at, mask=at < V, other=0.0)
    tl.store(out + row * V + at, tl.where(ordered(x) >= tl.load(bars + row), x, float("-inf")), mask=at < V)


@torch.library.custom_op("eagle_gpu::restrict", mutates_args=())
def restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`sampling.adjust.restrict` of float32 logits [B, T, V]; the others [B].

    Chunks of the vocabulary are sorted side by side, so that the numbers that reach a bar, and their weight,
    are found by bisection: the vocabulary is read twice and not once for every few bars.
    """
    B, T, V = logits.shape
    out, logits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device), logits.contiguous()
    chunk = min(SORTED, triton.next_power_of_2(V))
    chunks = triton.cdiv(V, chunk)
    order = torch.empty(B * T, chunks * chunk, dtype=torch.int32, device=logits.device)
    mass = torch.empty(B * T, chunks * chunk, dtype=torch.int64, device=logits.device)
    bars = torch.empty(B * T, dtype=torch.int32, device=logits.device)
    requests, launch = (temperature, top_k, top_p), options(logits.device)
    sizes = {"CHUNK": chunk, "CHUNKS": chunks}
    wide = {**sizes, "WIDE": triton.next_power_of_2(chunks)}
    grid = B * T, chunks
    sort_kernel[grid](logits, *requests, order, T, V, **sizes, num_warps=8, **launch)
    weigh_kernel[grid](order, *requests, mass, T, V, **wide, num_warps=8, **launch)
    bar_kernel[(B * T,)](order, mass, *requests, bars, T, V, **wide, num_warps=8, **launch)
    cut_kernel[grid](logits, bars, out, V, CHUNK=chunk, num_warps=4, **launch)
    return out


@restrict.register_fake
def _(logits, temperature, top_k, top_p):
    return logits.new_empty(logits.shape, dtype=torch.float32)
