"""Gated delta nets over trees (`families.hybrid`), token by token along each path.

A program holds a column block of one head's state in registers. It reads the tokens since the state's
boundary, then each tree node after its ancestors. A node costs as many tokens as its path has, but its result
depends on its path only, not on how the path was committed.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from families.hybrid import BLOCK, MAX_LEVELS, DeltaBlock, DeltaCache, Paths, boundary_of
from kernels.gpu.fallback import with_fallback
from kernels.gpu.launch import launch_options, wait_for_previous

COLUMNS = 32  # of a state, for one program
NODES = 4  # of a tree, for one program; a chain of CHAIN tokens or more, such as a prompt, has one
CHAIN = 64


@triton.jit
def load_unit(row, d, DK: tl.constexpr):
    """Load a query or key [BLOCK_K] and divide it by its norm."""
    x = tl.load(row + d, mask=d < DK, other=0.0).to(tl.float32)
    return x / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def read_token(
    state, slot, b, h, d, e, mixed, rates, RING, NK: tl.constexpr, NV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr,
):
    """Return a state [BLOCK_K, COLUMNS] after the token in `slot` of the ring buffers."""
    row = (b * RING + slot % RING).to(tl.int64)
    mixed, rates = mixed + row * (2 * NK * DK + NV * DV), rates + row * 2 * NV + h
    k = load_unit(mixed + (NK + h // (NV // NK)) * DK, d, DK)
    v = tl.load(mixed + 2 * NK * DK + h * DV + e, mask=e < DV, other=0.0).to(tl.float32)
    state = state * tl.exp(tl.load(rates))
    change = tl.load(rates + NV) * (v - tl.sum(state * k[:, None], 0))
    return state + k[:, None] * change[None]


@triton.jit
def boundaries(length, start, b, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """Return the length of a sequence, the boundary of its state, and that of tokens after `length`."""
    length, start = tl.load(length + b).to(tl.int32), tl.load(start + b).to(tl.int32)
    return length, tl.where(length > 0, start, 0), tl.maximum(length - LEVELS, 0) // BLOCK * BLOCK


@triton.jit
def load_state(state, b, h, start, d, e, NV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    """Return where the state of a head is, which of it exists, and the state; it is zero at boundary 0."""
    at = state + ((b * NV + h).to(tl.int64) * DK + d)[:, None] * DV + e[None]
    mask = (d < DK)[:, None] & (e < DV)[None]
    return at, mask, tl.where(start > 0, tl.load(at, mask=mask, other=0.0), 0.0)


@triton.jit
def advance_kernel(
    mixed, rates, length, start, state, RING, NK: tl.constexpr, NV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Advance states [B, NV, DK, DV] from `start` [B] to the boundary of tokens after `length` [B]."""
    wait_for_previous(PDL)
    b, h = tl.program_id(1) // NV, tl.program_id(1) % NV
    d, e = tl.arange(0, BLOCK_K), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    _, first, boundary = boundaries(length, start, b, BLOCK, LEVELS)
    if first < boundary:
        at, mask, x = load_state(state, b, h, first, d, e, NV, DK, DV)
        for slot in range(first, boundary):
            x = read_token(x, slot, b, h, d, e, mixed, rates, RING, NK, NV, DK, DV)
        tl.store(at, x, mask=mask)


@triton.jit
def delta_kernel(
    mixed, rates, length, start, state, local, out, T, NODES, RING, scale, NK: tl.constexpr, NV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, PDL: tl.constexpr,
):
    """Compute the outputs [B, T, NV, DV] of NODES of T tokens in slots length [B] ...

    state: at the boundary of `length`, see `advance_kernel`. local [B, T, T]: the path of each token.
    """
    wait_for_previous(PDL)
    b, h = tl.program_id(1) // NV, tl.program_id(1) % NV
    d, e = tl.arange(0, BLOCK_K), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    length, first, boundary = boundaries(length, start, b, BLOCK, LEVELS)
    first = tl.maximum(first, boundary)
    _, _, root = load_state(state, b, h, first, d, e, NV, DK, DV)
    for slot in range(first, length):
        root = read_token(root, slot, b, h, d, e, mixed, rates, RING, NK, NV, DK, DV)
    begin = tl.program_id(2) * NODES
    x = root
    for i in range(begin, tl.minimum(begin + NODES, T)):
        path = local + (b * T + i).to(tl.int64) * T
        known = i > begin
        if known:  # nodes are in order of depth: an ancestor next to its descendant is its parent
            known = tl.load(path + i - 1) != 0
        if not known:
            x = root
            for j in range(i):
                if tl.load(path + j) != 0:
                    x = read_token(x, length + j, b, h, d, e, mixed, rates, RING, NK, NV, DK, DV)
        x = read_token(x, length + i, b, h, d, e, mixed, rates, RING, NK, NV, DK, DV)
        row = (b * RING + (length + i) % RING).to(tl.int64) * (2 * NK * DK + NV * DV)
        q = load_unit(mixed + row + h // (NV // NK) * DK, d, DK) * scale
        to = out + ((b * T + i).to(tl.int64) * NV + h) * DV + e
        tl.store(to, tl.sum(x * q[:, None], 0), mask=e < DV)


@torch.library.custom_op("eagle_gpu::delta", mutates_args=("state",))
def delta(
    mixed: Tensor, rates: Tensor, length: Tensor, local: Tensor, state: Tensor, start: Tensor
) -> Tensor:
    """Advance states [B, nv, dk, dv] from start [B] to the boundary of tokens after length [B].

    Returns the outputs [B, T, nv, dv] of tokens in slots length ... with paths local [B, T, T]. mixed, rates:
    ring buffers of a `DeltaCache`.
    """
    (B, ring, width), (_, nv, dk, dv), T = mixed.shape, state.shape, local.shape[1]
    nodes, parts = T if T >= CHAIN else NODES, triton.cdiv(dv, COLUMNS)
    out = mixed.new_empty(B, T, nv, dv, dtype=torch.float32)
    shape = {
        "NK": (width - nv * dv) // (2 * dk), "NV": nv, "DK": dk, "DV": dv, "COLUMNS": COLUMNS,
        "BLOCK_K": max(16, triton.next_power_of_2(dk)), "BLOCK": BLOCK, "LEVELS": MAX_LEVELS,
        **launch_options(mixed.device),
    }
    given = mixed, rates, length.contiguous(), start, state
    advance_kernel[parts, B * nv](*given, ring, **shape)
    grid = parts, B * nv, triton.cdiv(T, nodes)
    delta_kernel[grid](*given, local.contiguous(), out, T, nodes, ring, dk**-0.5, **shape)
    return out


@delta.register_fake
def _(mixed, rates, length, local, state, start):
    return mixed.new_empty(len(mixed), local.shape[1], *state.shape[1::2], dtype=torch.float32)


@with_fallback("delta", DeltaCache.outputs)
def outputs(cache: DeltaCache, block: DeltaBlock, paths: Paths) -> Tensor:
    """`DeltaCache.outputs` in two kernels."""
    out = delta(cache.mixed, cache.rates, paths.length, paths.local, cache.state, cache.start)
    cache.start.copy_(torch.where(paths.length > 0, cache.start, 0).maximum(boundary_of(paths.length)))
    return out
