"""Products of few rows with a weight, in Triton: quantised weights become numbers in registers, tile by tile.

A decoding pass is bound by reading weights, so int8 ought to take half the time of bfloat16, for one row and
for a whole tree. (In 16 bits cuBLAS is as fast as such a kernel up to 32 rows on an H200, and faster for
more.) Compilers fuse the conversion into a product of one row only (gpt-fast#218); for more rows
they write the weight out whole and read it again. Here one kernel serves any number of rows. A weight is read
once, in the order it lies in memory, which is that of the tensor cores' registers (`laid_out`). It is the
left operand, whose tile has 64 rows at least: those are rows of the weight, and one token fills it as well as
a tree does.

The work is a line: the steps of DEPTH inputs of all tiles of columns, tile after tile. All programs that the
GPU holds at once share it equally (stream-K, Osama et al. 2023), so a narrow layer occupies every
multiprocessor too. Programs that share a tile leave their parts of the sums in scratch memory. The last one
to arrive adds the parts up in the order of the inputs: results do not depend on the order of arrival. Tiles
of rows run side by side over the same columns, so all but the first find the weights in L2.
"""
from __future__ import annotations

import math
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.here import INTERPRETED, programs_at_once, shared_memory
from kernels.gpu.launch import begin, counters, options
from kernels.gpu.parts import on_kernel
from kernels.quantized import QuantizedLinear, dequantize, pack_nibbles, unpack_nibbles

LEAST_STEPS = 4  # of a program: fewer would cost more in adding up than they save
choice: int | None = 0 if INTERPRETED else None  # among `tiles`; None: the fastest, or the first among ranks
BLOCK = tl.constexpr(64)  # rows of a weight, and inputs, that are stored together
RUN = tl.constexpr(1024)  # words of 16 bits that four warps read at once, 16 bytes a thread
# The interpreter has no assembler, and no products of bfloat16; in float32 they are the same.
SLOWLY = tl.constexpr(INTERPRETED)

# Two stored words in a register to 16-bit numbers, two in each register. An integer n < 128 or-ed into the
# mantissa of 128 (bfloat16) or 1024 (float16) adds n. The sign of a byte is or-ed into another one and adds
# 128. The value is the difference.
BYTES = """{{
    .reg .b32 high, low, sign, minus;
    mov.b32 minus, {minus};
    shr.u32 high, $2, 8;
    lop3.b32 low, $2, 0x007F007F, {base}, 0xEA;
    lop3.b32 sign, $2, 0x00800080, {base}, 0xEA;
    fma.rn.{kind} $0, sign, minus, low;
    lop3.b32 low, high, 0x007F007F, {base}, 0xEA;
    lop3.b32 sign, high, 0x00800080, {base}, 0xEA;
    fma.rn.{kind} $1, sign, minus, low;
}}"""
# Four bits hold 8 more than the value, which is taken away with the base.
NIBBLES = """{{
    .reg .b32 word, one, less;
    mov.b32 one, {one};
    mov.b32 less, {less};
""" + "".join(f"""    shr.u32 word, $4, {4 * i};
    lop3.b32 word, word, 0x000F000F, {{base}}, 0xEA;
    fma.rn.{{kind}} ${i}, word, one, less;
""" for i in range(4)) + "}}"


def _assembler(kind: str, one: str, minus: str, base: str, less: str) -> tuple[tl.constexpr, tl.constexpr]:
    """Return BYTES and NIBBLES for a dtype: 1, -1, the base, and the base with 8 more, below 0."""
    words = {"one": one, "minus": minus, "base": base, "less": less}
    words = {name: f"0x{word}{word}" for name, word in words.items()}
    return tuple(tl.constexpr(text.format(kind=kind, **words)) for text in (BYTES, NIBBLES))


BYTES_TO_BF16, NIBBLES_TO_BF16 = _assembler("bf16x2", "3F80", "BF80", "4300", "C308")
BYTES_TO_FP16, NIBBLES_TO_FP16 = _assembler("f16x2", "3C00", "BC00", "6400", "E408")


