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
from kernels.gpu.products import kernel_operands, linear, reorder
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


def block_m(tokens: int, dtype: torch.dtype, stored: bool) -> int:
    """Return how many assignments a tile has in a pass of this many tokens. stored: weights as stored."""
    largest = 16 if dtype == torch.float32 else STORED_BLOCK_M if stored else MAX_BLOCK_M
    return min(max(16, triton.next_power_of_2(tokens)), largest)


@with_fallback("experts", Experts.mix)
def fused_mix(experts: Experts, rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """`Experts.mix` with one kernel per product."""
    stacks = experts.w_gate_up, experts.w_down
    block = block_m(len(rows), rows.dtype, any(getattr(stack, "kind", None) for stack in stacks))
    order, tiles = sort_assignments(chosen, experts.router.out_features, block)

    def product(x: Tensor, stack: nn.Module | Tensor, bias: Tensor | None) -> Tensor:
        given = (x, stack, None, None, None, stack.shape[1], 16, False, 0) if isinstance(stack, Tensor) else (
            kernel_operands(stack, x))
        return linear(*given, bias, order=order, tiles=tiles, block=block)[0]

    both = product(rows, stacks[0], experts.gate_up_bias)
    out = product(experts.gate(*both.chunk(2, dim=-1)), stacks[1], experts.down_bias)
    return (out.unflatten(0, (len(rows), -1)) * weight[..., None]).sum(1)


def fuse(module: nn.Module) -> None:
    """Let a mixture of experts compute in these kernels, unless it is fp8."""
    stacks = (module.w_gate_up, module.w_down) if isinstance(module, Experts) and not module.fused else ()
    if stacks and not any(getattr(x, "mode", None) == "fp8" for x in stacks):
        module.fused = fused_mix
        for stack in stacks:
            if isinstance(stack, QuantizedStack):
                reorder(stack)
