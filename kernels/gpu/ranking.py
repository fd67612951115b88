"""Two-stage top-k with log-probabilities, in one kernel: how a draft head ranks the children of a node.

A row is divided into chunks, one program each. Each program leaves the top k of its chunk and the sum of its
exponentials in scratch memory; the last to arrive merges them. Equal logits come in the order of their ids.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import begin, counters, options

MAX_CHUNK = 2048  # logits of a program
NONE = tl.constexpr(-(2**63))  # below every key


@triton.jit
def ordered(x):
    """Integers that are ordered as the float32 numbers x are."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(order):
    """The float32 numbers of `ordered` integers."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(x, place):
    """A key [...] int64 that orders float32 numbers by value, equal ones by place, the first the largest."""
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def place_of(key):
    """The place in a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of(key):
    """The number in a key."""
    return number_of((key >> 32).to(tl.int32))


@triton.jit
def largest(keys, K, BEST: tl.constexpr):
    """The K largest of keys [N], largest first, as [BEST]; K <= BEST."""
    place, found = tl.arange(0, BEST), tl.full((BEST,), NONE, tl.int64)
    for i in range(K):
        best = tl.max(keys, 0)
        found = tl.where(place == i, best, found)
        keys = tl.where(keys == best, NONE, keys)
    return found


@triton.jit
def top_k_kernel(
    logits, noise, scores, ids, found, sums, arrived, V, K, ROWS, NOISE_ROWS, BEST: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, NOISY: tl.constexpr, EARLY: tl.constexpr,
):
    """One chunk of one row of logits [B, ROWS, V], plus noise [B, NOISE_ROWS, V] if NOISY.

    found [rows, CHUNKS, BEST], sums [rows, CHUNKS, 2]: scratch. WIDE: CHUNKS rounded up to a power of two.
    """
    begin(EARLY)
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    x = tl.load(logits + row.to(tl.int64) * V + at, mask=inside, other=float("-inf")).to(tl.float32)
    if NOISY:
        noise_row = (row // ROWS) * NOISE_ROWS + tl.minimum(row % ROWS, NOISE_ROWS - 1)
        x += tl.load(noise + noise_row.to(tl.int64) * V + at, mask=inside, other=0.0)
    slot = tl.arange(0, BEST)
    keys = tl.where(inside, key_of(x, at), NONE)
    tl.store(found + (row * CHUNKS + chunk) * BEST + slot, largest(keys, K, BEST))
    peak = tl.maximum(tl.max(x, 0), -1e30)  # finite, though all may be -inf
    tl.store(sums + (row * CHUNKS + chunk) * 2, peak)
    tl.store(sums + (row * CHUNKS + chunk) * 2 + 1, tl.sum(tl.exp(x - peak), 0))
    tl.debug_barrier()  # the whole program has stored before it arrives
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == CHUNKS - 1:
        tl.store(arrived + row, 0)
        # Loads pass the first cache, which may hold what was there before.
        slots, each = tl.arange(0, WIDE * BEST), tl.arange(0, WIDE)
        candidates = found + row * CHUNKS * BEST + slots
        best = largest(
            tl.load(candidates, mask=slots < CHUNKS * BEST, other=NONE, cache_modifier=".cg"), K, BEST
        )
        of_chunk, known = sums + (row * CHUNKS + each) * 2, each < CHUNKS
        peaks = tl.load(of_chunk, mask=known, other=-1e30, cache_modifier=".cg")
        totals = tl.load(of_chunk + 1, mask=known, other=0.0, cache_modifier=".cg")
        peak = tl.max(peaks, 0)
        log_total = peak + tl.log(tl.sum(totals * tl.exp(peaks - peak), 0))
        tl.store(scores + row * K + slot, value_of(best) - log_total, mask=slot < K)
        tl.store(ids + row * K + slot, place_of(best).to(tl.int64), mask=slot < K)


@torch.library.custom_op("eagle_gpu::top_k", mutates_args=())
def top_k(logits: Tensor, noise: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids [B, R, k] of the k largest of logits [B, R, V] + noise [B, R or 1, V].
    """
    B, R, V = logits.shape
    chunk, best = min(MAX_CHUNK, triton.next_power_of_2(V)), triton.next_power_of_2(k)
    chunks = triton.cdiv(V, chunk)
    scores, ids = _outputs(logits, noise, k)
    found = ids.new_empty(B * R * chunks * best)
    sums = scores.new_empty(B * R * chunks * 2)
    top_k_kernel[(B * R, chunks)](
        logits.contiguous(), logits if noise is None else noise.contiguous(), scores, ids, found, sums,
        counters(logits.device, B * R), V, k, R, 1 if noise is None else noise.shape[1], BEST=best,
        CHUNK=chunk, CHUNKS=chunks, WIDE=triton.next_power_of_2(chunks), NOISY=noise is not None, num_warps=4,
        **options(logits.device),
    )
    return scores, ids


@top_k.register_fake
def _outputs(logits, noise, k):
    shape = (*logits.shape[:2], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)
