"""Products with quantised weights on a GPU, in Triton: the weights become numbers in registers, tile by tile.

A decoding pass is bound by reading weights, so int8 ought to take half the time of bfloat16, for one row and
for a whole tree. Compilers fuse the conversion into a product of one row only (gpt-fast#218); for more rows
they write the weight out whole and read it again. Here one kernel serves any number of rows. A weight is read
once, in the order it lies in memory, and converted on its way to the tensor cores. It is the left operand,
whose tile has 64 rows at least: those are rows of the weight, and one token fills it as well as a tree does.

The work is a line: the steps of DEPTH inputs of all tiles of columns, tile after tile. All programs that the
GPU holds at once share it equally (stream-K, Osama et al. 2023), so a narrow layer occupies every
multiprocessor too. Programs that share a tile leave their parts of the sums in scratch memory. The last one
to arrive adds the parts up in the order of the inputs: results do not depend on the order of arrival. Tiles
of rows run side by side over the same columns, so all but the first find the weights in L2.
"""
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.here import INTERPRETED, programs_at_once
from kernels.gpu.launch import begin, counters, options
from kernels.quantized import INPUTS, QuantizedLinear, round_inputs

LEAST_STEPS = 2  # of a program: fewer would cost more in adding up than they save
# The interpreter has no products of bfloat16; in float32 they are the same.
SLOWLY = tl.constexpr(INTERPRETED)

# A word of two values to two bfloat16 in one register. An integer n < 128 or-ed into the mantissa of 128 is
# 128 + n. The sign of a byte is or-ed into another 128 and makes it 256. The value is the difference.
BYTES_TO_BF16 = tl.constexpr("""{
    .reg .b32 both, low, sign, minus;
    mov.b32 minus, 0xBF80BF80;
    prmt.b32 both, $1, 0, 0x4140;
    lop3.b32 low, both, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 sign, both, 0x00800080, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, sign, minus, low;
}""")
# Four bits hold 8 more than the value: 128 + 8 is taken away.
NIBBLES_TO_BF16 = tl.constexpr("""{
    .reg .b32 both, one, less;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    mul.lo.u32 both, $1, 0x1001;
    lop3.b32 both, both, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, both, one, less;
}""")


@triton.jit
def halves(word, dtype: tl.constexpr):
    """Words [C, D] of 32 bits -> the two 16-bit numbers of each, the low one first [C, 2*D]."""
    low = (word & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, high).reshape(word.shape[0], 2 * word.shape[1])


