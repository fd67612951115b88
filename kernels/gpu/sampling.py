"""Top-k with log-probabilities for the children of draft nodes, and thresholds of top-k and top-p sampling.

`top_k_kernel` works in two stages. A row of logits is divided into chunks, one program each. Each program
writes the top k of its chunk and its sum of exponentials to scratch memory; the last one to arrive merges
them. Equal logits are ordered by id.

Thresholds need no sorted row: programs sort chunks of the vocabulary in parallel. Bisection then finds the
threshold: binary search in every chunk counts the logits, or sums their weights, above each candidate.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import arrival_counters, launch_options, wait_for_previous

RANKED_CHUNK, SORTED_CHUNK = 2048, 2048  # logits of a program
MIN_KEY, MIN_ORDERED = tl.constexpr(-(2**63)), tl.constexpr(-(2**31))
THRESHOLDS, ROUNDS = tl.constexpr(32), tl.constexpr(7)  # 32^7 > 2^32


@triton.jit
def float_to_ordered(x):
    """Convert float32 to int32 of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_to_float(order):
    """Invert `float_to_ordered`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_key(x, index):
    """Return int64 keys that order float32 numbers by value, and equal ones by descending index."""
    return (float_to_ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def largest_keys(keys, K, BLOCK_TOP: tl.constexpr):
    """Return the K largest of keys [N], largest first, as [BLOCK_TOP]; K <= BLOCK_TOP."""
    rank, top = tl.arange(0, BLOCK_TOP), tl.full((BLOCK_TOP,), MIN_KEY, tl.int64)
    for i in range(K):
        best = tl.max(keys, 0)
        top = tl.where(rank == i, best, top)
        keys = tl.where(keys == best, MIN_KEY, keys)
    return top


@triton.jit
def top_k_kernel(
    logits, noise, scores, ids, chunk_keys, chunk_sums, arrived, V, K, ROWS, NOISE_ROWS,
    BLOCK_TOP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank one chunk of one row of logits [B, ROWS, V], plus noise [B, NOISE_ROWS, V], if any.

    chunk_keys [rows, CHUNKS, BLOCK_TOP], chunk_sums [rows, CHUNKS, 2]: scratch. BLOCK_CHUNKS: CHUNKS rounded
    up to a power of two. arrived: zeros, and zeros again afterwards.
    """
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    at, rank = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, BLOCK_TOP)
    x = tl.load(logits + row.to(tl.int64) * V + at, mask=at < V, other=float("-inf")).to(tl.float32)
    if noise is not None:
        noise_row = (row // ROWS) * NOISE_ROWS + tl.minimum(row % ROWS, NOISE_ROWS - 1)
        x += tl.load(noise + noise_row.to(tl.int64) * V + at, mask=at < V, other=0.0)
    top = largest_keys(tl.where(at < V, pack_key(x, at), MIN_KEY), K, BLOCK_TOP)
    tl.store(chunk_keys + (row * CHUNKS + chunk) * BLOCK_TOP + rank, top)
    peak = tl.maximum(tl.max(x, 0), -1e30)  # finite, even if all are -inf
    tl.store(chunk_sums + (row * CHUNKS + chunk) * 2, peak)
    tl.store(chunk_sums + (row * CHUNKS + chunk) * 2 + 1, tl.sum(tl.exp(x - peak), 0))
    tl.debug_barrier()  # all threads have stored before the program arrives
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == CHUNKS - 1:
        tl.store(arrived + row, 0)
        # .cg bypasses L1, which may hold stale data.
        i, chunks = tl.arange(0, BLOCK_CHUNKS * BLOCK_TOP), tl.arange(0, BLOCK_CHUNKS)
        keys = chunk_keys + row * CHUNKS * BLOCK_TOP + i
        keys = tl.load(keys, mask=i < CHUNKS * BLOCK_TOP, other=MIN_KEY, cache_modifier=".cg")
        top = largest_keys(keys, K, BLOCK_TOP)
        sums = chunk_sums + (row * CHUNKS + chunks) * 2
        peaks = tl.load(sums, mask=chunks < CHUNKS, other=-1e30, cache_modifier=".cg")
        totals = tl.load(sums + 1, mask=chunks < CHUNKS, other=0.0, cache_modifier=".cg")
        peak = tl.max(peaks, 0)
        log_total = peak + tl.log(tl.sum(totals * tl.exp(peaks - peak), 0))
        value, index = ordered_to_float((top >> 32).to(tl.int32)), 0x7FFFFFFF - (top & 0x7FFFFFFF)
        tl.store(scores + row * K + rank, value - log_total, mask=rank < K)
        tl.store(ids + row * K + rank, index, mask=rank < K)


@torch.library.custom_op("eagle_gpu::top_k", mutates_args=())
def top_k(logits: Tensor, noise: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids [B, R, k] of the top k of logits [B, R, V] + noise [B, R or 1, V]."""
    B, R, V = logits.shape
    chunk, block_top = min(RANKED_CHUNK, triton.next_power_of_2(V)), triton.next_power_of_2(k)
    chunks = triton.cdiv(V, chunk)
    scores, ids = _top_k_outputs(logits, noise, k)
    chunk_keys = ids.new_empty(B * R * chunks * block_top)
    chunk_sums = scores.new_empty(B * R * chunks * 2)
    top_k_kernel[(B * R, chunks)](
        logits.contiguous(), None if noise is None else noise.contiguous(), scores, ids, chunk_keys,
        chunk_sums, arrival_counters(logits.device, B * R), V, k, R, 1 if noise is None else noise.shape[1],
        BLOCK_TOP=block_top, CHUNK=chunk, CHUNKS=chunks, BLOCK_CHUNKS=triton.next_power_of_2(chunks),
        num_warps=4, **launch_options(logits.device),
    )
    return scores, ids


@top_k.register_fake
def _top_k_outputs(logits, noise, k):
    shape = (*logits.shape[:2], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


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
    chunk = min(SORTED_CHUNK, triton.next_power_of_2(V))
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
