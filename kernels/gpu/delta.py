"""Gated DeltaNet over trees (`families.hybrid`), token by token along each path.

A program holds a column block of one head's state in registers. It reads the tokens since the state's
boundary, then each tree node after its ancestors. A node costs as many tokens as its path has, but its result
depends on its path only, not on how the path was committed.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from families.hybrid import BLOCK, MAX_LEVELS, DeltaBlock, DeltaCache, Paths
from kernels.gpu.fallback import with_fallback
from kernels.gpu.launch import launch_options, wait_for_previous

COLUMNS = 32  # of a state, for one program
CHANNELS = 256  # of a convolution, for one program
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
def load_state(state, b, h, start, d, e, NV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    """Return where the state of a head is, which of it exists, and the state; it is zero at boundary 0."""
    at = state + ((b * NV + h).to(tl.int64) * DK + d)[:, None] * DV + e[None]
    mask = (d < DK)[:, None] & (e < DV)[None]
    return at, mask, tl.where(start > 0, tl.load(at, mask=mask, other=0.0), 0.0)


@triton.jit
def delta_kernel(
    mixed, rates, length, start, state, local, out, T, NODES, RING, scale, NK: tl.constexpr, NV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, ADVANCE: tl.constexpr, PDL: tl.constexpr,
):
    """ADVANCE: advance states [B, NV, DK, DV] from `start` [B] to the boundary of tokens after `length` [B].

    Then: compute the outputs [B, T, NV, DV] of NODES of T tokens in slots length [B] ... The boundary (see
    `families.hybrid.boundary_of`) goes to `start`. local [B, T, T]: the path of each token.
    """
    wait_for_previous(PDL)
    b, h = tl.program_id(1) // NV, tl.program_id(1) % NV
    d, e = tl.arange(0, BLOCK_K), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.load(length + b).to(tl.int32)
    boundary = tl.maximum(length - LEVELS, 0) // BLOCK * BLOCK
    if ADVANCE:
        first = tl.load(start + b).to(tl.int32)
        if first < boundary:
            at, mask, x = load_state(state, b, h, first, d, e, NV, DK, DV)
            for slot in range(first, boundary):
                x = read_token(x, slot, b, h, d, e, mixed, rates, RING, NK, NV, DK, DV)
            tl.store(at, x, mask=mask)
    else:
        if h + tl.program_id(0) + tl.program_id(2) == 0:  # never back: a free slot's state may be ahead
            known = tl.where(length > 0, tl.load(start + b), 0)
            tl.store(start + b, tl.maximum(known, boundary.to(tl.int64)))
        _, _, root = load_state(state, b, h, boundary, d, e, NV, DK, DV)
        for slot in range(boundary, length):
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


@triton.jit
def write_kernel(
    projected, taps, log_decay, step_bias, tap_slots, length, inputs, mixed, rates, T, RING, WIDTH, VALUES,
    NV: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Write BLOCK channels of a token, or its rates, to the ring buffers, see `DeltaCache.write`."""
    wait_for_previous(PDL)
    token, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b, stride = token // T, WIDTH + VALUES + 2 * NV
    length = tl.load(length + b).to(tl.int32)
    row = (b * RING + (length + token % T) % RING).to(tl.int64)
    own = projected + token.to(tl.int64) * stride
    if tl.program_id(1) < tl.num_programs(1) - 1:
        mask = c < WIDTH
        total = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(TAPS):
            slot = tl.load(tap_slots + token * TAPS + i).to(tl.int32)
            if slot >= length:  # of this pass
                at = (b * T + slot - length).to(tl.int64) * stride
                x = tl.load(projected + at + c, mask=mask, other=0.0)
            else:
                at = (b * RING + tl.maximum(slot, 0) % RING).to(tl.int64) * WIDTH
                x = tl.where(slot >= 0, tl.load(inputs + at + c, mask=mask, other=0.0), 0.0)
            total += x.to(tl.float32) * tl.load(taps + c * TAPS + i, mask=mask, other=0.0).to(tl.float32)
        tl.store(inputs + row * WIDTH + c, tl.load(own + c, mask=mask, other=0.0), mask=mask)
        y = total.to(mixed.dtype.element_ty).to(tl.float32)
        tl.store(mixed + row * WIDTH + c, (y / (1 + tl.exp(-y))).to(mixed.dtype.element_ty), mask=mask)
    else:
        h = tl.arange(0, BLOCK)
        mask, given = h < NV, own + WIDTH + VALUES + h
        step = tl.load(given, mask=mask, other=0.0).to(tl.float32)
        decay = tl.load(given + NV, mask=mask, other=0.0).to(tl.float32)
        decay += tl.load(step_bias + h, mask=mask, other=0.0).to(tl.float32)
        g = tl.exp(tl.load(log_decay + h, mask=mask, other=0.0).to(tl.float32))
        g *= tl.where(decay > 20, decay, tl.log(1 + tl.exp(decay)))  # softplus, as PyTorch has it
        size = (1 / (1 + tl.exp(-step))).to(projected.dtype.element_ty).to(tl.float32)
        tl.store(rates + row * 2 * NV + h, -g, mask=mask)
        tl.store(rates + row * 2 * NV + NV + h, size, mask=mask)


@torch.library.custom_op("eagle_gpu::write_delta", mutates_args=("inputs", "mixed", "rates"))
def write(
    projected: Tensor, taps: Tensor, log_decay: Tensor, step_bias: Tensor, tap_slots: Tensor, length: Tensor,
    inputs: Tensor, mixed: Tensor, rates: Tensor,
) -> None:
    """`DeltaCache.write`, of `Paths.tap_slots` and `length`."""
    (B, T, count), (_, ring, width), nv = projected.shape, mixed.shape, len(log_decay)
    block = max(CHANNELS, triton.next_power_of_2(nv))
    write_kernel[B * T, triton.cdiv(width, block) + 1](
        projected.contiguous(), taps, log_decay, step_bias, tap_slots.contiguous(), length.contiguous(),
        inputs, mixed, rates, T, ring, width, count - width - 2 * nv, NV=nv, TAPS=taps.shape[1], BLOCK=block,
        **launch_options(projected.device),
    )


@torch.library.custom_op("eagle_gpu::delta", mutates_args=("state", "start"))
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
    given = mixed, rates, length.contiguous(), start, state, local.contiguous(), out, T, nodes, ring
    for advance, blocks in (True, 1), (False, triton.cdiv(T, nodes)):
        delta_kernel[parts, B * nv, blocks](*given, dk**-0.5, ADVANCE=advance, **shape)
    return out


@delta.register_fake
def _(mixed, rates, length, local, state, start):
    return mixed.new_empty(len(mixed), local.shape[1], *state.shape[1::2], dtype=torch.float32)


@with_fallback("delta", DeltaCache.outputs)
def outputs(cache: DeltaCache, block: DeltaBlock, projected: Tensor, paths: Paths) -> Tensor:
    """`DeltaCache.outputs` in three kernels."""
    weights = block.taps, block.log_decay, block.step_bias
    write(projected, *weights, paths.tap_slots, paths.length, cache.inputs, cache.mixed, cache.rates)
    return delta(cache.mixed, cache.rates, paths.length, paths.local, cache.state, cache.start)
