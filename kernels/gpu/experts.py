"""Mixtures of experts on a GPU, in Triton: a kernel multiplies all rows of a pass by the experts they chose.

A row takes a *slot* for each expert that it chose. `arrange_kernel` sorts the slots by expert. A program of
`grouped_kernel` computes a few columns of one expert for a tile of its slots. No row chooses an expert twice.
So a tile has room for all slots of an expert in passes of up to `MOST_ROWS` rows, and its weights are read
once. In larger passes tiles of one expert run side by side, and all but the first find the weights in L2.

The grid depends on the number of rows only, so one graph serves every routing: programs without slots end at
once. A sum has the same order in every place of a tile, and no other program adds to it.
"""
from __future__ import annotations

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch import Tensor

from families.experts import Experts
from kernels.gpu.launch import begin, options
from kernels.gpu.parts import on_kernel
from kernels.gpu.products import as_stored, laid_out, sums_of
from kernels.quantized import QuantizedStack, dequantize

MOST_ROWS = 128  # of a tile
CHUNK = 1024  # slots that are sorted at a time


@triton.jit
def arrange_kernel(
    chosen, order, tiles, S, FEW: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr
):
    """Sort the slots by expert: program e writes those of expert e.

    chosen [S]: the expert of each slot. order [S]: the slots, those of one expert side by side. tiles [T, 3],
    of up to ROWS slots: the expert, the first place in `order`, the end of the expert's places; zeros, as T
    is the most that there can be. FEW: a tile's number is its first place; else it counts experts and tiles.
    """
    begin(EARLY)
    expert, slot = tl.program_id(0), tl.arange(0, CHUNK)
    start = 0
    for at in range(0, S, CHUNK):
        of_slot = tl.load(chosen + at + slot, mask=at + slot < S, other=1 << 30)
        start += tl.sum((of_slot < expert).to(tl.int32))
    end = start
    for at in range(0, S, CHUNK):
        mine = tl.load(chosen + at + slot, mask=at + slot < S, other=-1) == expert
        place = end + tl.cumsum(mine.to(tl.int32)) - 1
        tl.store(order + place, at + slot, mask=mine)
        end += tl.sum(mine.to(tl.int32))
    for first in range(start, end, ROWS):
        tile = tiles + 3 * (first if FEW else expert + first // ROWS)
        tl.store(tile, expert)
        tl.store(tile + 1, first)
        tl.store(tile + 2, end)


@triton.jit
def grouped_kernel(
    x, weight, scale, bias, order, tiles, out, N, K, STRIDE, SHARING, BITS: tl.constexpr, GROUP: tl.constexpr,
    BIASED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):
    """out [S, N] = the row of x [S / SHARING, K] of each slot @ the matrix of its expert^T, + bias [E, N].

    weight [E, STRIDE], scale [E, 1 or K/GROUP, N]: of each expert as `product_kernel` takes them. order,
    tiles: of `arrange_kernel`.
    """
    begin(EARLY)
    tile = tiles + 3 * tl.program_id(0)
    first, end = tl.load(tile + 1), tl.load(tile + 2)
    if first < end:
        expert, place = tl.load(tile).to(tl.int64), first + tl.arange(0, ROWS)
        in_rows = place < end
        slot = tl.load(order + place, mask=in_rows, other=0)
        sums = sums_of(
            x + (slot // SHARING).to(tl.int64) * K, in_rows, weight + expert * STRIDE,
            scale + expert * N * (K // GROUP if GROUP else 1), tl.program_id(1), 0, tl.cdiv(K, DEPTH), N, K,
            BITS, GROUP, EVEN, PRECISION, COLUMNS, DEPTH,
        )
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        if BIASED:
            sums += tl.load(bias + expert * N + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
        to = out + slot.to(tl.int64)[:, None] * N + column[None]
        tl.store(to, tl.trans(sums).to(out.dtype.element_ty), mask=in_rows[:, None] & (column < N)[None])


def tile_of(rows: int, dtype: torch.dtype) -> triton.Config:
    """Return the tile for passes of this many rows. It fits GPUs with little shared memory too."""
    if dtype == torch.float32:  # for tests of correctness: products without tensor cores fill registers
        return triton.Config({"ROWS": 16, "COLUMNS": 64, "DEPTH": 64}, num_warps=4, num_stages=1)
    tall = min(max(16, triton.next_power_of_2(rows)), MOST_ROWS)
    tile = {"ROWS": tall, "COLUMNS": 64, "DEPTH": 128 if tall == 16 else 64}
    return triton.Config(tile, num_warps=4, num_stages=4)


@torch.library.custom_op("eagle_gpu::arrange", mutates_args=())
def arrange(chosen: Tensor, experts: int, tall: int) -> tuple[Tensor, Tensor]:
    """Sort the slots of rows that chose some of the experts, chosen [R, A] -> `order` and `tiles`.

    tall: slots of a tile. See `arrange_kernel`.
    """
    S = chosen.numel()
    order, tiles = _room(chosen, experts, tall)
    given = {"FEW": len(tiles) == S, "ROWS": tall, "CHUNK": min(CHUNK, triton.next_power_of_2(S))}
    given |= options(chosen.device)
    arrange_kernel[(experts,)](chosen.contiguous(), order, tiles.zero_(), S, **given)
    return order, tiles


@arrange.register_fake
def _room(chosen, experts, tall):
    S = chosen.numel()
    tiles = chosen.new_empty(min(S, experts + S // tall), 3, dtype=torch.int32)
    return chosen.new_empty(S, dtype=torch.int32), tiles


@torch.library.custom_op("eagle_gpu::grouped", mutates_args=())
def grouped(
    x: Tensor, weight: Tensor, scale: Tensor | None, outputs: int, group: int, bias: Tensor | None,
    order: Tensor, tiles: Tensor, rows: int,
) -> Tensor:
    """Multiply the x of each slot by its expert's matrix -> [S, N], N = outputs.

    x [S, K], or [R, K] where the slots of a row share it. weight, scale: see `grouped_kernel`; a weight
    without scale is [E, N, K] in x's dtype. rows: of the pass.
    """
    N, K = outputs, x.shape[-1]
    tile, bits = tile_of(rows, x.dtype).all_kwargs(), 16 if scale is None else 4 if group else 8
    out = x.new_empty(len(order), N)
    grouped_kernel[len(tiles), triton.cdiv(N, tile["COLUMNS"])](
        x.contiguous(), weight, weight if scale is None else scale, x if bias is None else bias, order, tiles,
        out, N, K, weight[0].numel(), len(order) // len(x), BITS=bits, GROUP=group, BIASED=bias is not None,
        EVEN=K % tile["DEPTH"] == 0, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile,
        **options(x.device),
    )
    return out


@grouped.register_fake
def _(x, weight, scale, outputs, group, bias, order, tiles, rows):
    return x.new_empty(len(order), outputs)


class TritonStack(QuantizedStack):
    """A `QuantizedStack` as `grouped` takes it."""

    def forward(self, chosen: Tensor | None, dtype: torch.dtype) -> Tensor:
        words, scale = (x if chosen is None else x[chosen] for x in (self.weight, self.scale))
        weight = as_stored(words, self.outputs, self.inputs, self.group > 0)
        return dequantize(weight, scale.transpose(-1, -2), dtype)


class GroupedExperts(Experts):
    """`Experts` whose products are a kernel each."""

    @on_kernel("experts", Experts.mixed)
    def mixed(self, rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        R = len(rows)
        slots = arrange(chosen, self.router.out_features, tile_of(R, rows.dtype).kwargs["ROWS"])

        def product(x: Tensor, stack: nn.Module | Tensor, bias: Tensor | None) -> Tensor:
            if isinstance(stack, Tensor):
                return grouped(x, stack, None, stack.shape[1], 0, bias, *slots, R)
            held = stack.weight, stack.scale, stack.outputs, stack.group
            return grouped(stack.rounded(x), *held, bias, *slots, R)

        both = product(rows, self.w_gate_up, self.gate_up_bias)
        out = product(self.gate(*both.chunk(2, dim=-1)), self.w_down, self.down_bias)
        return (out.unflatten(0, (R, -1)) * weight[..., None]).sum(1)


def take(module: nn.Module) -> None:
    """Make a mixture that is not in fp8 ours, once: quantised weights and scales are laid out anew."""
    if type(module) is not Experts or getattr(module.w_down, "mode", None) == "fp8":
        return
    module.__class__ = GroupedExperts
    for stack in (module.w_gate_up, module.w_down):
        if isinstance(stack, QuantizedStack):
            stack.__class__ = TritonStack
            stack.weight.data = torch.stack([laid_out(weight) for weight in stack.weight])
            stack.scale.data = stack.scale.transpose(1, 2).contiguous()
