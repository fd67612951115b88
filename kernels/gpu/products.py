"""Products with quantized weights, dequantized in registers (W8A16, W4A16).

Decoding is bound by reading weights, so int8 should take half the time of bfloat16, for one token and for a
whole tree. (In 16 bits, cuBLAS on an H200 is as fast as such a kernel up to 32 tokens, and faster above.)
Compilers fuse the dequantization into a product with one token only (gpt-fast#218); for more tokens they
write the weight out whole and read it again. This kernel serves any number of tokens and reads a weight once.
Weights are stored in the order of the tensor cores' registers (`kernels.gpu.registers`). A weight is the left
operand: tiles of tensor cores have at least 64 rows, which one token would leave empty.

Stream-K (Osama et al. 2023): the BLOCK_K steps of all tiles, one tile after the other, are divided evenly
among all programs that the GPU can hold, so that narrow layers occupy every multiprocessor. Programs that
share a tile write partial sums to scratch memory; the last one to arrive adds them in the order of the
inputs, so results do not depend on the order of arrival. Programs of several blocks of tokens run at the same
time over the same weights, which the later ones find in L2.
"""
from __future__ import annotations

import math

import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device import INTERPRETED, gpu_of
from kernels.gpu.fallback import with_fallback
from kernels.gpu.launch import arrival_counters, launch_options, wait_for_previous
from kernels.gpu.registers import (
    LAYOUT_BLOCK,
    RUN,
    block_shape,
    from_register_order,
    to_floats,
    to_register_order,
)
from kernels.quantized import INT8_ACTIVATION_MODES, MXFP4, Quantized, QuantizedLinear, round_inputs
from kernels.stored import expand_scales, pack_values, values

