"""Products with quantized weights, dequantized in registers (W8A16, W4A16).

Decoding is bound by reading weights, so int8 should take half the time of bfloat16, for one token and for a
whole tree. (In 16 bits, cuBLAS on an H200 is as fast as such a kernel up to 32 tokens, and faster above.)
Compilers fuse the dequantization into a product with one token only (gpt-fast#218); for more tokens they
write the weight out whole and read it again. This kernel serves any number of tokens and reads a weight once.
Weights are stored in the order of the tensor cores' registers (`to_register_order`). A weight is the left
operand: tiles of tensor cores have at least 64 rows, which one token would leave empty.

Stream-K (Osama et al. 2023): the BLOCK_K steps of all tiles, one tile after the other, are divided evenly
among all programs that the GPU can hold, so that narrow layers occupy every multiprocessor. Programs that
share a tile write partial sums to scratch memory; the last one to arrive adds them in the order of the
inputs, so results do not depend on the order of arrival. Programs of several blocks of tokens run at the same
time over the same weights, which the later ones find in L2.
"""
from __future__ import annotations

import math
from functools import cache

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import INTERPRETED, gpu_of
from kernels.gpu.fallback import with_fallback
from kernels.gpu.launch import arrival_counters, launch_options, wait_for_previous
from kernels.quantized import INT8_ACTIVATION_MODES, MXFP4, Quantized, QuantizedLinear, round_inputs
from kernels.stored import expand_scales, pack_pairs, pack_values, unpack_pairs, values

MIN_STEPS = 4  # per program: with fewer, adding partial sums costs more than it saves
# The index of the tile in `tile_configs`; None: the fastest, or the first one with several ranks.
tile_index: int | None = 0 if INTERPRETED else None
LAYOUT_BLOCK = tl.constexpr(64)  # rows and inputs of a weight that are stored together
RUN = tl.constexpr(1024)  # 16-bit words that four warps load at once, 16 bytes per thread
# The interpreter has no inline assembly and no bfloat16 products; float32 gives the same values.
TO_FLOAT32 = tl.constexpr(INTERPRETED)

# Assembly from two stored words in a register to registers of two 16-bit floats. An integer n < 128 or-ed
# into the mantissa of the base, 128 in bfloat16 or 1024 in float16, gives base + n. The sign bit of a byte,
# or-ed into another base, gives base + 128. The value is their difference.
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
# A nibble stores its value + 8, which is subtracted with the base.
NIBBLES = """{{
    .reg .b32 word, one, less;
    mov.b32 one, {one};
    mov.b32 less, {less};
""" + "".join(f"""    shr.u32 word, $4, {4 * i};
    lop3.b32 word, word, 0x000F000F, {{base}}, 0xEA;
    fma.rn.{{kind}} ${i}, word, one, less;
""" for i in range(4)) + "}}"


def _assembly(kind: str, one: str, minus: str, base: str, less: str) -> tuple[tl.constexpr, tl.constexpr]:
    """Return BYTES and NIBBLES for a dtype, whose 1, -1, base and -(base + 8) are given twice in hex."""
    words = {"kind": kind, "one": one, "minus": minus, "base": base, "less": less}
    return tuple(tl.constexpr(text.format(**words)) for text in (BYTES, NIBBLES))


BYTES_TO_BF16, NIBBLES_TO_BF16 = _assembly(
    "bf16x2", "0x3F803F80", "0xBF80BF80", "0x43004300", "0xC308C308")
BYTES_TO_FP16, NIBBLES_TO_FP16 = _assembly(
    "f16x2", "0x3C003C00", "0xBC00BC00", "0x64006400", "0xE408E408")


