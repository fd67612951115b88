"""Mixtures of experts: one kernel per product multiplies all tokens of a pass by the experts they chose.

A token has one *assignment* per expert that it chose. `sort_kernel` sorts assignments by expert; a program of
`grouped_kernel` computes BLOCK_N outputs of one expert for a tile of its assignments. In passes of up to
MAX_BLOCK_M tokens (STORED_BLOCK_M with weights as stored), one tile holds all assignments of an expert, so
its weights are read once. In larger passes, tiles of one expert run at the same time and find the weights in
L2.

The grid depends on the number of tokens only, so one graph serves every routing: programs without assignments
end at once. No two programs add to the same sum, so results do not depend on the routing of other tokens.
"""
from __future__ import annotations

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch import Tensor

from families.experts import Experts
from kernels.gpu.fallback import with_fallback
from kernels.gpu.launch import launch_options, wait_for_previous
from kernels.gpu.products import add_floats, add_minima, kernel_operands, reorder, sum_quantized
from kernels.scheme import QuantizedStack

MAX_BLOCK_M, STORED_BLOCK_M = 128, 32  # the latter of kinds of `kernels.stored`: they take two tiles of sums
SORT_CHUNK = 1024  # assignments that are sorted at a time


@triton.jit
def sort_kernel(
    chosen, order, tiles, S, ONE_TILE: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort assignments by expert: program e writes those of expert e.

    chosen [S]: the expert of each assignment. order [S]: assignments, sorted. tiles [T, 3], zeros beforehand:
    the expert, the tile's first index in `order`, the end of the expert's indices. ONE_TILE: the number of a
    tile is its first index; else it counts experts and tiles.
    """
    wait_for_previous(PDL)
    expert, i = tl.program_id(0), tl.arange(0, CHUNK)
    start = 0
    for at in range(0, S, CHUNK):
        experts = tl.load(chosen + at + i, mask=at + i < S, other=1 << 30)
        start += tl.sum((experts < expert).to(tl.int32))
    end = start
    for at in range(0, S, CHUNK):
        mine = tl.load(chosen + at + i, mask=at + i < S, other=-1) == expert
        index = end + tl.cumsum(mine.to(tl.int32)) - 1
        tl.store(order + index, at + i, mask=mine)
        end += tl.sum(mine.to(tl.int32))
    for first in range(start, end, BLOCK_M):
        tile = tiles + 3 * (first if ONE_TILE else expert + first // BLOCK_M)
        tl.store(tile, expert)
        tl.store(tile + 1, first)
        tl.store(tile + 2, end)


@triton.jit
def grouped_kernel(
    x, weight, scale, bias, totals, shifts, order, tiles, out, N, K, STRIDE, SHARING, BITS: tl.constexpr,
    FLOATS: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """Compute out [S, N] = x [S / SHARING, K] of each assignment @ its expert's weight^T + bias [E, N].

    weight [E, STRIDE], scale [E, 1 or K/GROUP, N]: of each expert as for `product_kernel`, or with 16 BITS
    weights [N, K] in the dtype of x. totals [.., K/GROUP], shifts [E, N, K/GROUP]: of weights with minima,
    the sums of groups of inputs and their factors. order, tiles: see `sort_kernel`.
    """
    wait_for_previous(PDL)
    tile = tiles + 3 * tl.program_id(0)
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    if first < end:
        expert, index = tl.load(tile).to(tl.int64), first + tl.arange(0, BLOCK_M)
        valid = index < end
        assignment = tl.load(order + index, mask=valid, other=0)
        token, weight = (assignment // SHARING).to(tl.int64), weight + expert * STRIDE
        rows = x + token * K
        part = tl.program_id(1)
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = tl.minimum(column, N - 1).to(tl.int64)
        if BITS == 16:
            steps = tl.cdiv(K, BLOCK_K)
            sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            sums = add_floats(sums, rows, valid, weight + exists * K, 0, steps, K, EVEN_K, PRECISION, BLOCK_K)
        else:
            sums = sum_quantized(
                rows, valid, weight, scale + expert * N * (K // GROUP if GROUP else 1), part, 0,
                tl.cdiv(K, BLOCK_K), N, K, BITS, FLOATS, GROUP, EVEN_K, PRECISION, BLOCK_N, BLOCK_K,
            )
        if shifts is not None:
            groups = K // GROUP
            of_rows, factors = totals + token * groups, shifts + (expert * N + exists) * groups
            sums = add_minima(sums, of_rows, valid, factors, groups, PRECISION)
        if bias is not None:
            sums += tl.load(bias + expert * N + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
        to = out + assignment.to(tl.int64)[:, None] * N + column[None]
        tl.store(to, tl.trans(sums).to(out.dtype.element_ty), mask=valid[:, None] & (column < N)[None])


def tile_config(tokens: int, dtype: torch.dtype) -> triton.Config:
    """Return the tile for passes of this many tokens. It fits GPUs with 99 KB of shared memory."""
    if dtype == torch.float32:  # for tests: products without tensor cores fill registers
        return triton.Config({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}, num_warps=4, num_stages=1)
    m = min(max(16, triton.next_power_of_2(tokens)), MAX_BLOCK_M)
    tile = {"BLOCK_M": m, "BLOCK_N": 64, "BLOCK_K": 128 if m == 16 else 64}
    return triton.Config(tile, num_warps=4, num_stages=4)


@torch.library.custom_op("eagle_gpu::sort_assignments", mutates_args=())
def sort_assignments(chosen: Tensor, experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Sort the experts chosen [R, A] by R tokens -> `order` and `tiles` of `sort_kernel`."""
    S = chosen.numel()
    order, tiles = _order_and_tiles(chosen, experts, block_m)
    sort_kernel[(experts,)](
        chosen.contiguous(), order, tiles.zero_(), S, ONE_TILE=len(tiles) == S, BLOCK_M=block_m,
        CHUNK=min(SORT_CHUNK, triton.next_power_of_2(S)), **launch_options(chosen.device),
    )
    return order, tiles


@sort_assignments.register_fake
def _order_and_tiles(chosen, experts, block_m):
    S = chosen.numel()
    tiles = chosen.new_empty(min(S, experts + S // block_m), 3, dtype=torch.int32)
    return chosen.new_empty(S, dtype=torch.int32), tiles


@torch.library.custom_op("eagle_gpu::grouped_product", mutates_args=())
def grouped_product(
    x: Tensor, weight: Tensor, scale: Tensor | None, shifts: Tensor | None, outputs: int, bits: int,
    floats: bool, group: int, bias: Tensor | None, order: Tensor, tiles: Tensor, tokens: int,
) -> Tensor:
    """Multiply the x of each assignment by its expert's matrix -> [S, N], N = outputs.

    x [S, K], or [R, K] if the assignments of a token share it. weight, scale, shifts: see `grouped_kernel`; a
    weight of 16 bits is [E, N, K] in x's dtype. tokens: of the pass.
    """
    N, K, tile = outputs, x.shape[-1], tile_config(tokens, x.dtype).all_kwargs()
    out, totals = x.new_empty(len(order), N), None
    if shifts is not None:
        totals = x.float().unflatten(-1, (-1, group)).sum(-1)
    grouped_kernel[len(tiles), triton.cdiv(N, tile["BLOCK_N"])](
        x.contiguous(), weight, scale, bias, totals, shifts, order, tiles, out, N, K, weight[0].numel(),
        len(order) // len(x), BITS=bits, FLOATS=floats, GROUP=group, EVEN_K=K % tile["BLOCK_K"] == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile, **launch_options(x.device),
    )
    return out


@grouped_product.register_fake
def _(x, weight, scale, shifts, outputs, bits, floats, group, bias, order, tiles, tokens):
    return x.new_empty(len(order), outputs)


@with_fallback("experts", Experts.mix)
def fused_mix(experts: Experts, rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """`Experts.mix` with one kernel per product."""
    stored = any(getattr(stack, "kind", None) for stack in (experts.w_gate_up, experts.w_down))
    R = min(len(rows), STORED_BLOCK_M if stored else MAX_BLOCK_M)
    block_m = tile_config(R, rows.dtype).kwargs["BLOCK_M"]
    order, tiles = sort_assignments(chosen, experts.router.out_features, block_m)

    def product(x: Tensor, stack: nn.Module | Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(stack, Tensor):
            return grouped_product(x, stack, None, None, stack.shape[1], 16, False, 0, bias, order, tiles, R)
        return grouped_product(stack.round_inputs(x), *kernel_operands(stack), bias, order, tiles, R)

    both = product(rows, experts.w_gate_up, experts.gate_up_bias)
    out = product(experts.gate(*both.chunk(2, dim=-1)), experts.w_down, experts.down_bias)
    return (out.unflatten(0, (len(rows), -1)) * weight[..., None]).sum(1)


def fuse(module: nn.Module) -> None:
    """Let a mixture of experts compute in these kernels, unless it is fp8."""
    stacks = (module.w_gate_up, module.w_down) if isinstance(module, Experts) and not module.fused else ()
    if stacks and not any(getattr(x, "mode", None) == "fp8" for x in stacks):
        module.fused = fused_mix
        for stack in stacks:
            if isinstance(stack, QuantizedStack):
                reorder(stack)