@triton.jit
def numbers(stored, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """Stored weights -> their values in units of the scale, as numbers of this dtype: exact.

    uint8 [C, D]: two values of four bits; int16 [C, D]: two bytes, both -> [C, 2*D]; int8, not PAIRS: [C, D].
    """
    FOUR: tl.constexpr = stored.dtype == tl.uint8
    if not PAIRS:
        found = stored.to(dtype)
    elif dtype == tl.float32:
        low = (stored & 15).to(dtype) - 8 if FOUR else stored.to(tl.int8).to(dtype)
        high = (stored >> 4).to(dtype) - 8 if FOUR else (stored >> 8).to(dtype)
        found = tl.join(low, high).reshape(stored.shape[0], 2 * stored.shape[1])
    else:
        word = (stored if FOUR else stored.to(tl.uint16, bitcast=True)).to(tl.uint32)
        if dtype == tl.bfloat16:
            text: tl.constexpr = NIBBLES_TO_BF16 if FOUR else BYTES_TO_BF16
            found = halves(tl.inline_asm_elementwise(text, "=r,r", [word], tl.uint32, True, 1), dtype)
        elif FOUR:  # float16, as there, but with 1024 instead of 128
            found = halves((word * 0x1001) & 0x000F000F | 0x64006400, dtype) - 1032.0
        else:
            both = word | (word << 8)
            low, sign = both & 0x007F007F | 0x64006400, both & 0x00800080 | 0x64006400
            found = halves(low, dtype) - halves(sign, dtype)
    return found


@triton.jit
def product_kernel(
    x, weight, scale, bias, onto, out, parts, arrived, M, N, K, WIDTH,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    RESIDENT: tl.constexpr, EARLY: tl.constexpr,
):
    """out [M, N] = x [M, K] @ (weight [N, K] * scale)^T, + bias [N] if BIASED, onto [M, N] + that if ADDED.

    weight: rows of WIDTH stored elements, as `numbers` takes them. scale: [N, K/GROUP], or [N] if GROUP is 0.
    EVEN: DEPTH divides K. RESIDENT: programs of a multiprocessor, for the grid only. parts: two tiles
    of scratch a program; arrived: zeros, and zeros again afterwards. Sums are float32.
    """
    begin(EARLY)
    worker, workers = tl.program_id(1), tl.num_programs(1)
    group_of_workers = tl.program_id(0) * workers
    steps = tl.cdiv(K, DEPTH)
    work = tl.cdiv(N, COLUMNS) * steps
    share = tl.cdiv(work, workers)
    first = worker * share
    end = tl.minimum(first + share, work)

    PART: tl.constexpr = min(GROUP, DEPTH) if GROUP else DEPTH  # inputs of one scale
    STORED: tl.constexpr = PART // 2 if PAIRS else PART
    input_, element = tl.arange(0, PART), tl.arange(0, STORED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < M
    of_row = x + row.to(tl.int64)[:, None] * K + input_[None]
    inside = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None]

    for tile in range(first // steps, tl.cdiv(end, steps)):
        start, stop = tl.maximum(first - tile * steps, 0), tl.minimum(end - tile * steps, steps)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = column < N
        of_column = weight + column.to(tl.int64)[:, None] * WIDTH + element[None]
        scales = scale + column.to(tl.int64) * (K // GROUP if GROUP else 1)
        if not GROUP:
            unit = tl.load(scales, mask=in_columns, other=0.0)
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
        for step in range(start, stop):
            for i in tl.static_range(DEPTH // PART):
                k = step * DEPTH + i * PART
                at = step * (DEPTH // PART * STORED) + i * STORED
                if EVEN:
                    a = tl.load(of_row + k, mask=in_rows[:, None], other=0.0)
                    w = tl.load(of_column + at, mask=in_columns[:, None], other=0)
                else:
                    a = tl.load(of_row + k, mask=in_rows[:, None] & (k + input_ < K)[None], other=0.0)
                    w = tl.load(
                        of_column + at, mask=in_columns[:, None] & (at + element < WIDTH)[None], other=0
                    )
                if SLOWLY and a.dtype == tl.bfloat16:
                    a = a.to(tl.float32)
                w = numbers(w, a.dtype, PAIRS)
                if GROUP:
                    # Past the last input are zeros, in any unit.
                    unit = tl.load(scales + tl.minimum(k, K - 1) // GROUP, mask=in_columns, other=0.0)
                # Each product is used before the next one starts: of several in flight, Triton overwrites
                # the inputs (triton-lang/triton#9433).
                product = tl.dot(w, tl.trans(a), input_precision=PRECISION)
                sums += product * unit.to(tl.float32)[:, None]

        last = stop - start == steps
        if stop - start < steps:
            begins = tile * steps // share  # the worker with the tile's first step
            others = (tile * steps + steps - 1) // share - begins
            tile_of = (group_of_workers + worker) * 2 + tl.minimum(start, 1)
            written = parts + tile_of.to(tl.int64) * ROWS * COLUMNS
            tl.store(written + inside, sums, mask=in_rows[None])
            tl.debug_barrier()  # the whole program has stored before it arrives
            last = tl.atomic_add(arrived + group_of_workers + begins, 1, sem="acq_rel") == others
            if last:
                tl.store(arrived + group_of_workers + begins, 0)
                sums = tl.zeros((COLUMNS, ROWS), tl.float32)
                for other in range(others + 1):  # past the first cache, which may hold what was there before
                    tile_of = (group_of_workers + begins + other) * 2 + tl.minimum(other, 1)
                    written = parts + tile_of.to(tl.int64) * ROWS * COLUMNS
                    sums += tl.load(written + inside, mask=in_rows[None], other=0.0, cache_modifier=".cg")
        if last:
            if BIASED:
                sums += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[:, None]
            y = tl.trans(sums).to(out.dtype.element_ty)
            above = (tl.program_id(0) * ROWS).to(tl.int64) * N  # offsets within a tile fit 32 bits
            to = tl.arange(0, ROWS)[:, None] * N + column[None]
            here = in_rows[:, None] & in_columns[None]
            if ADDED:
                y = tl.load(onto + above + to, mask=here, other=0.0).to(tl.float32) + y.to(tl.float32)
            tl.store(out + above + to, y.to(out.dtype.element_ty), mask=here)


def tile_rows(M: int, dtype: torch.dtype, group: int) -> int:
    """Rows of a tile where x has M. group: 0 for int8."""
    most = 16 if dtype == torch.float32 else 64 if group else 128  # int4 has two tiles of sums
    return min(max(16, triton.next_power_of_2(M)), most)


def tiles(rows: int, dtype: torch.dtype, group: int) -> list[triton.Config]:
    """Return the configurations to try for the rows of a tile, the best guess first. group: 0 for int8.

    All fit an A100 and spill no registers. A multiprocessor of an H100 holds as many programs as each says.
    """
    if dtype == torch.float32:  # for tests of correctness: products without tensor cores fill registers
        return [_tile(32, 32, 4, 1, 4)]
    if rows == 16 and group:
        return [
            _tile(64, 128, 4, 6, 3), _tile(64, 64, 4, 8, 3), _tile(128, 128, 8, 6, 1), _tile(128, 64, 8, 8, 1)
        ]
    if rows == 16:
        return [
            _tile(64, 128, 4, 4, 3), _tile(64, 256, 4, 3, 2), _tile(128, 128, 4, 4, 2),
            _tile(128, 128, 8, 5, 1),
        ]
    if rows == 32:
        # The first one spills nothing anywhere; with Triton 3.6 the others spill 8 bytes on sm_100.
        return [_tile(128, 64, 8, 8, 1), _tile(64, 128, 4, 5, 2), _tile(64, 64, 4, 8, 2)]
    if rows == 64:
        return [_tile(128, 64, 8, 8, 1), _tile(64, 64, 4, 8, 2), _tile(64, 64, 4, 4, 2)]
    return [_tile(128, 64, 8, 5, 1), _tile(64, 64, 4, 4, 2)]


def _tile(columns: int, depth: int, warps: int, stages: int, resident: int) -> triton.Config:
    tile = {"COLUMNS": columns, "DEPTH": depth, "RESIDENT": resident}
    return triton.Config(tile, num_warps=warps, num_stages=stages)


@cache
def _tuned(rows: int, group: int):
    """The kernel. It measures `tiles` at its first call for an N and K, and keeps the result on disk."""
    def milliseconds(call, quantiles):
        return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)

    choices = tiles(rows, torch.bfloat16, group)
    named = ["N", "K", "ROWS", "GROUP"]  # of a result on disk too
    return triton.autotune(choices, named, do_bench=milliseconds, cache_results=True)(product_kernel)


@torch.library.custom_op("eagle_gpu::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, onto: Tensor | None, group: int, wide: bool
) -> Tensor:
    """x [..., K] times a weight of int8 (group 0) or int4 as `QuantizedLinear` holds it, + bias -> [..., N].

    In x's dtype, or float32 if `wide`. The product is rounded to x's dtype before it is added to onto [...,
    N].
    """
    (N, width), K = weight.shape, x.shape[-1]
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    out = x.new_empty(*x.shape[:-1], N, dtype=torch.float32 if wide else x.dtype)
    pairs = K % 2 == 0
    if pairs and not group:
        weight, width = weight.view(torch.int16), K // 2
    tile = tile_rows(M, x.dtype, group)
    choices = tiles(tile, x.dtype, group)
    blocks, held = triton.cdiv(M, tile), programs_at_once(x.device)
    # Scratch and counters for whichever is chosen.
    programs = held * max(c.kwargs["RESIDENT"] for c in choices)
    columns = held * max(c.kwargs["RESIDENT"] * c.kwargs["COLUMNS"] for c in choices)
    parts = torch.empty(2 * columns * tile, dtype=torch.float32, device=x.device)

    def grid(chosen: dict) -> tuple[int, int]:
        work = triton.cdiv(N, chosen["COLUMNS"]) * triton.cdiv(K, chosen["DEPTH"])
        return blocks, max(1, min(held * chosen["RESIDENT"] // blocks, work // LEAST_STEPS))

    given = {
        "GROUP": group, "PAIRS": pairs, "BIASED": bias is not None, "ADDED": onto is not None,
        "EVEN": all(K % c.kwargs["DEPTH"] == 0 for c in choices),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "ROWS": tile,
    }
    kernel = product_kernel
    if INTERPRETED or len(choices) == 1:
        given |= choices[0].all_kwargs()
    else:
        kernel = _tuned(tile, group)
    kernel[grid](
        rows.contiguous(), weight, scale, scale if bias is None else bias,
        rows if onto is None else onto.contiguous(), out, parts, counters(x.device, programs), M, N, K, width,
        **given, **options(x.device),
    )
    return out


@linear.register_fake
def _(x, weight, scale, bias, onto, group, wide):
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32 if wide else x.dtype)


class TritonLinear(QuantizedLinear):
    """A `QuantizedLinear` whose product is one kernel, which adds to the residual stream too."""

    def _product(self, x: Tensor, onto: Tensor | None, wide: bool) -> Tensor:
        if self.mode in ("w8a8", "w4a8"):
            x = round_inputs(x, self.group or INPUTS)
        return linear(x, self.weight, self.scale, self.bias, onto, self.group, wide)