def _floats_assembly(kind: str, bits: int, shift: int, scale: str) -> tl.constexpr:
    """Return the assembly from e2m1 or e4m3 numbers, in the order of NIBBLES or BYTES.

    The bits after the sign, `shift` bits up, become the lowest of the exponent and the highest of the
    mantissa of a 16-bit float. That float times `scale`, a power of two, is the value, also if subnormal.
    """
    count, mask = 16 // bits, f"{(1 << bits - 1) - 1 << shift:04X}"
    lines = [f".reg .b32 word, sign, scale, zero; mov.b32 zero, 0x80008000; mov.b32 scale, 0x{scale}{scale}"]
    for i in range(count):
        up = shift - bits * i
        lines += [
            f"shl.b32 word, ${count}, {up}" if up >= 0 else f"shr.u32 word, ${count}, {-up}",
            f"shl.b32 sign, ${count}, {16 - bits - bits * i}",
            "lop3.b32 sign, sign, 0x80008000, 0, 0xEA",
            f"lop3.b32 word, word, 0x{mask}{mask}, sign, 0xEA", f"fma.rn.{kind} ${i}, word, scale, zero",
        ]
    return tl.constexpr("".join(["{", *(f"\n    {line};" for line in lines), "\n}"]))


E2M1_TO_BF16 = _floats_assembly("bf16x2", 4, 6, "7E80")
E2M1_TO_FP16 = _floats_assembly("f16x2", 4, 9, "7400")
E4M3_TO_BF16 = _floats_assembly("bf16x2", 8, 4, "7B80")
E4M3_TO_FP16 = _floats_assembly("f16x2", 8, 7, "5C00")


# A layout block of 64 x 64 values is 4 warps of 2 x 8 rows, and its inputs are 4 times 2 x 4 pairs: the order
# in memory of the dimensions [row blocks, 4, 2, 8, input blocks, 4, 2, 4, 2].
ORDER_8_BITS, ORDER_4_BITS = (0, 4, 2, 1, 3, 7, 5, 8, 6), (0, 4, 1, 3, 7, 5, 8, 2, 6)


