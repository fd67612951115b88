"""Top-k and top-p without sorting whole rows.

Chunks of the vocabulary are sorted in parallel. How many logits reach a threshold, and their weight, are then
found by bisection: the vocabulary is read once, not once for every few thresholds.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import begin, options
from kernels.gpu.ranking import number_of, ordered

MAX_CHUNK = 2048  # logits that one program sorts
LOWEST = tl.constexpr(-(2**31))  # below every ordered number


@triton.jit
def restrictions(temperature, top_k, top_p, b, V):
    """Return whether top-k and whether top-p restrict sequence b."""
    t, k, p = tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b)
    return (t > 0) & (k > 0) & (k < V), (t > 0) & (p < 1)


@triton.jit
def sort_kernel(
    logits, temperature, top_k, top_p, order, T, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sort one chunk of one row, largest first: order [B * T, CHUNKS * CHUNK], as `ordered` integers."""
    begin(EARLY)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    by_k, by_p = restrictions(temperature, top_k, top_p, row // T, V)
    if by_k | by_p:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * V + at, mask=at < V, other=0.0)
        key = tl.sort(tl.where(at < V, ordered(x), LOWEST), descending=True)
        tl.store(order + row * CHUNKS * CHUNK + at, key)


@triton.jit
def mass_kernel(
    order, temperature, top_k, top_p, mass, T, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):
    """Sum the weights of a sorted chunk from its first logit on: mass [B * T, CHUNKS * CHUNK].

    The unit of a weight is 2^-32 of the weight of the row's top-1 token.
    """
    begin(EARLY)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, by_p = restrictions(temperature, top_k, top_p, row // T, V)
    if by_p:
        t, order = tl.load(temperature + row // T), order + row * CHUNKS * CHUNK
        each, at = tl.arange(0, WIDE), chunk * CHUNK + tl.arange(0, CHUNK)
        peak = tl.max(tl.load(order + each * CHUNK, mask=each < CHUNKS, other=LOWEST), 0)
        key = tl.load(order + at)
        share = tl.exp((number_of(key) - number_of(peak)) / t)
        weight = tl.where(key == LOWEST, 0, (share * 4294967296.0).to(tl.int64))
        tl.store(mass + row * CHUNKS * CHUNK + at, tl.cumsum(weight, 0))


@triton.jit
def counts(order, thresholds, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr):
    """Count the logits of each sorted chunk that reach each of thresholds [n] -> [WIDE, n]."""
    chunk = tl.arange(0, WIDE)[:, None]
    there = (chunk < CHUNKS) & (thresholds[None] >= LOWEST)
    count = tl.zeros((WIDE, thresholds.shape[0]), tl.int32)
    step = tl.full((), CHUNK, tl.int32)
    while step > 0:
        further = count + step
        fits = there & (further <= CHUNK)
        last = tl.load(order + chunk * CHUNK + further - 1, mask=fits, other=LOWEST)
        count = tl.where(fits & (last >= thresholds[None]), further, count)
        step >>= 1
    return count


@triton.jit
def reaching(order, mass, kept, thresholds, MASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
             WIDE: tl.constexpr):
    """Count the logits of a row that reach each of thresholds [n]; if MASS, sum their weights instead.

    kept [WIDE, 1]: the first logits of each chunk, which alone have a weight.
    """
    count = counts(order, thresholds, CHUNK, CHUNKS, WIDE)
    if MASS:
        count = tl.minimum(count, kept)
        at = tl.arange(0, WIDE)[:, None] * CHUNK + count - 1
        return tl.sum(tl.load(mass + at, mask=count > 0, other=0), 0)
    return tl.sum(count.to(tl.int64), 0)


@triton.jit
def highest(order, mass, kept, needed, MASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
            WIDE: tl.constexpr):
    """Find the highest threshold, an ordered integer, that `needed` logits reach, or this much weight.

    Each of seven rounds tries 32 thresholds and leaves a 32nd of the range, of 2^32 at first.
    """
    low, apart = tl.full((), -(2**31), tl.int64), tl.full((), 2**27, tl.int64)
    for _ in range(7):
        thresholds = low + apart * tl.arange(0, 32)
        enough = reaching(order, mass, kept, thresholds, MASS, CHUNK, CHUNKS, WIDE) >= needed
        low += apart * (tl.sum(enough.to(tl.int64), 0) - 1)  # the first is always reached
        apart = tl.maximum(apart >> 5, 1)
    return low.to(tl.int32)


@triton.jit
def threshold_kernel(
    order, mass, temperature, top_k, top_p, out, T, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, EARLY: tl.constexpr,
):
    """Find the lowest logit of a row that stays: out [B * T]."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    by_k, by_p = restrictions(temperature, top_k, top_p, b, V)
    order += row * CHUNKS * CHUNK
    mass += row * CHUNKS * CHUNK
    lowest, kept = tl.full((), -(2**31), tl.int32), tl.full((WIDE, 1), CHUNK, tl.int32)
    if by_k:
        lowest = highest(order, mass, kept, tl.load(top_k + b), False, CHUNK, CHUNKS, WIDE)
    if by_p:
        of_k = tl.zeros((1,), tl.int32) + lowest
        kept = counts(order, of_k, CHUNK, CHUNKS, WIDE)
        total = tl.sum(reaching(order, mass, kept, of_k, True, CHUNK, CHUNKS, WIDE), 0)
        needed = tl.ceil(total.to(tl.float64) * tl.load(top_p + b).to(tl.float64)).to(tl.int64)
        lowest = tl.maximum(lowest, highest(order, mass, kept, needed, True, CHUNK, CHUNKS, WIDE))
    tl.store(out + row, tl.where(by_k | by_p, number_of(lowest), float("-inf")))


@torch.library.custom_op("eagle_gpu::thresholds", mutates_args=())
def thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest logit [B, T] that `sampling.noise.restrict` keeps of float32 logits [B, T, V].

    temperature, top_k, top_p: [B].
    """
    B, T, V = logits.shape
    chunk = min(MAX_CHUNK, triton.next_power_of_2(V))
    chunks = triton.cdiv(V, chunk)
    order = logits.new_empty(B * T, chunks * chunk, dtype=torch.int32)
    mass = logits.new_empty(B * T, chunks * chunk, dtype=torch.int64)
    out, requests = _thresholds(logits, temperature, top_k, top_p), (temperature, top_k, top_p)
    sizes = {"CHUNK": chunk, "CHUNKS": chunks, "num_warps": 8, **options(logits.device)}
    wide = {**sizes, "WIDE": triton.next_power_of_2(chunks)}
    sort_kernel[B * T, chunks](logits.contiguous(), *requests, order, T, V, **sizes)
    mass_kernel[B * T, chunks](order, *requests, mass, T, V, **wide)
    threshold_kernel[(B * T,)](order, mass, *requests, out, T, V, **wide)
    return out


@thresholds.register_fake
def _thresholds(logits, temperature, top_k, top_p):
    return logits.new_empty(logits.shape[:2])