def _e2m1(kind: str, shift: int, large: str) -> tl.constexpr:
    """Return the assembler for four numbers in e2m1, the result of each as of NIBBLES.

    Three bits after the sign become the lowest of a 16-bit number's exponent and the highest of its mantissa,
    `shift` bits up. That number times `large`, a power of two, is the value, also where it is subnormal.
    """
    mask = f"0x{7 << shift:04X}{7 << shift:04X}"
    lines = [".reg .b32 word, sign, large, zero", f"mov.b32 large, 0x{large}{large}"]
    lines.append("mov.b32 zero, 0x80008000")
    for i in range(4):
        up = shift - 4 * i
        lines += [
            f"shl.b32 word, $4, {up}" if up >= 0 else f"shr.u32 word, $4, {-up}",
            f"shl.b32 sign, $4, {12 - 4 * i}", "lop3.b32 sign, sign, 0x80008000, 0, 0xEA",
            f"lop3.b32 word, word, {mask}, sign, 0xEA", f"fma.rn.{kind} ${i}, word, large, zero",
        ]
    return tl.constexpr("".join(["{", *(f"\n    {line};" for line in lines), "\n}"]))


E2M1_TO_BF16, E2M1_TO_FP16 = _e2m1("bf16x2", 6, "7E80"), _e2m1("f16x2", 9, "7400")


# A block of 64 x 64 values is 4 warps of 2 x 8 rows; its inputs are 4 times 2 x 4 pairs. In what order the
# dimensions [row blocks, 4, 2, 8, input blocks, 4, 2, 4, 2] lie in memory.
ORDER_8, ORDER_4 = (0, 4, 2, 1, 3, 7, 5, 8, 6), (0, 4, 1, 3, 7, 5, 8, 2, 6)