PREFETCHED_STEPS = tl.constexpr(3)  # of 16-bit weights that a program asks L2 for while it waits
MIN_STEPS = 4  # per program: with fewer, adding partial sums costs more than it saves
# The interpreter has no inline assembly and no bfloat16 products; float32 gives the same values.
TO_FLOAT32 = tl.constexpr(INTERPRETED)


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
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
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
                product = tl.dot(part, tl.trans(a.to(w.dtype)), input_precision="ieee")
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
def add_floats(
    sums, rows, valid, weight, start, stop, K, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr = "ieee", STAGES: tl.constexpr = None,
):
    """Add steps start ... stop - 1 to sums [BLOCK_N, BLOCK_M].

    rows [BLOCK_M], weight [BLOCK_N]: pointers to the K inputs of tokens and outputs. PRECISION: of float32.
    """
    for step in tl.range(start, stop, num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (EVEN_K | (k < K))[None]
        a = tl.load(rows[:, None] + k[None], mask=valid[:, None] & inside, other=0.0)
        w = tl.load(weight[:, None] + k[None], mask=inside, other=0.0)
        if TO_FLOAT32:
            a, w = a.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(w, tl.trans(a), sums, input_precision=PRECISION)
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
def outputs_of(tile, N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the outputs of a tile [BLOCK_N]. GATED: half of them gates, half those that they multiply."""
    n = tl.arange(0, BLOCK_N)
    if GATED:
        n = tile * (BLOCK_N // 2) + n % (BLOCK_N // 2) + n // (BLOCK_N // 2) * (N // 2)
    else:
        n += tile * BLOCK_N
    return n


@triton.jit
def prefetch(weight, first, end, steps, N, K, GATED: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Ask L2 for 16-bit weights of the first steps of a program's first ... end - 1."""
    text: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    line = tl.arange(0, BLOCK_K // 64) * 64
    for step in range(first, tl.minimum(first + PREFETCHED_STEPS, end)):
        rows = weight + outputs_of(step // steps, N, BLOCK_N, GATED).to(tl.int64) * K
        pointers = rows[:, None] + (step % steps * BLOCK_K + line)[None]
        tl.inline_asm_elementwise(text, "=r,l", [pointers], tl.int32, False, 1)


@triton.jit
def sum_tile(
    rows, valid, weight, scale, tile, start, stop, N, K, BITS: tl.constexpr, FLOATS: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`sum_quantized`, or the same sums of a 16-bit weight."""
    if BITS == 16:
        n = tl.minimum(outputs_of(tile, N, BLOCK_N, GATED), N - 1).to(tl.int64)
        sums = tl.zeros((BLOCK_N, rows.shape[0]), tl.float32)
        sums = add_floats(sums, rows, valid, weight + n * K, start, stop, K, EVEN_K, BLOCK_K)
    else:
        sums = sum_quantized(
            rows, valid, weight, scale, tile, start, stop, N, K, BITS, FLOATS, GROUP, EVEN_K, BLOCK_N, BLOCK_K
        )
    return sums


@triton.jit
def store_outputs(
    sums, tile, token, first_row, row, valid, totals, shifts, bias, residual, squares, out, norm, weighted,
    next_squares, N, K, TILES, eps, GROUP: tl.constexpr, GATED: tl.constexpr,
):
    """Compute a tile's outputs from its sums [BLOCK_N, BLOCK_M], see `product_kernel`.

    token, first_row + row [BLOCK_M]: rows of x and of the outputs.
    """
    BLOCK_N: tl.constexpr = sums.shape[0]
    BLOCK_M: tl.constexpr = sums.shape[1]
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    dtype: tl.constexpr = out.dtype.element_ty
    if shifts is not None:
        n, groups = tl.minimum(outputs_of(tile, N, BLOCK_N, GATED), N - 1), K // GROUP
        totals, shifts = totals + token.to(tl.int64) * groups, shifts + n.to(tl.int64) * groups
        groups_of_16 = tl.cdiv(groups, 16)
        sums = add_floats(sums, totals, valid, shifts, 0, groups_of_16, groups, False, 16, "tf32x3", 1)
    if squares is not None:
        total, some = tl.zeros((BLOCK_M,), tl.float32), tl.arange(0, 16)
        for first in range(0, TILES, 16):
            at, mask = (first + some)[:, None] * BLOCK_M + row[None], (first + some < TILES)[:, None]
            total += tl.sum(tl.load(squares + at, mask=mask, other=0.0), 0)
        sums *= tl.rsqrt(total / K + eps)[None]
    if bias is not None:
        n = outputs_of(tile, N, BLOCK_N, GATED)
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(sums.reshape(2, WIDTH, BLOCK_M).permute(1, 2, 0))
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        sums = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        N = N // 2
    column, y = tl.arange(0, WIDTH) + tile * WIDTH, tl.trans(sums).to(dtype)
    first = first_row * N  # offsets within a tile fit 32 bits
    at, inside = row[:, None] * N + column[None], valid[:, None] & (column < N)[None]
    if residual is not None:
        y = tl.load(residual + first + at, mask=inside, other=0.0).to(tl.float32) + y.to(tl.float32)
    tl.store(out + first + at, y.to(dtype), mask=inside)
    if norm is not None:
        y = y.to(dtype).to(tl.float32)
        tl.store(weighted + at, (y * tl.load(norm + column)[None].to(tl.float32)).to(dtype), mask=inside)
        tl.store(next_squares + tile * BLOCK_M + row, tl.sum(tl.where(valid[:, None], y * y, 0.0), 1))


@triton.jit
def product_kernel(
    x, weight, scale, totals, shifts, bias, residual, squares, out, norm, weighted, next_squares, order,
    tiles, partial_sums, arrived, M, N, K, TILES, STRIDE, SHARING, eps, BITS: tl.constexpr,
    FLOATS: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """Compute out [M, N] = x [M, K] @ (weight [N, K] * scale)^T, and what follows it, in this order.

    weight: BITS 4 or 8 in register order, FLOATS: e4m3 or e2m1; or 16, without scale. scale: [K/GROUP, N], or
    [N] if GROUP is 0. totals [M, K/GROUP], shifts [N, K/GROUP]: of weights with minima, the sums of groups of
    inputs and their factors. squares [TILES, BLOCK_M]: sums of squares of each token, whose RMSNorm's factor
    multiplies the product. bias [N]. GATED: SwiGLU of the first and the second half of the N outputs.
    residual [M, N]: is added. norm [N]: also write weighted = out * norm, and out's sums of squares by tile.
    squares, norm: for one block of tokens, and tiles of whole outputs, as GATED.

    order, tiles: of `kernels.gpu.experts.sort_kernel`. A block of rows is then a tile of assignments of one
    expert, one program computes a whole tile of outputs, and SHARING assignments share a token of x. Weights
    [E, STRIDE], scale, shifts and bias are those of all experts.

    EVEN_K: BLOCK_K divides K. partial_sums: scratch for two tiles per program. arrived: zeros, and zeros
    again afterwards. Sums are float32.
    """
    block, worker, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    steps = tl.cdiv(K, BLOCK_K)
    work = tl.cdiv(N, BLOCK_N) * steps
    share = tl.cdiv(work, workers)
    first, end = worker * share, tl.minimum(worker * share + share, work)
    if PDL and BITS == 16 and tiles is None:  # weights do not depend on the kernel before this one
        prefetch(weight, first, end, steps, N, K, GATED, BLOCK_N, BLOCK_K)
    wait_for_previous(PDL)
    if tiles is not None:
        tile = tiles + 3 * block
        expert, first, end = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
        of_expert = expert * N * (K // GROUP if GROUP else 1)
        weight += expert * STRIDE
        if scale is not None:
            scale += of_expert
        if shifts is not None:
            shifts += of_expert
        if bias is not None:
            bias += expert * N
        if first < end:
            valid = first + tl.arange(0, BLOCK_M) < end
            row = tl.load(order + first + tl.arange(0, BLOCK_M), mask=valid, other=0)
            token = row // SHARING
            sums = sum_tile(
                x + token.to(tl.int64) * K, valid, weight, scale, worker, 0, steps, N, K, BITS, FLOATS, GROUP,
                GATED, EVEN_K, BLOCK_N, BLOCK_K,
            )
            store_outputs(
                sums, worker, token, 0, row.to(tl.int64), valid, totals, shifts, bias, residual, squares, out,
                norm, weighted, next_squares, N, K, TILES, eps, GROUP, GATED,
            )
    else:
        first_row, row = block * BLOCK_M, tl.arange(0, BLOCK_M)
        token, valid = first_row + row, first_row + row < M
        rows = x + token.to(tl.int64) * K
        for tile in range(first // steps, tl.cdiv(end, steps)):
            start, stop = tl.maximum(first - tile * steps, 0), tl.minimum(end - tile * steps, steps)
            sums = sum_tile(
                rows, valid, weight, scale, tile, start, stop, N, K, BITS, FLOATS, GROUP, GATED, EVEN_K,
                BLOCK_N, BLOCK_K,
            )
            is_last = stop - start == steps
            if stop - start < steps:
                first_worker = tile * steps // share
                others = (tile * steps + steps - 1) // share - first_worker
                is_last, sums = sum_partials(
                    partial_sums, arrived, block * workers + worker, block * workers + first_worker, others,
                    tl.minimum(start, 1), sums, valid,
                )
            if is_last:
                store_outputs(
                    sums, tile, token, first_row.to(tl.int64), row, valid, totals, shifts, bias, residual,
                    squares, out, norm, weighted, next_squares, N, K, TILES, eps, GROUP, GATED,
                )


def block_m(tokens: int, dtype: torch.dtype, bits: int, group: int) -> int:
    """Return BLOCK_M for a number of tokens. bits, group: see `product_kernel`.

    Groups take two tiles of sums. In 8 bits and small groups, tiles of 64 tokens miss tensor cores on a B200.
    """
    largest = 16 if dtype == torch.float32 else 128 if not group else 64 if bits == 4 or group >= 64 else 32
    return min(max(16, triton.next_power_of_2(tokens)), largest)


def tile_config(
    tokens: int, dtype: torch.dtype, bits: int, shared: int, grouped: bool = False
) -> tuple[triton.Config, int]:
    """Return the tile for this BLOCK_M, and how many of its programs a multiprocessor of an H100 holds.

    bits: of a weight's value. grouped: of experts. The tile fits in `shared` bytes and spills no registers on
    an A100, an H100 and a B200. On an H200 no other tile was more than 8 % faster for any layer of an 8B
    (benchmarks/results/gpu-products.json).
    """
    if dtype == torch.float32 and (grouped or bits < 16):  # for tests: no tensor cores, registers are filled
        block_n, block_k, warps, stages, resident = 64, 64, 4, 1, 2
    elif grouped:
        block_n, block_k, warps, stages, resident = 64, 128 if tokens == 16 else 64, 4, 4, 1
    else:
        block_n, block_k, warps, stages, resident = {
            (16, 4): (64, 128, 4, 6, 3), (16, 8): (64, 128, 4, 4, 3), (64, 4): (128, 128, 8, 4, 1),
            (64, 8): (64, 128, 4, 4, 2), (128, 8): (128, 64, 8, 5, 1), (16, 16): (64, 128, 4, 4, 1),
        }.get((tokens, bits), (64, 128, 4, 5, 2))
    stage_bytes = block_k * (2 * tokens + block_n * bits // 8)  # upper bound: one stage is in registers
    tile = {"BLOCK_N": block_n, "BLOCK_K": block_k}
    return triton.Config(tile, num_warps=warps, num_stages=min(stages, shared // stage_bytes)), resident


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
    x: Tensor, weight: Tensor, scale: Tensor | None, totals: Tensor | None, shifts: Tensor | None,
    outputs: int, bits: int, floats: bool, group: int, bias: Tensor | None = None,
    residual: Tensor | None = None, squares: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, gated: bool = False, float32: bool = False, order: Tensor | None = None,
    tiles: Tensor | None = None, block: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `product_kernel` -> (out [..., N], weighted [..., N], squares [tiles, BLOCK_M]), N = outputs.

    x [..., K]. With `order` [S] and `tiles` of `block` assignments, x is [S, K], or [R, K] if the assignments
    of a token share it, and out [S, N]. out is float32 if asked for, else in x's dtype, rounded before
    residual is added. Without `norm`, the last two are empty.
    """
    N, K, rows = outputs, x.shape[-1], x.reshape(-1, x.shape[-1]).contiguous()
    results = _results(x, weight, scale, totals, shifts, outputs, bits, floats, group, bias, residual,
                       squares, norm, eps, gated, float32, order)
    _, shared, processors = gpu_of(x.device)
    tokens = block or block_m(len(rows), x.dtype, bits, group)
    config, resident = tile_config(tokens, x.dtype, bits, shared, tiles is not None)
    tile, blocks = config.all_kwargs(), triton.cdiv(len(rows), tokens) if tiles is None else len(tiles)
    workers, scratch = triton.cdiv(N, tile["BLOCK_N"]), 0
    if tiles is None:
        steps = triton.cdiv(K, tile["BLOCK_K"])
        workers = program_count(workers, steps, processors / blocks, resident)
        scratch = blocks * workers
    product_kernel[blocks, workers](
        rows, weight, scale, None if totals is None else totals.contiguous(), shifts, bias,
        None if residual is None else residual.contiguous(), squares, results[0], norm,
        *(results[1:] if norm is not None else (None, None)), order, tiles,
        x.new_empty(2 * scratch * tokens * tile["BLOCK_N"], dtype=torch.float32),
        arrival_counters(x.device, scratch), len(rows), N, K, 0 if squares is None else len(squares),
        weight[0].numel(), 1 if order is None else len(order) // len(rows), eps, BITS=bits, FLOATS=floats,
        GROUP=group, GATED=gated, EVEN_K=K % tile["BLOCK_K"] == 0, BLOCK_M=tokens, **tile,
        **launch_options(x.device),
    )
    return results


@linear.register_fake
def _results(
    x, weight, scale, totals, shifts, outputs, bits, floats, group, bias=None, residual=None, squares=None,
    norm=None, eps=0.0, gated=False, float32=False, order=None, tiles=None, block=0,
):
    shape = *(x.shape[:-1] if order is None else order.shape), outputs // (2 if gated else 1)
    out = x.new_empty(shape, dtype=torch.float32 if float32 else x.dtype)
    weighted = x.new_empty(0 if norm is None else out.shape)
    return out, weighted, x.new_empty(0 if norm is None else (outputs // 64, 16), dtype=torch.float32)


@with_fallback("linear", QuantizedLinear.product)
def fused_product(layer: QuantizedLinear, x: Tensor, residual: Tensor | None, float32: bool) -> Tensor:
    """`QuantizedLinear.product` in one kernel."""
    return linear(*kernel_operands(layer, x), layer.bias, residual, float32=float32)[0]


def kernel_operands(module: Quantized, x: Tensor) -> tuple:
    """Return the first arguments of `linear`, for a module after `reorder`: x as the mode rounds it, weight,
    scales, sums of x's groups and their factors (None without minima), outputs, bits, floats, group.
    """
    if module.kind and module.kind.ordered:  # `round_inputs` in the order of the weight
        x = x[..., module.order]
        x = round_inputs(x, module.kind.rounded_inputs) if module.mode in INT8_ACTIVATION_MODES else x
    else:
        x = module.round_inputs(x)
    scale, shifts = (getattr(module, name, None) for name in ("group_scales", "shifts"))
    totals = None if shifts is None else x.float().unflatten(-1, (-1, module.group)).sum(-1)
    of_module = module.outputs, 4 if has_nibbles(module) else 8, module.mode in ("f8", MXFP4), module.group
    return x, module.weight, module.scale if scale is None else scale, totals, shifts, *of_module


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
        at, size = rows.flatten(), math.prod(block_shape(128, K)) // (4 if nibbles else 2)
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