def _block_shape(N: int, K: int) -> tuple[int, ...]:
    return -(-N // 128) * 2, 4, 2, 8, -(-K // 64), 4, 2, 4, 2


def to_register_order(weight: Tensor) -> Tensor:
    """Reorder a weight of `QuantizedLinear` as threads load it -> words [n] int16.

    Of 16 inputs of a tile with 64 rows, a tensor-core thread holds two pairs of neighbors in two rows each.
    All that it holds of 64 inputs is contiguous: 16 bytes, in int8 of one row. Zeros fill the last blocks and
    pad the end, which the last tiles read.
    """
    has_nibbles = weight.dtype == torch.uint8
    q = unpack_pairs(weight) if has_nibbles else weight
    N, K = q.shape
    q = F.pad(q.view(torch.uint8), (0, -K % 64, 0, -N % 128)).view(_block_shape(N, K))
    q = q.permute(ORDER_4_BITS if has_nibbles else ORDER_8_BITS)
    if has_nibbles:
        q = q[..., 0] | q[..., 1] << 4
    return F.pad(q.flatten(), (0, 4 * 64 * 64)).view(torch.int16)


def from_register_order(words: Tensor, N: int, K: int, has_nibbles: bool) -> Tensor:
    """Invert `to_register_order`: words [..., n] -> weights [..., N, K] of `QuantizedLinear`."""
    shape, order, lead = _block_shape(N, K), ORDER_4_BITS if has_nibbles else ORDER_8_BITS, words.shape[:-1]
    q = words.view(torch.uint8)[..., : math.prod(shape) // (2 if has_nibbles else 1)]
    if has_nibbles:
        q = torch.stack((q & 15, q >> 4), -1)
    q = q.reshape(*lead, *(shape[i] for i in order))
    q = q.permute(*range(len(lead)), *(len(lead) + order.index(i) for i in range(len(order))))
    q = q.reshape(*lead, shape[0] * 64, -1)[..., :N, :K]
    return pack_pairs(q.to(torch.uint8)) if has_nibbles else q.view(torch.int8)


@triton.jit
def code_to_float32(words, shift: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr):
    """Convert the BITS at `shift` of each word, see `to_floats`."""
    code = words >> shift & (1 << BITS) - 1
    if FLOATS:
        sign = (code >> BITS - 1).to(tl.uint32) << 31
        bits = sign | ((code & (1 << BITS - 1) - 1).to(tl.uint32) << (22 if BITS == 4 else 20))
        return bits.to(tl.float32, bitcast=True) * (2.0**126 if BITS == 4 else 2.0**120)
    return code.to(tl.int8).to(tl.float32) if BITS == 8 else code.to(tl.float32) - 8


@triton.jit
def to_floats(
    words, dtype: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Convert the stored words of a tile to its unscaled values [BLOCK_N, BLOCK_K], exactly.

    words: [blocks of inputs, the 2 runs of each in 8 bits, blocks of rows, RUN], flat. FLOATS: values are
    e2m1 or e4m3, not integers.
    """
    N_BLOCKS: tl.constexpr = BLOCK_N // LAYOUT_BLOCK
    K_BLOCKS: tl.constexpr = BLOCK_K // LAYOUT_BLOCK
    if BITS == 8:
        if dtype == tl.float32:
            a, b = code_to_float32(words, 0, BITS, FLOATS), code_to_float32(words, 8, BITS, FLOATS)
        else:
            if FLOATS:
                text: tl.constexpr = E4M3_TO_BF16 if dtype == tl.bfloat16 else E4M3_TO_FP16
            else:
                text: tl.constexpr = BYTES_TO_BF16 if dtype == tl.bfloat16 else BYTES_TO_FP16
            a, b = tl.inline_asm_elementwise(text, "=&r,=&r,r", [words], (dtype.value, dtype.value), True, 2)
        y = tl.join(a, b).reshape(K_BLOCKS, 2, N_BLOCKS, 4, 8, 4, 4, 2, 2).permute(2, 3, 1, 4, 0, 6, 8, 5, 7)
    else:
        if dtype == tl.float32:
            a, b = code_to_float32(words, 0, BITS, FLOATS), code_to_float32(words, 4, BITS, FLOATS)
            c, d = code_to_float32(words, 8, BITS, FLOATS), code_to_float32(words, 12, BITS, FLOATS)
        else:
            if FLOATS:
                text: tl.constexpr = E2M1_TO_BF16 if dtype == tl.bfloat16 else E2M1_TO_FP16
            else:
                text: tl.constexpr = NIBBLES_TO_BF16 if dtype == tl.bfloat16 else NIBBLES_TO_FP16
            a, b, c, d = tl.inline_asm_elementwise(
                text, "=&r,=&r,=&r,=&r,r", [words], (dtype.value,) * 4, True, 2
            )
        y = tl.join(tl.join(a, b), tl.join(c, d)).reshape(K_BLOCKS, N_BLOCKS, 4, 8, 4, 4, 2, 2, 2)
        y = y.permute(1, 2, 8, 3, 0, 5, 7, 4, 6)
    return y.reshape(BLOCK_N, BLOCK_K)


@triton.jit
def inputs_of_group(w, j: tl.constexpr, SCALED_K: tl.constexpr):
    """Return the inputs SCALED_K j ... of a tile w [N, 1, 2 or 4 SCALED_K] -> [N, SCALED_K]."""
    N: tl.constexpr = w.shape[0]
    PARTS: tl.constexpr = w.shape[1] // SCALED_K
    if PARTS > 2:
        even, odd = tl.split(w.reshape(N, 2, 2, SCALED_K).permute(0, 2, 3, 1))
        w = (even if j < 2 else odd).reshape(N, 2 * SCALED_K)
    if PARTS > 1:
        first, second = tl.split(w.reshape(N, 2, SCALED_K).permute(0, 2, 1))
        w = first if j % 2 == 0 else second
    return w


@triton.jit
def sum_quantized(
    rows, valid, weight, scale, tile, start, stop, N, K, BITS: tl.constexpr, FLOATS: tl.constexpr,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sums [BLOCK_N, BLOCK_M] of steps start ... stop - 1 of a tile of outputs, in float32.

    rows [BLOCK_M]: pointers to the K inputs of each token. weight, scale: as for `product_kernel`.
    """
    SCALED_K: tl.constexpr = min(GROUP, BLOCK_K) if GROUP else BLOCK_K  # inputs that share a scale
    LOADED_K: tl.constexpr = max(SCALED_K, LAYOUT_BLOCK)  # inputs of one load
    WORDS: tl.constexpr = LAYOUT_BLOCK * LAYOUT_BLOCK * BITS // 16  # of a layout block
    POWERS: tl.constexpr = scale.dtype.element_ty == tl.uint8  # scales are exponents of powers of two
    N_BLOCKS: tl.constexpr = BLOCK_N // LAYOUT_BLOCK
    dtype: tl.constexpr = tl.float32 if TO_FLOAT32 else rows.dtype.element_ty
    input_, column = tl.arange(0, SCALED_K), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_N, rows.shape[0]), tl.float32)
    word = tl.arange(0, N_BLOCKS * LOADED_K // LAYOUT_BLOCK * WORDS)
    row_words = tl.cdiv(K, LAYOUT_BLOCK) * WORDS  # of a row of layout blocks
    run = word // RUN
    word = run // N_BLOCKS * RUN + word % RUN + run % N_BLOCKS * row_words
    tile_words = weight + row_words.to(tl.int64) * N_BLOCKS * tile + word
    group = start * BLOCK_K // GROUP * N if GROUP else 0
    unit = tl.load(scale + column + group, mask=column < N, other=0)
    for step in range(start, stop):
        for i in tl.static_range(BLOCK_K // LOADED_K):
            w = tl.load(tile_words + (step * BLOCK_K + i * LOADED_K) // LAYOUT_BLOCK * WORDS)
            w = to_floats(w, dtype, BITS, BLOCK_N, LOADED_K, FLOATS)
            for j in tl.static_range(LOADED_K // SCALED_K):
                k = step * BLOCK_K + i * LOADED_K + j * SCALED_K
                inside = (EVEN_K | (k + input_ < K))[None]
                a = tl.load(rows[:, None] + input_[None] + k, mask=valid[:, None] & inside, other=0.0)
                part = inputs_of_group(w, j, SCALED_K)
                # Use each product before the next one starts: Triton overwrites the inputs of products in
                # flight (triton-lang/triton#9433).
                product = tl.dot(part, tl.trans(a.to(w.dtype)), input_precision=PRECISION)
                if POWERS:  # the smallest is subnormal
                    bits = tl.where(unit == 0, 1 << 22, unit.to(tl.int32) << 23)
                    sums += product * bits.to(tl.float32, bitcast=True)[:, None]
                else:
                    sums += product * unit.to(tl.float32)[:, None]
                if GROUP:  # zeros after the last input may have any scale
                    group = tl.minimum(k + SCALED_K, K - 1) // GROUP * N
                    unit = tl.load(scale + column + group, mask=column < N, other=0)
    return sums


@triton.jit
def sum_partials(partial_sums, arrived, worker, first_worker, others, is_later, sums, valid):
    """Store this worker's sums of a tile. In the last worker to arrive, return the sums of all.

    The tile's steps begin in `first_worker` and end `others` workers later. is_later: 0 if they begin this
    worker's steps, else 1. Returns whether this is the last worker, and the sums.
    """
    BLOCK_N: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None]
    part = partial_sums + (worker * 2 + is_later).to(tl.int64) * BLOCK_M * BLOCK_N
    tl.store(part + at, sums, mask=valid[None])
    tl.debug_barrier()  # all threads have stored before the program arrives
    is_last = tl.atomic_add(arrived + first_worker, 1, sem="acq_rel") == others
    if is_last:
        tl.store(arrived + first_worker, 0)
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for other in range(others + 1):  # .cg bypasses L1, which may hold stale data
            part = (first_worker + other) * 2 + tl.minimum(other, 1)
            part = partial_sums + part.to(tl.int64) * BLOCK_M * BLOCK_N
            sums += tl.load(part + at, mask=valid[None], other=0.0, cache_modifier=".cg")
    return is_last, sums


@triton.jit
def product_kernel(
    x, weight, scale, bias, residual, out, partial_sums, arrived, M, N, K,
    BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    RESIDENT: tl.constexpr, PDL: tl.constexpr,
):
    """Compute out [M, N] = x [M, K] @ (weight [N, K] * scale)^T + bias [N] + residual [M, N], if any.

    weight: BITS 4 or 8 in register order, FLOATS: e4m3. scale: [K/GROUP, N], or [N] if GROUP is 0. EVEN_K:
    BLOCK_K divides K. RESIDENT: programs of a multiprocessor, used by the grid only. partial_sums: scratch
    for two tiles per program. arrived: zeros, and zeros again afterwards. Sums are float32.
    """
    wait_for_previous(PDL)
    worker, workers = tl.program_id(1), tl.num_programs(1)
    block_workers = tl.program_id(0) * workers  # number of the first worker of this block of tokens
    steps = tl.cdiv(K, BLOCK_K)
    work = tl.cdiv(N, BLOCK_N) * steps
    share = tl.cdiv(work, workers)
    first = worker * share
    end = tl.minimum(first + share, work)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < M
    for tile in range(first // steps, tl.cdiv(end, steps)):
        start, stop = tl.maximum(first - tile * steps, 0), tl.minimum(end - tile * steps, steps)
        sums = sum_quantized(
            x + row.to(tl.int64) * K, valid, weight, scale, tile, start, stop, N, K, BITS, FLOATS, GROUP,
            EVEN_K, PRECISION, BLOCK_N, BLOCK_K,
        )
        is_last = stop - start == steps
        if stop - start < steps:
            first_worker = tile * steps // share
            others = (tile * steps + steps - 1) // share - first_worker
            is_last, sums = sum_partials(
                partial_sums, arrived, block_workers + worker, block_workers + first_worker, others,
                tl.minimum(start, 1), sums, valid,
            )
        if is_last:
            column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if bias is not None:
                sums += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
            y = tl.trans(sums).to(out.dtype.element_ty)
            block = (tl.program_id(0) * BLOCK_M).to(tl.int64) * N  # offsets within a tile fit 32 bits
            at = tl.arange(0, BLOCK_M)[:, None] * N + column[None]
            inside = valid[:, None] & (column < N)[None]
            if residual is not None:
                y = tl.load(residual + block + at, mask=inside, other=0.0).to(tl.float32) + y.to(tl.float32)
            tl.store(out + block + at, y.to(out.dtype.element_ty), mask=inside)


def block_m(tokens: int, dtype: torch.dtype, bits: int, group: int) -> int:
    """Return BLOCK_M for a number of tokens. bits, group: see `product_kernel`.

    Groups take two tiles of sums. In 8 bits and small groups, tiles of 64 tokens miss tensor cores on a B200.
    """
    largest = 16 if dtype == torch.float32 else 128 if not group else 64 if bits == 4 or group >= 64 else 32
    return min(max(16, triton.next_power_of_2(tokens)), largest)


def tile_configs(tokens: int, dtype: torch.dtype, bits: int, shared: int) -> list[triton.Config]:
    """Return the tiles to try for this BLOCK_M, the default first. All fit in `shared` bytes.

    bits: of a weight's value. The default spills no registers on an A100, an H100 and a B200. RESIDENT:
    programs that a multiprocessor of an H100 holds. Tiles of 16 to 64 tokens were measured on an H200.
    """
    def config(block_n: int, block_k: int, warps: int, stages: int, resident: int) -> triton.Config:
        stage_bytes = block_k * (2 * tokens + block_n * bits // 8)  # upper bound: one stage is in registers
        tile = {"BLOCK_N": block_n, "BLOCK_K": block_k, "RESIDENT": resident}
        return triton.Config(tile, num_warps=warps, num_stages=min(stages, shared // stage_bytes))

    if dtype == torch.float32:  # for tests: products without tensor cores fill registers
        return [config(64, 64, 4, 1, 2)]
    tiles = {
        (16, 4): ((64, 128, 4, 6, 3), (64, 256, 4, 4, 3), (128, 128, 8, 6, 1)),
        (16, 8): ((64, 128, 4, 4, 3), (64, 256, 4, 3, 2)), (64, 4): ((128, 128, 8, 4, 1),),
        (64, 8): ((64, 128, 4, 4, 2), (64, 64, 4, 4, 2)), (128, 8): ((128, 64, 8, 5, 1), (64, 64, 4, 4, 2)),
    }
    return [config(*tile) for tile in tiles.get((tokens, bits), ((64, 128, 4, 5, 2), (64, 64, 4, 8, 2)))]


@cache
def _tuned_kernel(tokens: int, bits: int, shared: int):
    """Return the kernel that times `tile_configs` at its first call for an N, K and group."""
    def milliseconds(call, quantiles):
        try:
            return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)
        except torch.OutOfMemoryError:  # of the benchmark's own buffer: the first tile wins
            return [math.inf] * len(quantiles)

    configs = tile_configs(tokens, torch.bfloat16, bits, shared)
    key = ["N", "K", "BLOCK_M", "BITS", "FLOATS", "GROUP"]
    return triton.autotune(configs, key, do_bench=milliseconds, cache_results=True)(product_kernel)


def program_count(tiles: int, steps: int, processors: float, resident: int) -> int:
    """Return how many programs share the steps of all tiles, at most `resident` per multiprocessor.

    If it makes a program's share at most half larger and leaves at most a tenth of the processors idle, each
    tile is divided evenly: then no program has parts of two tiles, and fewer parts are added.
    """
    share = max(MIN_STEPS, math.ceil(tiles * steps / max(1, int(processors * resident))))
    for even in range(share, share * 3 // 2 + 1):
        count = tiles * steps // even
        if steps % even == 0 and count >= 0.9 * math.ceil(count / processors) * processors:
            return count
    return triton.cdiv(tiles * steps, share)


@torch.library.custom_op("eagle_gpu::linear", mutates_args=())
def linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, outputs: int,
    bits: int, floats: bool, group: int, float32: bool,
) -> Tensor:
    """Multiply x [..., K] by a weight as `product_kernel` takes it, + bias -> [..., N], N = outputs.

    The result is float32 if asked for, else in x's dtype, rounded before it is added to residual [..., N].
    """
    N, K, rows = outputs, x.shape[-1], x.reshape(-1, x.shape[-1])
    out = x.new_empty(*x.shape[:-1], N, dtype=torch.float32 if float32 else x.dtype)
    _, shared, processors = gpu_of(x.device)
    tokens = block_m(len(rows), x.dtype, bits, group)
    configs, blocks = tile_configs(tokens, x.dtype, bits, shared), triton.cdiv(len(rows), tokens)
    # Scratch memory and counters for whichever tile is chosen.
    programs = processors * max(c.kwargs["RESIDENT"] for c in configs)
    columns = processors * max(c.kwargs["RESIDENT"] * c.kwargs["BLOCK_N"] for c in configs)
    partial_sums = torch.empty(2 * columns * tokens, dtype=torch.float32, device=x.device)

    def grid(tile: dict) -> tuple[int, int]:
        tiles, steps = triton.cdiv(N, tile["BLOCK_N"]), triton.cdiv(K, tile["BLOCK_K"])
        return blocks, program_count(tiles, steps, processors / blocks, tile["RESIDENT"])

    constants = {
        "BITS": bits, "FLOATS": floats, "GROUP": group,
        "EVEN_K": all(K % c.kwargs["BLOCK_K"] == 0 for c in configs),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", "BLOCK_M": tokens,
    }
    kernel = product_kernel
    if tile_index is None and len(configs) > 1 and not dist.is_initialized():
        kernel = _tuned_kernel(tokens, bits, shared)
    else:  # ranks would measure different times, and get different sums
        constants |= configs[tile_index or 0].all_kwargs()
    kernel[grid](
        rows.contiguous(), weight, scale, bias, None if residual is None else residual.contiguous(), out,
        partial_sums, arrival_counters(x.device, programs), len(rows), N, K, **constants,
        **launch_options(x.device),
    )
    return out


@linear.register_fake
def _(x, weight, scale, bias, residual, outputs, bits, floats, group, float32):
    return x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32 if float32 else x.dtype)


@with_fallback("linear", QuantizedLinear.product)
def fused_product(layer: QuantizedLinear, x: Tensor, residual: Tensor | None, float32: bool) -> Tensor:
    """`QuantizedLinear.product` in one kernel."""
    if layer.kind and layer.kind.ordered:  # `round_inputs` in the order of the weight
        x = x[..., layer.order]
        x = round_inputs(x, layer.kind.rounded_inputs) if layer.mode in INT8_ACTIVATION_MODES else x
    else:
        x = layer.round_inputs(x)
    weight, scale, shifts, *of_layer = kernel_operands(layer)
    if not layer.kind:
        return linear(x, weight, scale, layer.bias, residual, *of_layer, float32)
    y = linear(x, weight, scale, layer.bias, None, *of_layer, True)
    if shifts is not None:  # they multiply the sums of groups of inputs
        y = y + F.linear(x.float().unflatten(-1, (-1, layer.group)).sum(-1), shifts)
    y = y if float32 else y.to(x.dtype)
    return y if residual is None else residual + y


def kernel_operands(module: Quantized) -> tuple:
    """Return weight, scales, factors of the sums of groups (None without minima), outputs, bits, whether they
    are floats, and group of a module after `reorder`.
    """
    scale, shifts = (getattr(module, name, None) for name in ("group_scales", "shifts"))
    of_layer = module.outputs, 4 if has_nibbles(module) else 8, module.mode in ("f8", MXFP4), module.group
    return module.weight, module.scale if scale is None else scale, shifts, *of_layer


def has_nibbles(module: Quantized) -> bool:
    """Return whether a weight has 4 bits; others are multiplied in 8."""
    return module.mode in ("q4", MXFP4)


def restore(
    module: Quantized, words: Tensor, scale: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weight and scales of a module, or of some of its experts, as `reorder` found them.

    rows [...]: only these rows of the weight, such as a pass's tokens of an embedding; or these experts.
    """
    K, nibbles = module.inputs, has_nibbles(module)
    if rows is not None and words.dim() > 1:
        words, rows = words[rows], None
    if rows is None:
        weight = from_register_order(words, module.outputs, K, nibbles)
    else:
        at, size = rows.flatten(), math.prod(_block_shape(128, K)) // (4 if nibbles else 2)
        blocks = words[: -(-module.outputs // 128) * size].view(-1, size)[at // 128]
        weight = from_register_order(blocks, 128, K, nibbles)
        weight = weight[torch.arange(len(at), device=at.device), at % 128].unflatten(0, rows.shape)
    if module.kind and module.mode != "q4":
        weight = pack_values(module.kind, weight)
    return weight, scale if module.kind else scale.transpose(-1, -2)


def reorder(module: Quantized) -> None:
    """Reorder the weight [..., N, K] and the scales of a module, in place."""
    weight = module.weight if not module.kind or module.mode == "q4" else values(module.kind, module.weight)
    words = [to_register_order(one) for one in weight.view(-1, *weight.shape[-2:])]
    module.weight.data = torch.stack(words) if module.weight.dim() == 3 else words[0]
    module.restore = restore
    if not module.kind:
        module.scale.data = module.scale.transpose(-1, -2).contiguous()
        return
    scales, *minima = expand_scales(module.kind, *module.scales).unbind(-2)
    module.register_buffer("group_scales", scales.transpose(-1, -2).contiguous(), persistent=False)
    if minima:  # the kernel takes 8 from each value of 4 bits
        shifts = has_nibbles(module) * 8 * scales - minima[0]
        module.register_buffer("shifts", shifts, persistent=False)


def fuse(module: nn.Module) -> None:
    """Let a quantized layer compute in one kernel, unless it is fp8."""
    if isinstance(module, QuantizedLinear) and module.fused is None and module.mode != "fp8":
        module.fused = fused_product
        reorder(module)
