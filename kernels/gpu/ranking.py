"""Two-stage top-k with log-probabilities in one kernel, for the children of draft nodes.

A row of logits is divided into chunks, one program each. Each program writes the top k of its chunk and its
sum of exponentials to scratch memory; the last one to arrive merges them. Equal logits are ordered by id.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import arrival_counters, launch_options, wait_for_previous

MAX_CHUNK = 2048  # logits of a program
MIN_KEY = tl.constexpr(-(2**63))


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
    chunk, block_top = min(MAX_CHUNK, triton.next_power_of_2(V)), triton.next_power_of_2(k)
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
