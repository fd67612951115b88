"""Thresholds of top-k and top-p without sorting whole rows.

Programs sort chunks of the vocabulary in parallel. Bisection then finds the threshold: binary search in every
chunk counts the logits, or sums their weights, above each candidate.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import launch_options, wait_for_previous
from kernels.gpu.ranking import float_to_ordered, ordered_to_float

MAX_CHUNK = 2048  # logits that one program sorts
MIN_ORDERED = tl.constexpr(-(2**31))
THRESHOLDS, ROUNDS = tl.constexpr(32), tl.constexpr(7)  # 32^7 > 2^32


@triton.jit
def restricted(temperature, top_k, top_p, b, V):
    """Return whether top-k restricts sequence b, and whether top-p does."""
    t, k, p = tl.load(temperature + b), tl.load(top_k + b), tl.load(top_p + b)
    return (t > 0) & (k > 0) & (k < V), (t > 0) & (p < 1)


@triton.jit
def sort_kernel(
    logits, peak, temperature, top_k, top_p, order, mass, T, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort one chunk of one row, largest first, to order [B * T, CHUNKS * CHUNK] of `float_to_ordered`.

    mass, of the same shape: cumulative weights within a chunk. A weight is a softmax numerator in units of
    2^-32 of the row's largest. peak [B * T]: the row's maximum.
    """
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    by_k, by_p = restricted(temperature, top_k, top_p, row // T, V)
    if by_k | by_p:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * V + at, mask=at < V, other=0.0)
        key = tl.sort(tl.where(at < V, float_to_ordered(x), MIN_ORDERED), descending=True)
        tl.store(order + row * CHUNKS * CHUNK + at, key)
        weight = tl.exp((ordered_to_float(key) - tl.load(peak + row)) / tl.load(temperature + row // T))
        weight = tl.where(key == MIN_ORDERED, 0, (weight * 4294967296.0).to(tl.int64))
        tl.store(mass + row * CHUNKS * CHUNK + at, tl.cumsum(weight, 0))


@triton.jit
def count_above(order, candidates, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """Count the logits of each sorted chunk at or above each of candidates [n] -> [BLOCK_CHUNKS, n]."""
    chunk = tl.arange(0, BLOCK_CHUNKS)[:, None]
    live = (chunk < CHUNKS) & (candidates[None] >= MIN_ORDERED)
    count = tl.zeros((BLOCK_CHUNKS, candidates.shape[0]), tl.int32)
    step = tl.full((), CHUNK, tl.int32)
    while step > 0:
        further = count + step
        fits = live & (further <= CHUNK)
        last = tl.load(order + chunk * CHUNK + further - 1, mask=fits, other=MIN_ORDERED)
        count = tl.where(fits & (last >= candidates[None]), further, count)
        step >>= 1
    return count


@triton.jit
def total_above(order, mass, kept, candidates, SUM_MASS: tl.constexpr, CHUNK: tl.constexpr,
                CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """Count the logits of a row at or above each of candidates [n]; if SUM_MASS, sum their weights instead.

    kept [BLOCK_CHUNKS, 1]: how many logits of each chunk top-k has kept; others have no weight.
    """
    count = count_above(order, candidates, CHUNK, CHUNKS, BLOCK_CHUNKS)
    if SUM_MASS:
        count = tl.minimum(count, kept)
        at = tl.arange(0, BLOCK_CHUNKS)[:, None] * CHUNK + count - 1
        return tl.sum(tl.load(mass + at, mask=count > 0, other=0), 0)
    return tl.sum(count.to(tl.int64), 0)


@triton.jit
def bisect(order, mass, kept, needed, SUM_MASS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
           BLOCK_CHUNKS: tl.constexpr):
    """Return the highest threshold with `total_above` of at least `needed`.

    Each round tries 32 candidates and keeps a 32nd of the range, which is 2^32 at first.
    """
    low, step = tl.full((), -(2**31), tl.int64), tl.full((), 2**27, tl.int64)
    for _ in range(ROUNDS):
        candidates = low + step * tl.arange(0, THRESHOLDS)
        reached = total_above(order, mass, kept, candidates, SUM_MASS, CHUNK, CHUNKS, BLOCK_CHUNKS) >= needed
        low += step * (tl.sum(reached.to(tl.int64), 0) - 1)  # the first is always reached
        step = tl.maximum(step // THRESHOLDS, 1)
    return low.to(tl.int32)


@triton.jit
def threshold_kernel(
    order, mass, temperature, top_k, top_p, out, T, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr, PDL: tl.constexpr,
):
    """Write the lowest kept logit of each row to out [B * T]."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    by_k, by_p = restricted(temperature, top_k, top_p, b, V)
    order, mass = order + row * CHUNKS * CHUNK, mass + row * CHUNKS * CHUNK
    lowest, kept = tl.full((), -(2**31), tl.int32), tl.full((BLOCK_CHUNKS, 1), CHUNK, tl.int32)
    if by_k:
        lowest = bisect(order, mass, kept, tl.load(top_k + b), False, CHUNK, CHUNKS, BLOCK_CHUNKS)
    if by_p:
        by_top_k = tl.zeros((1,), tl.int32) + lowest
        kept = count_above(order, by_top_k, CHUNK, CHUNKS, BLOCK_CHUNKS)
        total = tl.sum(total_above(order, mass, kept, by_top_k, True, CHUNK, CHUNKS, BLOCK_CHUNKS), 0)
        needed = tl.ceil(total.to(tl.float64) * tl.load(top_p + b).to(tl.float64)).to(tl.int64)
        lowest = tl.maximum(lowest, bisect(order, mass, kept, needed, True, CHUNK, CHUNKS, BLOCK_CHUNKS))
    tl.store(out + row, tl.where(by_k | by_p, ordered_to_float(lowest), float("-inf")))


@torch.library.custom_op("eagle_gpu::thresholds", mutates_args=())
def thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest logit [B, T] that `engine.sampling.restrict` keeps of float32 logits [B, T, V].

    temperature, top_k, top_p: [B].
    """
    B, T, V = logits.shape
    chunk = min(MAX_CHUNK, triton.next_power_of_2(V))
    chunks = triton.cdiv(V, chunk)
    order = logits.new_empty(B * T, chunks * chunk, dtype=torch.int32)
    mass = logits.new_empty(B * T, chunks * chunk, dtype=torch.int64)
    out, options = logits.new_empty(B, T), (temperature, top_k, top_p)
    constants = {"CHUNK": chunk, "CHUNKS": chunks, "num_warps": 8, **launch_options(logits.device)}
    sort_kernel[B * T, chunks](logits.contiguous(), logits.amax(-1), *options, order, mass, T, V, **constants)
    constants["BLOCK_CHUNKS"] = triton.next_power_of_2(chunks)
    threshold_kernel[(B * T,)](order, mass, *options, out, T, V, **constants)
    return out


@thresholds.register_fake
def _thresholds(logits, temperature, top_k, top_p):
    return logits.new_empty(logits.shape[:2])
