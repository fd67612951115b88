"""Products with quantised weights on a GPU, in Triton: the weights are made whole in registers, tile by tile.

A decoding pass is bound by reading weights, so int8 ought to take half the time of bfloat16, for one row and
for a whole tree. Compilers fuse the conversion into a product of one row only (gpt-fast#218); for more rows
they write the weight out whole and read it again. Here one kernel serves 1 to `MOST_ROWS` rows: every weight
is read once, in the order it lies in memory, and converted on its way to the tensor cores. Larger passes
(prefill) do better with cuBLAS on the whole weight.

"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 128


def _configs() -> list:
    """Tiles to try. Few columns a program, so that a narrow layer still occupies all multiprocessors."""
    shapes = ((64, 4, 5), (128, 4, 4), (256, 4, 3), (128, 8, 4))
    return [
        triton.Config({"COLUMNS": columns, "DEPTH": depth}, num_warps=warps, num_stages=stages)
        for columns in (16, 32, 64) for depth, warps, stages in shapes
    ]

@triton.jit
def int8_kernel(x, w, scale, bias, out, M, N, K, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """out [M, N] = x [M, K] @ (w [N, K] int8 * scale [N])^T + bias [N], float32 sums."""
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, K, DEPTH):
        here = k + depth
        a = tl.load(
            x + rows[:, None] * K + here[None], mask=(rows[:, None] < M) & (here[None] < K), other=0.0
        )
        b = tl.load(
            w + columns[:, None].to(tl.int64) * K + here[None],
            mask=(columns[:, None] < N) & (here[None] < K), other=0
        )
        sums = tl.dot(a, tl.trans(b.to(a.dtype)), sums, input_precision="ieee" if EXACT else "tf32")
    sums *= tl.load(scale + columns, mask=columns < N, other=0.0)[None]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None]
    tl.store(
        out + rows[:, None] * N + columns[None], sums, mask=(rows[:, None] < M) & (columns[None] < N)
    )

@triton.jit
def int4_kernel(x, w, scale, bias, out, M, N, K, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr,
                GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`int8_kernel` for w [N, K/2] and scale [N, K/GROUP].

    Even inputs are in the low four bits; each is stored as 8 more than its value.
    """
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    pairs = tl.arange(0, GROUP // 2)
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    fits = columns[:, None] < N
    for g in range(K // GROUP):
        even = x + rows[:, None] * K + g * GROUP + 2 * pairs[None]
        a0 = tl.load(even, mask=rows[:, None] < M, other=0.0)
        a1 = tl.load(even + 1, mask=rows[:, None] < M, other=0.0)
        both = tl.load(
            w + columns[:, None].to(tl.int64) * (K // 2) + g * (GROUP // 2) + pairs[None], mask=fits,
            other=0
        )
        low, high = (both & 15).to(tl.float32) - 8, (both >> 4).to(tl.float32) - 8
        part = tl.dot(a0, tl.trans(low.to(a0.dtype)), input_precision="ieee" if EXACT else "tf32")
        part = tl.dot(a1, tl.trans(high.to(a1.dtype)), part, input_precision="ieee" if EXACT else "tf32")
        share = tl.load(scale + columns.to(tl.int64) * (K // GROUP) + g, mask=columns < N, other=0.0)
        sums += part * share.to(tl.float32)[None]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None]
    tl.store(
        out + rows[:, None] * N + columns[None], sums, mask=(rows[:, None] < M) & (columns[None] < N)
    )

tuned_int8 = triton.autotune(_configs(), key=["ROWS", "N", "K"])(int8_kernel)
tuned_int4 = triton.autotune(
    [
        triton.Config({"COLUMNS": columns}, num_warps=warps, num_stages=stages)
        for columns in (16, 32, 64) for warps, stages in ((2, 5), (4, 4), (8, 3))
    ],
    key=["ROWS", "N", "K"],
)(int4_kernel)

@torch.library.triton_op("eagle_gpu::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    M, N = x.shape[0], weight.shape[0]
    K, rows = x.shape[1], max(16, triton.next_power_of_2(M))  # a tensor core takes 16 rows at least
    out = x.new_empty(M, N)
    constants = {"HAS_BIAS": bias is not None, "EXACT": x.dtype == torch.float32, "ROWS": rows}
    arguments = (x, weight, scale, bias if bias is not None else scale, out, M, N, K)
    grid = lambda meta: (triton.cdiv(N, meta["COLUMNS"]),)  # noqa: E731
    if group:
        torch.library.wrap_triton(tuned_int4)[grid](*arguments, GROUP=group, **constants)
    else:
        torch.library.wrap_triton(tuned_int8)[grid](*arguments, **constants)
    return out


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, group: int) -> Tensor:
    """x [..., K] times a quantised weight as `QuantizedLinear` holds it -> [..., N] in x's dtype."""
    flat = x.reshape(-1, x.shape[-1])
    return torch.ops.eagle_gpu.linear(flat, weight, scale, bias, group).view(*x.shape[:-1], -1)
