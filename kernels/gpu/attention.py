"""Tree attention in one kernel per layer: everything between a layer's wqkv and its wo.

Each token attends to the committed cache slots, all or those in its sliding window, which needs no mask, and
to the slots after them that its tree mask allows. The kernel reads the committed length on the device, so one
captured graph serves every context length. Keys are split over programs (FlashDecoding), into more splits for
longer contexts. Query heads that share a key/value head are rows of one product. The kernel also normalizes
and rotates the pass's own keys and writes them and the values to the cache.

Programs that share a tile write partial sums to scratch memory. The last one to arrive adds them in the order
of the keys, so results do not depend on the order of arrival.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from kernels.gpu.device import INTERPRETED, gpu_of
from kernels.gpu.launch import arrival_counters, launch_options, wait_for_previous

THREE_STAGES = 128 * 1024  # bytes of shared memory for three stages of loads
HOPPER = 200 * 1024  # bytes of shared memory that compute capabilities 9.0 and 10.0 have
MAX_SPLITS = 32
LOG2_E = 1.4426950408889634
LOWEST_SCORE = tl.constexpr(-1e30)  # finite, so that a row without keys stays a number


@triton.jit
def from_cache(x, dtype: tl.constexpr):
    """Convert values loaded from a cache, of any dtype; bytes (uint8) are e4m3 (`kernels.kv_dtypes`).

    GPUs of compute capability 8.9 and later have instructions for it. For others and Triton's interpreter,
    move exponent and mantissa to those of a float16, which represents every e4m3 number and whose exponents
    are 8 larger. Subnormal numbers come out right, too.
    """
    if x.dtype != tl.uint8:
        y = x
    elif cuda_capability_geq(8, 9):
        y = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = x.to(tl.uint16)
        magnitude = bits & 0x7F
        y = ((bits & 0x80) << 8 | magnitude << 7).to(tl.float16, bitcast=True) * 256.0
        y = tl.where(magnitude == 0x7F, float("nan"), y)
    return y.to(dtype)


@triton.jit
def to_cache(x, dtype: tl.constexpr):
    """Convert x to the dtype of a cache. To bytes: e4m3, ties to even, larger numbers to 448."""
    if dtype != tl.uint8:
        y = x
    elif cuda_capability_geq(8, 9):
        y = x.to(tl.float32).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        x = x.to(tl.float32)
        sign = x.to(tl.uint32, bitcast=True) >> 24 & 0x80
        magnitude = tl.minimum(tl.abs(x), 448.0)
        # Keep 3 of 23 mantissa bits: add half of the last one, except for a tie that is already even.
        bits = magnitude.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3)
        # Below 2^-6, e4m3's steps are 2^-9, like those of float32 from 2^14 on: that sum rounds correctly.
        subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xFF
        byte = tl.where(magnitude < 0.015625, subnormal, normal)
        y = tl.where(x != x, 0x7F, byte) | sign
    return y.to(dtype)


@triton.jit
def load_norm(weight, half, HEAD_DIM: tl.constexpr):
    """Load the two halves [BLOCK_HALF] of a norm's weight, if there is one."""
    norm = None
    if weight is not None:
        first, mask = weight + half, half < HEAD_DIM // 2
        norm = tl.load(first, mask=mask, other=0.0), tl.load(first + HEAD_DIM // 2, mask=mask, other=0.0)
    return norm


@triton.jit
def load_rotated(x, at, mask, norm, eps, cos, sin, angle, HEAD_DIM: tl.constexpr):
    """Load the halves [R, BLOCK_HALF] of heads x[at]; apply RMSNorm, if any, and RoPE at cos, sin [angle]."""
    first = tl.load(x + at, mask=mask, other=0.0)
    second = tl.load(x + at + HEAD_DIM // 2, mask=mask, other=0.0)
    cos, sin = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if norm is not None:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
        a = (a * factor * norm[0][None].to(tl.float32)).to(first.dtype).to(tl.float32)
        b = (b * factor * norm[1][None].to(tl.float32)).to(first.dtype).to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def add_tile(q, k, values, visible, softmax, scale):
    """Add a tile of keys and values [BLOCK_N, ...] to the online softmax of BLOCK_M rows.

    q, k: two halves each. visible [BLOCK_M or 1, BLOCK_N]. softmax: the maximum score so far and the sum of
    exponentials [BLOCK_M], the weighted sum of values [BLOCK_M, BLOCK_D].
    """
    PRECISION: tl.constexpr = "ieee" if values.dtype == tl.float32 else "tf32"
    peak, weight, sums = softmax
    scores = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
    # Two products that add to one accumulator are miscompiled on Blackwell (triton-lang/triton#10821). Scaled
    # apart, or Triton would fuse the sum into one accumulator.
    if cuda_capability_geq(10) and values.dtype != tl.float32:
        scores = scores * scale + tl.dot(q[1], tl.trans(k[1]), input_precision=PRECISION) * scale
    else:
        scores = tl.dot(q[1], tl.trans(k[1]), scores, input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    decay, p = tl.exp2(peak - new_peak), tl.exp2(scores - new_peak[:, None])
    sums = tl.dot(p.to(values.dtype), values, sums * decay[:, None], input_precision=PRECISION)
    return new_peak, weight * decay + tl.sum(p, 1), sums


@triton.jit
def attend_to_cache(
    q, k, v, local, valid, oldest, committed, first, end, softmax, scale, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, CACHED_NODES: tl.constexpr,
):
    """Add the cached slots first ... end - 1. Slots from `committed` on are tree nodes of earlier passes."""
    half, depth = tl.arange(0, q[0].shape[1]), tl.arange(0, softmax[2].shape[1])
    for start in range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        live, offset = slot < end, slot[:, None] * HEAD_DIM
        in_half = live[:, None] & (half < HEAD_DIM // 2)[None]
        in_head = live[:, None] & (depth < HEAD_DIM)[None]
        ka = tl.load(k + offset + half[None], mask=in_half, other=0)
        kb = tl.load(k + offset + HEAD_DIM // 2 + half[None], mask=in_half, other=0)
        values = tl.load(v + offset + depth[None], mask=in_head, other=0)
        keys = from_cache(ka, q[0].dtype), from_cache(kb, q[0].dtype)
        values = from_cache(values, q[0].dtype)
        visible = live[None]
        if oldest is not None:
            visible = visible & (slot[None] >= oldest[:, None])
        if CACHED_NODES:
            is_node = valid[:, None] & (live & (slot >= committed))[None]
            allowed = tl.load(local + (slot - committed)[None], mask=is_node, other=0) != 0
            visible = visible & ((slot < committed)[None] | allowed)
        softmax = add_tile(q, keys, values, visible, softmax, scale)
    return softmax


@triton.jit
def attend_to_pass(
    q, qkv, key_head, value_head, k_norm, eps, cos, sin, k, v, local, valid, cached, first, end, writes,
    softmax, scale, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Add the pass's own keys at slots first ... end - 1; if `writes`, write them to the cache."""
    half, depth = tl.arange(0, q[0].shape[1]), tl.arange(0, softmax[2].shape[1])
    norm = load_norm(k_norm, half, HEAD_DIM)
    for start in tl.range(first, end, BLOCK_N, num_stages=1):
        slot = start + tl.arange(0, BLOCK_N)
        t, live = slot - cached, slot < end
        in_half = live[:, None] & (half < HEAD_DIM // 2)[None]
        in_head = live[:, None] & (depth < HEAD_DIM)[None]
        ka, kb = load_rotated(
            qkv, t[:, None] * WIDTH + key_head + half[None], in_half, norm, eps, cos, sin,
            t[:, None] * (HEAD_DIM // 2) + half[None], HEAD_DIM,
        )
        values = tl.load(qkv + t[:, None] * WIDTH + value_head + depth[None], mask=in_head, other=0.0)
        # Rounded to the cache's dtype, so that later passes read the same numbers.
        ka, kb = to_cache(ka, k.dtype.element_ty), to_cache(kb, k.dtype.element_ty)
        values = to_cache(values, v.dtype.element_ty)
        if writes:
            to = slot[:, None] * HEAD_DIM
            tl.store(k + to + half[None], ka, mask=in_half)
            tl.store(k + to + HEAD_DIM // 2 + half[None], kb, mask=in_half)
            tl.store(v + to + depth[None], values, mask=in_head)
        visible = tl.load(local + t[None], mask=valid[:, None] & live[None], other=0) != 0
        keys = from_cache(ka, q[0].dtype), from_cache(kb, q[0].dtype)
        values = from_cache(values, q[0].dtype)
        softmax = add_tile(q, keys, values, live[None] & visible, softmax, scale)
    return softmax


@triton.jit
def merge_splits(partial_sums, partial_softmax, arrived, split, splits, valid, softmax):
    """Store this program's part. In the last of `splits` programs to arrive, return all parts merged.

    Returns whether this is the last program, and its sum of exponentials and of values.
    """
    peak, weight, sums = softmax
    BLOCK_M: tl.constexpr = sums.shape[0]
    BLOCK_D: tl.constexpr = sums.shape[1]
    row, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    at = row[:, None] * BLOCK_D + depth[None]
    tl.store(partial_sums + split * BLOCK_M * BLOCK_D + at, sums, mask=valid[:, None])
    tl.store(partial_softmax + split * 2 * BLOCK_M + row, peak)
    tl.store(partial_softmax + split * 2 * BLOCK_M + BLOCK_M + row, weight)
    tl.debug_barrier()  # all threads have stored before the program arrives
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1
    if is_last:
        tl.store(arrived, 0)
        peak, weight = tl.full((BLOCK_M,), LOWEST_SCORE, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
        sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for other in range(splits):  # .cg bypasses L1, which may hold stale data
            part = partial_softmax + other * 2 * BLOCK_M + row
            other_peak = tl.load(part, cache_modifier=".cg")
            other_weight = tl.load(part + BLOCK_M, cache_modifier=".cg")
            part = partial_sums + other * BLOCK_M * BLOCK_D + at
            other_sums = tl.load(part, mask=valid[:, None], other=0.0, cache_modifier=".cg")
            new_peak = tl.maximum(peak, other_peak)
            decay, other_decay = tl.exp2(peak - new_peak), tl.exp2(other_peak - new_peak)
            weight = weight * decay + other_weight * other_decay
            sums = sums * decay[:, None] + other_sums * other_decay[:, None]
            peak = new_peak
    return is_last, weight, sums


@triton.jit
def split_keys(keys, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """Return the number of splits of `keys` keys, and the keys of each, a multiple of BLOCK_N."""
    splits = tl.minimum(tl.maximum(tl.cdiv(keys, 2 * BLOCK_N), 1), SPLITS)
    span = tl.cdiv(tl.cdiv(keys, BLOCK_N), splits) * BLOCK_N
    return tl.cdiv(keys, span), span


@triton.jit
def attend_kernel(
    qkv, cos, sin, q_norm, k_norm, k, v, length, local, oldest, out, partial_sums, partial_softmax, arrived,
    T, M, S, eps, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    CACHED_NODES: tl.constexpr, PDL: tl.constexpr,
):
    """Compute BLOCK_M rows of one key/value head of one sequence, over one split of the keys.

    A row is one of the GROUP query heads of one of T tokens. See `attend` for tensors. k, v [B, HEADS, S,
    HEAD_DIM]. CACHED_NODES: M > T. partial_sums, partial_softmax: scratch for SPLITS programs per tile.
    arrived: zeros, and zeros again afterwards.
    """
    wait_for_previous(PDL)
    block, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = pair // HEADS, pair % HEADS
    committed = tl.load(length + b).to(tl.int32)
    cached, total = committed + M - T, committed + M  # slots that are already in the cache, all slots
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    t, valid = row // GROUP, row < GROUP * T
    first = 0
    if oldest is not None:
        oldest = tl.load(oldest + b * T + t, mask=valid, other=1 << 30).to(tl.int32)
        first = tl.maximum(tl.minimum(tl.min(oldest, 0), cached), 0) // BLOCK_N * BLOCK_N
    splits, span = split_keys(total - first, BLOCK_N, SPLITS)
    if split < splits:
        half = tl.arange(0, max(16, BLOCK_D // 2))
        WIDTH: tl.constexpr = (HEADS * GROUP + 2 * HEADS) * HEAD_DIM
        # Offsets within a sequence fit 32 bits, offsets of a sequence need 64.
        sequence = (b * T).to(tl.int64)
        angles, keys = sequence * (HEAD_DIM // 2), pair.to(tl.int64) * S * HEAD_DIM
        qkv, cos, sin, k, v = qkv + sequence * WIDTH, cos + angles, sin + angles, k + keys, v + keys
        allowed = local + sequence * M + t[:, None] * M
        q = load_rotated(
            qkv, t[:, None] * WIDTH + (head * GROUP + row % GROUP)[:, None] * HEAD_DIM + half[None],
            valid[:, None] & (half < HEAD_DIM // 2)[None], load_norm(q_norm, half, HEAD_DIM), eps, cos, sin,
            t[:, None] * (HEAD_DIM // 2) + half[None], HEAD_DIM,
        )
        peak, weight = tl.full((BLOCK_M,), LOWEST_SCORE, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
        softmax = peak, weight, tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        first += split * span
        end = tl.minimum(first + span, total)
        softmax = attend_to_cache(
            q, k, v, allowed, valid, oldest, committed, first, tl.minimum(end, cached), softmax, scale,
            HEAD_DIM, BLOCK_N, CACHED_NODES,
        )
        key_head = (HEADS * GROUP + head) * HEAD_DIM
        softmax = attend_to_pass(
            q, qkv, key_head, key_head + HEADS * HEAD_DIM, k_norm, eps, cos, sin, k, v, allowed + M - T,
            valid, cached, tl.maximum(first, cached), end, block == 0, softmax, scale, WIDTH, HEAD_DIM,
            min(BLOCK_N, 32),
        )
        is_last, weight, sums = splits == 1, softmax[1], softmax[2]
        if splits > 1:
            tile = pair * tl.num_programs(0) + block
            partial_sums += tile.to(tl.int64) * SPLITS * BLOCK_M * BLOCK_D
            partial_softmax += tile * SPLITS * 2 * BLOCK_M
            is_last, weight, sums = merge_splits(
                partial_sums, partial_softmax, arrived + tile, split, splits, valid, softmax
            )
        if is_last:
            depth = tl.arange(0, BLOCK_D)
            to = (t * (HEADS * GROUP) + head * GROUP + row % GROUP)[:, None] * HEAD_DIM + depth[None]
            result = (sums / tl.where(weight > 0, weight, 1.0)[:, None]).to(out.dtype.element_ty)
            mask = valid[:, None] & (depth < HEAD_DIM)[None]
            tl.store(out + sequence * HEADS * GROUP * HEAD_DIM + to, result, mask=mask)


def tile_config(rows: int, dtype: torch.dtype, shared: int, head_dim: int) -> tuple[int, int, int, int]:
    """Return BLOCK_M, BLOCK_N, warps and stages for `rows` query rows of a key/value head.

    shared: bytes of shared memory. With few of them, fewer stages of loads are in flight.
    """
    if dtype == torch.float32 and not INTERPRETED:  # without tensor cores, products fill registers
        return 16, 16, 4, 1
    if head_dim > 128:  # Gemma 3 has heads of 256
        return (16 if rows <= 16 else 32 if rows <= 32 else 64), 32, 8, 2
    stages = 3 if shared >= THREE_STAGES else 2
    if rows <= 32:
        return (16 if rows <= 16 else 32), 64, 4, stages
    # On Hopper four warps multiply 64 rows at once; four more would compute the same. On an A100 four warps
    # spill, as do blocks of 128.
    return 64, 64, 4 if shared >= HOPPER else 8, stages


@torch.library.custom_op("eagle_gpu::attend", mutates_args=("kv",))
def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    kv: Tensor, layer: int, length: Tensor, local: Tensor, oldest: Tensor | None = None,
) -> Tensor:
    """Attend from qkv [B, T, (nh + 2*nkv)*hd] as `wqkv` returns it -> [B, T, nh*hd].

    Query and key heads get RMSNorm (if there are weights [hd]) and RoPE by cos, sin [B, T, hd/2]. Keys and
    values go to slots length [B] + M - T ... of this layer of kv [L, 2, B, nkv, S, hd], float8 if it is
    uint8. Every token attends to the first `length` slots, with `oldest` [B, T] from that slot on, and to
    those of the next M slots that local [B, T, M] allows. Scores and sums are float32.
    """
    (B, T, width), (_, _, _, nkv, S, hd) = qkv.shape, kv.shape
    M, nh, gpu = local.shape[2], width // hd - 2 * nkv, gpu_of(qkv.device)
    rows, keys, warps, stages = tile_config(nh // nkv * T, qkv.dtype, gpu.shared_memory, hd)
    blocks = triton.cdiv(nh // nkv * T, rows)
    splits = max(1, min(MAX_SPLITS, gpu.multiprocessors // (blocks * nkv * B)))
    depth = max(16, triton.next_power_of_2(hd))
    out, tiles = qkv.new_empty(B, T, nh * hd), B * nkv * blocks if splits > 1 else 1  # with scratch memory
    scratch = (qkv.new_empty(tiles * splits * rows * n, dtype=torch.float32) for n in (depth, 2))
    attend_kernel[blocks, splits, B * nkv](
        qkv.contiguous(), cos.contiguous(), sin.contiguous(), q_norm, k_norm, kv[layer, 0], kv[layer, 1],
        length.contiguous(), local.contiguous(), None if oldest is None else oldest.contiguous(), out,
        *scratch, arrival_counters(qkv.device, tiles), T, M, S, eps, hd**-0.5 * LOG2_E, HEADS=nkv,
        GROUP=nh // nkv, HEAD_DIM=hd, BLOCK_D=depth, BLOCK_M=rows, BLOCK_N=keys, SPLITS=splits,
        CACHED_NODES=M > T, num_warps=warps, num_stages=stages, **launch_options(qkv.device),
    )
    return out


@attend.register_fake
def _(qkv, cos, sin, q_norm, k_norm, eps, kv, layer, length, local, oldest=None):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] - 2 * kv.shape[3] * kv.shape[5])
