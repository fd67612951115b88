"""The largest of many logits in one kernel: what a drafter ranks its children by, and what the target draws.

A row is divided among programs. Each leaves its best ids and its share of the sum of exponentials in scratch
memory; the last to arrive chooses among those. Equal logits come in the order of their ids.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import begin, counters, options

CHUNK = 2048  # logits of a program, at most
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
def best_kernel(
    logits, noise, which, names, scores, ids, found, sums, arrived, V, K, ROWS, NOISE_ROWS,
    BEST: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, NOISY: tl.constexpr, CHOSEN: tl.constexpr,
    NAMED: tl.constexpr, SCORED: tl.constexpr, EARLY: tl.constexpr,
):
    """One chunk of one row of logits [B, ROWS, V].

    noise [B, NOISE_ROWS, V], if NOISY: which of its rows is a row's says which [B, ROWS], if CHOSEN, else
    the row's own number, or the only one. found, sums: scratch of each chunk.
    """
    begin(EARLY)
    row, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    x = tl.load(logits + row.to(tl.int64) * V + at, mask=inside, other=float("-inf")).to(tl.float32)
    if NOISY:
        mine = row % ROWS
        if CHOSEN:
            mine = tl.load(which + row).to(tl.int32)
        mine = tl.minimum(mine, NOISE_ROWS - 1)
        shift = noise + ((row // ROWS) * NOISE_ROWS + mine).to(tl.int64) * V
        x += tl.load(shift + at, mask=inside, other=0.0)
    slot = tl.arange(0, BEST)
    keys = tl.where(inside, key_of(x, at), NONE)
    tl.store(found + (row * CHUNKS + chunk) * BEST + slot, largest(keys, K, BEST))
    if SCORED:
        most = tl.maximum(tl.max(x, 0), -1e30)  # finite, though all may be -inf
        tl.store(sums + (row * CHUNKS + chunk) * 2, most)
        tl.store(sums + (row * CHUNKS + chunk) * 2 + 1, tl.sum(tl.exp(x - most), 0))
    tl.debug_barrier()  # the whole program has stored before it arrives
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == CHUNKS - 1:
        tl.store(arrived + row, 0)
        # [CHUNKS rounded up, BEST] in one row.
        all_of = tl.arange(0, triton.next_power_of_2(CHUNKS) * BEST)
        there = all_of < CHUNKS * BEST
        candidates = tl.load(
            found + row * CHUNKS * BEST + all_of, mask=there, other=NONE, cache_modifier=".cg"
        )
        best = largest(candidates, K, BEST)
        place = place_of(best)
        if SCORED:
            each = tl.arange(0, triton.next_power_of_2(CHUNKS))
            known = each < CHUNKS
            of_chunk = sums + (row * CHUNKS + each) * 2
            tops = tl.load(of_chunk, mask=known, other=-1e30, cache_modifier=".cg")
            shares = tl.load(of_chunk + 1, mask=known, other=0.0, cache_modifier=".cg")
            top = tl.max(tops, 0)
            total = top + tl.log(tl.sum(shares * tl.exp(tops - top), 0))
            tl.store(scores + row * K + slot, value_of(best) - total, mask=slot < K)
        if NAMED:
            tl.store(ids + row * K + slot, tl.load(names + place, mask=slot < K, other=0), mask=slot < K)
        else:
            tl.store(ids + row * K + slot, place.to(tl.int64), mask=slot < K)


def _best(
    logits: Tensor, noise: Tensor | None, which: Tensor | None, k: int, names: Tensor | None, scored: bool
) -> tuple[Tensor, Tensor]:
    *rows, V = logits.shape
    B, R = rows
    chunk, best = min(CHUNK, triton.next_power_of_2(V)), triton.next_power_of_2(k)
    chunks = triton.cdiv(V, chunk)
    ids = torch.empty(B, R, k, dtype=torch.int64, device=logits.device)
    scores = torch.empty(B, R, k if scored else 0, dtype=torch.float32, device=logits.device)
    found = torch.empty(B * R * chunks * best, dtype=torch.int64, device=logits.device)
    sums = torch.empty(B * R * chunks * 2 if scored else 1, dtype=torch.float32, device=logits.device)
    best_kernel[(B * R, chunks)](
        logits.contiguous(), logits if noise is None else noise.contiguous(),
        ids if which is None else which.contiguous(), ids if names is None else names, scores, ids, found,
        sums, counters(logits.device, B * R), V, k, R, 1 if noise is None else noise.shape[1], BEST=best,
        CHUNK=chunk, CHUNKS=chunks, NOISY=noise is not None, CHOSEN=which is not None,
        NAMED=names is not None, SCORED=scored, num_warps=4,
        **options(logits.device),
    )
    return scores, ids


@torch.library.custom_op("eagle_gpu::rank", mutates_args=())
def rank(logits: Tensor, noise: Tensor | None, k: int, names: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rank, as `TorchBackend.rank`."""
    return _best(logits, noise, None, k, names, True)


@rank.register_fake
def _(logits, noise, k, names):
    shape = (*logits.shape[:2], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("eagle_gpu::draw", mutates_args=())
def draw(logits: Tensor, noise: Tensor | None, depth: Tensor | None) -> Tensor:
    """Draw, as `TorchBackend.largest`."""
    if noise is not None and depth is None:
        noise = noise[:, :1]
    return _best(logits, noise, depth, 1, None, False)[1][..., 0].contiguous()


@draw.register_fake
def _(logits, noise, depth):
    return logits.new_empty(logits.shape[:2], dtype=torch.int64)