def _blocks(N: int, K: int) -> tuple[int, ...]:
    return -(-N // 128) * 2, 4, 2, 8, -(-K // 64), 4, 2, 4, 2


def laid_out(weight: Tensor) -> Tensor:
    """Put a weight of `QuantizedLinear` into the order that threads need -> words [n] int16.

    A thread of the tensor cores holds, of 16 inputs of a tile with 64 rows, two pairs of neighbours in two
    rows each. All that it holds of 64 inputs lies together: 16 bytes, in int8 of one row. Zeros fill up the
    last blocks; there are some more, which the last tiles read.
    """
    four = weight.dtype == torch.uint8
    q = unpack_nibbles(weight) + 8 if four else weight
    N, K = q.shape
    q = F.pad(q.view(torch.uint8), (0, -K % 64, 0, -N % 128)).view(_blocks(N, K))
    q = q.permute(ORDER_4 if four else ORDER_8)
    if four:
        q = q[..., 0] | q[..., 1] << 4
    return F.pad(q.flatten(), (0, 4 * 64 * 64)).view(torch.int16)


def as_stored(words: Tensor, N: int, K: int, four: bool) -> Tensor:
    """Invert `laid_out`: words [..., n] -> weights [..., N, K] as `QuantizedLinear` stores them.

    four: its values have 4 bits.
    """
    sizes, order, lead = _blocks(N, K), ORDER_4 if four else ORDER_8, words.shape[:-1]
    q = words.view(torch.uint8)[..., : math.prod(sizes) // (2 if four else 1)]
    if four:
        q = torch.stack((q & 15, q >> 4), -1)
    q = q.reshape(*lead, *(sizes[i] for i in order))
    q = q.permute(*range(len(lead)), *(len(lead) + order.index(i) for i in range(len(order))))
    q = q.reshape(*lead, sizes[0] * 64, -1)[..., :N, :K]
    return pack_nibbles(q.to(torch.int8) - 8) if four else q.view(torch.int8)


@triton.jit
def four_bits(words, shift: tl.constexpr, E2M1: tl.constexpr):
    """Four bits of each word as a number in float32, see `numbers`."""
    code = words >> shift & 15
    if E2M1:
        bits = ((code & 8).to(tl.uint32) << 28) | ((code & 7).to(tl.uint32) << 22)
        return bits.to(tl.float32, bitcast=True) * 2.0**126
    return code.to(tl.float32) - 8


@triton.jit
def numbers(
    words, dtype: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    E2M1: tl.constexpr,
):
    """Stored words of a tile -> its values in units of the scale [COLUMNS, DEPTH]: exact.

    words [blocks of inputs, the 2 runs of each in int8, blocks of rows, RUN], flat. E2M1: of four bits.
    """
    ACROSS: tl.constexpr = COLUMNS // BLOCK
    ALONG: tl.constexpr = DEPTH // BLOCK
    if BITS == 8:
        if dtype == tl.float32:
            a, b = words.to(tl.int8).to(dtype), (words >> 8).to(dtype)
        else:
            text: tl.constexpr = BYTES_TO_BF16 if dtype == tl.bfloat16 else BYTES_TO_FP16
            a, b = tl.inline_asm_elementwise(text, "=&r,=&r,r", [words], (dtype.value, dtype.value), True, 2)
        found = tl.join(a, b).reshape(ALONG, 2, ACROSS, 4, 8, 4, 4, 2, 2).permute(2, 3, 1, 4, 0, 6, 8, 5, 7)
    else:
        if dtype == tl.float32:
            a, b = four_bits(words, 0, E2M1), four_bits(words, 4, E2M1)
            c, d = four_bits(words, 8, E2M1), four_bits(words, 12, E2M1)
        else:
            if E2M1:
                text: tl.constexpr = E2M1_TO_BF16 if dtype == tl.bfloat16 else E2M1_TO_FP16
            else:
                text: tl.constexpr = NIBBLES_TO_BF16 if dtype == tl.bfloat16 else NIBBLES_TO_FP16
            a, b, c, d = tl.inline_asm_elementwise(
                text, "=&r,=&r,=&r,=&r,r", [words], (dtype.value,) * 4, True, 2
            )
        four = tl.join(tl.join(a, b), tl.join(c, d))
        found = four.reshape(ALONG, ACROSS, 4, 8, 4, 4, 2, 2, 2).permute(1, 2, 8, 3, 0, 5, 7, 4, 6)
    return found.reshape(COLUMNS, DEPTH)


@triton.jit
def sums_of(
    rows, in_rows, weight, scale, tile, start, stop, N, K, BITS: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):
    """Return the sums [COLUMNS, ROWS] of the steps start ... stop - 1 for a tile of columns, in float32.

    rows [ROWS]: pointers to the K inputs of each row. weight, scale: as `product_kernel` takes them, or a
    weight of 16 BITS: numbers [N, K] in the dtype of the inputs, without a scale.
    """
    SAME: tl.constexpr = min(GROUP, DEPTH) if GROUP else DEPTH  # inputs of one scale
    PART: tl.constexpr = max(SAME, BLOCK)  # of one load
    WORDS: tl.constexpr = BLOCK * BLOCK * BITS // 16  # of a block
    E2M1: tl.constexpr = scale.dtype.element_ty == tl.uint8
    input_ = tl.arange(0, PART if BITS == 16 else SAME)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < N
    of_row = rows[:, None] + input_[None]
    sums = tl.zeros((COLUMNS, rows.shape[0]), tl.float32)
    if BITS == 16:
        of_column = weight + column.to(tl.int64)[:, None] * K + input_[None]
        for step in range(start, stop):
            k = step * DEPTH
            inside = (EVEN | (k + input_ < K))[None]
            a = tl.load(of_row + k, mask=in_rows[:, None] & inside, other=0.0)
            w = tl.load(of_column + k, mask=in_columns[:, None] & inside, other=0.0)
            if SLOWLY:
                a, w = a.to(tl.float32), w.to(tl.float32)
            sums = tl.dot(w, tl.trans(a), sums, input_precision=PRECISION)
    else:
        ACROSS: tl.constexpr = COLUMNS // BLOCK
        word = tl.arange(0, ACROSS * PART // BLOCK * WORDS)
        of_blocks = tl.cdiv(K, BLOCK) * WORDS  # words of a row of blocks
        run = word // RUN
        word = run // ACROSS * RUN + word % RUN + run % ACROSS * of_blocks
        of_tile = weight + of_blocks.to(tl.int64) * ACROSS * tile + word
        scales = scale + column
        group = start * DEPTH // GROUP * N if GROUP else 0
        unit = tl.load(scales + group, mask=in_columns, other=0)
        for step in range(start, stop):
            for i in tl.static_range(DEPTH // PART):
                k = step * DEPTH + i * PART
                w = tl.load(of_tile + k // BLOCK * WORDS)
                w = numbers(w, tl.float32 if SLOWLY else rows.dtype.element_ty, BITS, COLUMNS, PART, E2M1)
                for j in tl.static_range(PART // SAME):
                    k = step * DEPTH + i * PART + j * SAME
                    inside = (EVEN | (k + input_ < K))[None]
                    a = tl.load(of_row + k, mask=in_rows[:, None] & inside, other=0.0).to(w.dtype)
                    same = w
                    if SAME < PART:
                        one, other = tl.split(w.reshape(COLUMNS, 2, SAME).permute(0, 2, 1))
                        same = one if j == 0 else other
                    # Each product is used before the next one starts: of several in flight, Triton
                    # overwrites the inputs (triton-lang/triton#9433).
                    product = tl.dot(same, tl.trans(a), input_precision=PRECISION)
                    if E2M1:  # the exponent of a power of two; the smallest is subnormal
                        bits = tl.where(unit == 0, 1 << 22, unit.to(tl.int32) << 23)
                        sums += product * bits.to(tl.float32, bitcast=True)[:, None]
                    else:
                        sums += product * unit.to(tl.float32)[:, None]
                    if GROUP:  # past the last input are zeros, in any unit
                        group = tl.minimum(k + SAME, K - 1) // GROUP * N
                        unit = tl.load(scales + group, mask=in_columns, other=0)
    return sums


@triton.jit
def product_kernel(
    x, weight, scale, bias, onto, out, parts, arrived, M, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    RESIDENT: tl.constexpr, EARLY: tl.constexpr,
):
    """out [M, N] = x [M, K] @ (weight [N, K] * scale)^T, + bias [N] if BIASED, onto [M, N] + that if ADDED.

    weight: of BITS 4 or 8, as `laid_out`. scale: [K/GROUP, N], or [N] if GROUP is 0. EVEN: DEPTH divides K.
    RESIDENT: programs of a multiprocessor, for the grid only. parts: two tiles of scratch a program; arrived:
    zeros, and zeros again afterwards. Sums are float32.
    """
    begin(EARLY)
    worker, workers = tl.program_id(1), tl.num_programs(1)
    group_of_workers = tl.program_id(0) * workers
    steps = tl.cdiv(K, DEPTH)
    work = tl.cdiv(N, COLUMNS) * steps
    share = tl.cdiv(work, workers)
    first = worker * share
    end = tl.minimum(first + share, work)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < M
    for tile in range(first // steps, tl.cdiv(end, steps)):
        start, stop = tl.maximum(first - tile * steps, 0), tl.minimum(end - tile * steps, steps)
        sums = sums_of(
            x + row.to(tl.int64) * K, in_rows, weight, scale, tile, start, stop, N, K, BITS, GROUP, EVEN,
            PRECISION, COLUMNS, DEPTH,
        )
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        in_columns = column < N

        last = stop - start == steps
        if stop - start < steps:
            begins = tile * steps // share  # the worker with the tile's first step
            others = (tile * steps + steps - 1) // share - begins
            tile_of = (group_of_workers + worker) * 2 + tl.minimum(start, 1)
            written = parts + tile_of.to(tl.int64) * ROWS * COLUMNS
            inside = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None]
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


def tile_rows(M: int, dtype: torch.dtype, bits: int) -> int:
    """Rows of a tile where x has M. bits: of a weight's value."""
    most = 16 if dtype == torch.float32 else 128 if bits == 8 else 64  # int4 has two tiles of sums
    return min(max(16, triton.next_power_of_2(M)), most)


def tiles(rows: int, dtype: torch.dtype, bits: int, shared: int) -> list[triton.Config]:
    """Return the configurations to try for a tile of this many rows, the default first.

    bits: of a weight's value. shared: bytes of shared memory that a program may have; every configuration
    returned fits in it. The first spills no registers on an A100, an H100 and a B200. RESIDENT: programs that
    a multiprocessor of an H100 holds. The tiles of 16 to 64 rows were chosen by measurement on an H200.
    """
    tile = partial(_tile, rows, bits, shared)
    if dtype == torch.float32:  # for tests of correctness: products without tensor cores fill registers
        return [tile(64, 64, 4, 1, 2)]
    if rows == 16:
        if bits == 4:
            return [tile(64, 128, 4, 6, 3), tile(64, 256, 4, 4, 3), tile(128, 128, 8, 6, 1)]
        return [tile(64, 128, 4, 4, 3), tile(64, 256, 4, 3, 2)]
    if rows == 32:
        return [tile(64, 128, 4, 5, 2), tile(64, 64, 4, 8, 2)]
    if rows == 64:
        return [tile(128, 128, 8, 4, 1)] if bits == 4 else [tile(64, 128, 4, 4, 2), tile(64, 64, 4, 4, 2)]
    return [tile(128, 64, 8, 5, 1), tile(64, 64, 4, 4, 2)]


def _tile(
    rows: int, bits: int, shared: int, columns: int, depth: int, warps: int, stages: int, resident: int
) -> triton.Config:
    """Return a configuration with at most `stages` stages, as many as fit in `shared` bytes."""
    stage_bytes = depth * (2 * rows + columns * bits // 8)  # an upper bound: one stage stays in registers
    tile = {"COLUMNS": columns, "DEPTH": depth, "RESIDENT": resident}
    return triton.Config(tile, num_warps=warps, num_stages=min(stages, shared // stage_bytes))


@cache
def _tuned(rows: int, bits: int, shared: int):
    """Return the kernel. It measures `tiles` at its first call for an N, K and group, and keeps that."""
    def milliseconds(call, quantiles):
        try:
            return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)
        except torch.OutOfMemoryError:  # of the buffer that it clears: the first is taken
            return [math.inf] * len(quantiles)

    choices = tiles(rows, torch.bfloat16, bits, shared)
    named = ["N", "K", "ROWS", "BITS", "GROUP"]  # of a result on disk too
    return triton.autotune(choices, named, do_bench=milliseconds, cache_results=True)(product_kernel)


def programs(tiles: int, steps: int, held: float, resident: int) -> int:
    """Return how many programs share the steps of all tiles, at most `resident` on each of `held` processors.

    Each tile is divided evenly if that makes a program's share half as large again at most, and leaves few
    processors idle: each part then belongs to one tile, and there are fewer to add up.
    """
    share = max(LEAST_STEPS, math.ceil(tiles * steps / max(1, int(held * resident))))
    for even in range(share, share * 3 // 2 + 1):
        count = tiles * steps // even
        if steps % even == 0 and count >= 0.9 * math.ceil(count / held) * held:
            return count
    return triton.cdiv(tiles * steps, share)


@torch.library.custom_op("eagle_gpu::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, onto: Tensor | None, outputs: int,
    group: int, wide: bool,
) -> Tensor:
    """x [..., K] times a weight as `product_kernel` takes it, + bias -> [..., N], N = outputs.

    In x's dtype, or float32 if `wide`. The product is rounded to x's dtype before it is added to onto [...,
    N].
    """
    N, K = outputs, x.shape[-1]
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    out = x.new_empty(*x.shape[:-1], N, dtype=torch.float32 if wide else x.dtype)
    bits = 4 if group else 8
    tile = tile_rows(M, x.dtype, bits)
    shared = shared_memory(x.device)
    choices = tiles(tile, x.dtype, bits, shared)
    blocks, held = triton.cdiv(M, tile), programs_at_once(x.device)
    # Scratch and counters for whichever is chosen.
    most = held * max(c.kwargs["RESIDENT"] for c in choices)
    columns = held * max(c.kwargs["RESIDENT"] * c.kwargs["COLUMNS"] for c in choices)
    parts = torch.empty(2 * columns * tile, dtype=torch.float32, device=x.device)

    def grid(chosen: dict) -> tuple[int, int]:
        many, steps = triton.cdiv(N, chosen["COLUMNS"]), triton.cdiv(K, chosen["DEPTH"])
        return blocks, programs(many, steps, held / blocks, chosen["RESIDENT"])

    given = {
        "BITS": bits, "GROUP": group, "BIASED": bias is not None, "ADDED": onto is not None,
        "EVEN": all(K % c.kwargs["DEPTH"] == 0 for c in choices),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "ROWS": tile,
    }
    kernel = product_kernel
    if choice is None and len(choices) > 1 and not dist.is_initialized():
        kernel = _tuned(tile, bits, shared)
    else:  # ranks would measure other times, and choose other sums
        given |= choices[choice or 0].all_kwargs()
    kernel[grid](
        rows.contiguous(), weight, scale, rows if bias is None else bias,
        rows if onto is None else onto.contiguous(), out, parts, counters(x.device, most), M, N, K,
        **given, **options(x.device),
    )
    return out


@linear.register_fake
def _(x, weight, scale, bias, onto, outputs, group, wide):
    return x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32 if wide else x.dtype)


class TritonLinear(QuantizedLinear):
    """A `QuantizedLinear` whose product is one kernel, which adds to the residual stream too."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        stored = as_stored(self.weight, self.outputs, self.inputs, self.group > 0)
        return dequantize(stored, self.scale.t(), dtype)

    @on_kernel("linear", QuantizedLinear._product)
    def _product(self, x: Tensor, onto: Tensor | None, wide: bool) -> Tensor:
        held = self.weight, self.scale, self.bias
        return linear(self.rounded(x), *held, onto, self.outputs, self.group, wide)


def take(module: nn.Module) -> None:
    """Make a quantised layer ours, once: its weight and scales are laid out anew. One in fp8 does not change.
    """
    if type(module) is QuantizedLinear and module.mode != "fp8":
        module.__class__ = TritonLinear
        module.weight.data = laid_out(module.weight)
        module.scale.data = module.scale.t().contiguous()
