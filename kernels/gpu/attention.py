"""Tree attention in one kernel a layer: what stands between a layer's wqkv and its wo.

A row of a pass sees every committed slot of the cache, or those of its window, which needs no mask, and of
the slots after them those that its tree allows. The number of committed slots is read on the device, so one
captured graph serves every context. The keys are divided among programs (split over keys, as in
FlashDecoding) by that length: few where the text is short. Queries that share a key/value head are rows of
one product. The pass's own keys and values come out of qkv and go into the cache on the way.

Programs that share a row leave their parts of the softmax in scratch memory. The last one to arrive adds the
parts up in the order of the keys: results do not depend on the order of arrival.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.float8 import converts, loaded, stored
from kernels.gpu.here import INTERPRETED, is_blackwell, programs_at_once, shared_memory
from kernels.gpu.launch import begin, counters, options

PLENTY = 128 * 1024  # bytes of shared memory
AMPLE = 200 * 1024  # which compute capabilities 9.0 and 10.0 have
LOG2_E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(-1e30)  # below every score, and finite: a row that has seen nothing yet stays a number


@triton.jit
def turned(a, b, norm_a, norm_b, eps, cos, sin, HEAD: tl.constexpr, NORM: tl.constexpr):
    """The halves a, b [R, HALF] of heads: divided by their root mean square, if NORM, and rotated."""
    x, y = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        share = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD + eps)[:, None]
        x = (x * share * norm_a[None].to(tl.float32)).to(a.dtype).to(tl.float32)
        y = (y * share * norm_b[None].to(tl.float32)).to(a.dtype).to(tl.float32)
    return (x * cos - y * sin).to(a.dtype), (y * cos + x * sin).to(a.dtype)


@triton.jit
def take_in(qa, qb, ka, kb, values, seen, most, weight, sums, scale, PRECISION: tl.constexpr,
            APART: tl.constexpr):
    """One tile of keys and values [KEYS, ...] more in the softmax of rows: their largest score so far, the
    sum of their weights, and of weighted values. seen [ROWS or 1, KEYS]: who sees which. APART: two products
    that add to one accumulator are miscompiled on Blackwell (triton-lang/triton#10821).
    """
    scores = tl.dot(qa, tl.trans(ka), input_precision=PRECISION)
    if APART:  # Triton would make one accumulator of a mere sum
        scores = scores * scale + tl.dot(qb, tl.trans(kb), input_precision=PRECISION) * scale
    else:
        scores = tl.dot(qb, tl.trans(kb), scores, input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    kept, p = tl.exp2(most - higher), tl.exp2(scores - higher[:, None])
    sums = tl.dot(p.to(values.dtype), values, sums * kept[:, None], input_precision=PRECISION)
    return higher, weight * kept + tl.sum(p, 1), sums


@triton.jit
def attend_kernel(
    qkv, cos, sin, q_norm, k_norm, k, v, length, local, oldest, out, parts, marks, arrived, T, M, S, eps,
    scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, NEW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    NORM: tl.constexpr, OLD: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    CONVERTS: tl.constexpr, APART: tl.constexpr, EARLY: tl.constexpr,
):
    """One block of ROWS rows of one key/value head of one sequence, over one split of the keys.

    qkv [B, T, (HEADS*GROUP + 2*HEADS) * HEAD]; cos, sin [B, T, HEAD/2]; k, v [B, HEADS, S, HEAD], float8 if
    they are uint8 (CONVERTS: see `kernels.gpu.float8`); length [B]; local [B, T, M], M >= T: the pass's own
    rows are the last T columns, the others (if OLD) are in the cache. oldest [B, T], if WINDOWED: the first
    committed slot that a row sees; slots before those of all rows of the block are left out.
    parts, marks: scratch, of SPLITS for each block; arrived: zeros, and zeros again afterwards.
    """
    begin(EARLY)
    block, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, head = pair // HEADS, pair % HEADS
    committed = tl.load(length + b).to(tl.int32)
    cached = committed + M - T  # slots that are in the cache already
    total = cached + T
    row = block * ROWS + tl.arange(0, ROWS)  # of the GROUP queries of each of T tokens
    t, there = row // GROUP, row < GROUP * T
    first = 0
    near = t
    if WINDOWED:
        near = tl.load(oldest + b * T + t, mask=there, other=1 << 30).to(tl.int32)
        first = tl.maximum(tl.minimum(tl.min(near, 0), cached), 0) // KEYS * KEYS
    splits = tl.minimum(tl.maximum(tl.cdiv(total - first, LEAST), 1), SPLITS)
    span = tl.cdiv(tl.cdiv(total - first, KEYS), splits) * KEYS
    splits = tl.cdiv(total - first, span)
    if split < splits:
        half, depth, key = tl.arange(0, HALF), tl.arange(0, VALUES), tl.arange(0, KEYS)
        in_half, in_head = (half < HEAD // 2)[None], (depth < HEAD)[None]
        WIDTH: tl.constexpr = (HEADS * GROUP + 2 * HEADS) * HEAD
        # Offsets within a sequence fit 32 bits, those of a sequence need not.
        qkv += (b * T).to(tl.int64) * WIDTH
        cos += (b * T).to(tl.int64) * (HEAD // 2)
        sin += (b * T).to(tl.int64) * (HEAD // 2)
        k += pair.to(tl.int64) * S * HEAD
        v += pair.to(tl.int64) * S * HEAD
        sees = local + (b * T).to(tl.int64) * M + t[:, None] * M
        norm_a, norm_b, key_norm_a, key_norm_b = half, half, half, half
        if NORM:
            norm_a = tl.load(q_norm + half, mask=half < HEAD // 2, other=0.0)
            norm_b = tl.load(q_norm + HEAD // 2 + half, mask=half < HEAD // 2, other=0.0)
            key_norm_a = tl.load(k_norm + half, mask=half < HEAD // 2, other=0.0)
            key_norm_b = tl.load(k_norm + HEAD // 2 + half, mask=half < HEAD // 2, other=0.0)

        at = t[:, None] * WIDTH + (head * GROUP + row % GROUP)[:, None] * HEAD + half[None]
        turn = t[:, None] * (HEAD // 2) + half[None]
        queries = there[:, None] & in_half
        qa, qb = turned(
            tl.load(qkv + at, mask=queries, other=0.0),
            tl.load(qkv + at + HEAD // 2, mask=queries, other=0.0),
            norm_a, norm_b, eps, tl.load(cos + turn, mask=queries, other=0.0),
            tl.load(sin + turn, mask=queries, other=0.0), HEAD, NORM,
        )
        most = tl.full((ROWS,), FAR, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, VALUES), tl.float32)
        first += split * span
        end = tl.minimum(first + span, total)

        for start in range(first, tl.minimum(end, cached), KEYS):  # what is in the cache
            n = start + key
            old = n < tl.minimum(end, cached)
            kept, slot = old[:, None] & in_half, n[:, None] * HEAD
            ka = tl.load(k + slot + half[None], mask=kept, other=0)
            kb = tl.load(k + slot + HEAD // 2 + half[None], mask=kept, other=0)
            values = tl.load(v + slot + depth[None], mask=old[:, None] & in_head, other=0)
            ka, kb = loaded(ka, qa.dtype, CONVERTS), loaded(kb, qa.dtype, CONVERTS)
            values = loaded(values, qa.dtype, CONVERTS)
            seen = old[None]
            if WINDOWED:
                seen = seen & (n[None] >= near[:, None])
            if OLD:
                drafted = there[:, None] & (old & (n >= committed))[None]
                allowed = tl.load(sees + (n - committed)[None], mask=drafted, other=0) != 0
                seen = seen & ((n < committed)[None] | allowed)
            most, weight, sums = take_in(
                qa, qb, ka, kb, values, seen, most, weight, sums, scale, PRECISION, APART
            )

        fresh = tl.arange(0, NEW)
        for start in tl.range(tl.maximum(first, cached), end, NEW, num_stages=1):  # what the pass brings
            place = start + fresh
            i, new = place - cached, place < end
            brought, own = new[:, None] & in_half, i[:, None] * WIDTH + (HEADS * GROUP + head) * HEAD
            angle = i[:, None] * (HEAD // 2) + half[None]
            new_ka, new_kb = turned(
                tl.load(qkv + own + half[None], mask=brought, other=0.0),
                tl.load(qkv + own + HEAD // 2 + half[None], mask=brought, other=0.0),
                key_norm_a, key_norm_b, eps, tl.load(cos + angle, mask=brought, other=0.0),
                tl.load(sin + angle, mask=brought, other=0.0), HEAD, NORM,
            )
            new_values = tl.load(
                qkv + own + HEADS * HEAD + depth[None], mask=new[:, None] & in_head, other=0.0
            )
            # Rounded as the cache stores them, so that later passes read the same numbers.
            held_ka = stored(new_ka, k.dtype.element_ty, CONVERTS)
            held_kb = stored(new_kb, k.dtype.element_ty, CONVERTS)
            held = stored(new_values, v.dtype.element_ty, CONVERTS)
            if block == 0:
                to = place[:, None] * HEAD
                tl.store(k + to + half[None], held_ka, mask=brought)
                tl.store(k + to + HEAD // 2 + half[None], held_kb, mask=brought)
                tl.store(v + to + depth[None], held, mask=new[:, None] & in_head)
            visible = new[None] & (tl.load(
                sees + (M - T + i)[None], mask=there[:, None] & new[None], other=0
            ) != 0)
            most, weight, sums = take_in(
                qa, qb, loaded(held_ka, qa.dtype, CONVERTS), loaded(held_kb, qa.dtype, CONVERTS),
                loaded(held, qa.dtype, CONVERTS), visible, most, weight, sums, scale, PRECISION, APART,
            )

        group = pair * tl.num_programs(0) + block
        last = splits == 1
        if splits > 1:
            inside = tl.arange(0, ROWS)
            scratch = inside[:, None] * VALUES + depth[None]
            parts += group.to(tl.int64) * SPLITS * ROWS * VALUES
            marks += group * SPLITS * 2 * ROWS
            tl.store(parts + split * ROWS * VALUES + scratch, sums, mask=there[:, None])
            tl.store(marks + split * 2 * ROWS + inside, most)
            tl.store(marks + split * 2 * ROWS + ROWS + inside, weight)
            tl.debug_barrier()  # the whole program has stored before it arrives
            last = tl.atomic_add(arrived + group, 1, sem="acq_rel") == splits - 1
            if last:
                tl.store(arrived + group, 0)
                most = tl.full((ROWS,), FAR, tl.float32)
                weight = tl.zeros((ROWS,), tl.float32)
                sums = tl.zeros((ROWS, VALUES), tl.float32)
                for other in range(splits):  # past the first cache, which may hold what was there before
                    their_most = tl.load(marks + other * 2 * ROWS + inside, cache_modifier=".cg")
                    their_weight = tl.load(marks + other * 2 * ROWS + ROWS + inside, cache_modifier=".cg")
                    theirs = tl.load(
                        parts + other * ROWS * VALUES + scratch, mask=there[:, None], other=0.0,
                        cache_modifier=".cg",
                    )
                    higher = tl.maximum(most, their_most)
                    kept_share, share = tl.exp2(most - higher), tl.exp2(their_most - higher)
                    weight = weight * kept_share + their_weight * share
                    sums = sums * kept_share[:, None] + theirs * share[:, None]
                    most = higher
        if last:
            out += (b * T).to(tl.int64) * HEADS * GROUP * HEAD
            goal = (t * (HEADS * GROUP) + head * GROUP + row % GROUP)[:, None] * HEAD + depth[None]
            shares = sums / tl.where(weight > 0, weight, 1.0)[:, None]
            tl.store(out + goal, shares.to(out.dtype.element_ty), mask=there[:, None] & in_head)


def tiles(rows: int, dtype: torch.dtype, shared: int, head: int) -> tuple[int, int, int, int]:
    """Return ROWS and KEYS of a tile for the rows of a key/value head, warps, and stages of loading.

    head: its size. shared: bytes of shared memory; with few of them, loads are fewer stages ahead.
    """
    if dtype == torch.float32 and not INTERPRETED:  # products without tensor cores fill registers
        return 16, 16, 4, 1
    if head > 128:  # Gemma 3 has heads of 256
        return (16 if rows <= 16 else 32 if rows <= 32 else 64), 32, 8, 2
    stages = 3 if shared >= PLENTY else 2
    if rows <= 32:
        return (16 if rows <= 16 else 32), 64, 4, stages
    # From compute capability 9.0 on, four warps multiply 64 rows at once; four more would compute the same.
    # On an A100 four warps spill, as do blocks of 128.
    return 64, 64, 4 if shared >= AMPLE else 8, stages


@torch.library.custom_op("eagle_gpu::attend", mutates_args=("kv",))
def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    kv: Tensor, layer: int, length: Tensor, local: Tensor, oldest: Tensor | None = None,
) -> Tensor:
    """qkv [B, T, (nh + 2*nkv)*hd] as `wqkv` gives it -> [B, T, nh*hd].

    Query and key heads are RMS-normed (if there are weights [hd]) and rotated by cos, sin [B, T, hd/2]. Keys
    and values go to slots length [B] + M - T ... of this layer of the caches kv [L, 2, B, nkv, S, hd], which
    hold float8 if they are uint8. Every row sees the first `length` slots, with `oldest` [B, T]
    from that one on, and of the M after them what local [B, T, M] says. Scores and sums are float32.
    """
    B, T, width = qkv.shape
    _, _, _, nkv, S, hd = kv.shape
    M, nh = local.shape[2], width // hd - 2 * nkv
    rows, keys, warps, stages = tiles(nh // nkv * T, qkv.dtype, shared_memory(qkv.device), hd)
    blocks = triton.cdiv(nh // nkv * T, rows)
    splits = max(1, min(32, programs_at_once(qkv.device) // (blocks * nkv * B)))
    values = max(16, triton.next_power_of_2(hd))
    out, shared = qkv.new_empty(B, T, nh * hd), B * nkv * blocks if splits > 1 else 1  # groups of programs
    parts, marks = (qkv.new_empty(shared * splits * rows * n, dtype=torch.float32) for n in (values, 2))
    norms = (qkv, qkv) if q_norm is None else (q_norm, k_norm)
    attend_kernel[(blocks, splits, B * nkv)](
        qkv.contiguous(), cos.contiguous(), sin.contiguous(), *norms, kv[layer, 0], kv[layer, 1],
        length.contiguous(), local.contiguous(), length if oldest is None else oldest.contiguous(), out,
        parts, marks, counters(qkv.device, shared), T, M, S, eps, hd**-0.5 * LOG2_E.value,
        HEADS=nkv, GROUP=nh // nkv, HEAD=hd, HALF=max(16, triton.next_power_of_2(hd // 2)), VALUES=values,
        ROWS=rows, KEYS=keys, NEW=min(keys, 32), SPLITS=splits, LEAST=keys if rows == 16 else 2 * keys,
        NORM=q_norm is not None, OLD=M > T, WINDOWED=oldest is not None,
        PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
        CONVERTS=converts(qkv.device), APART=qkv.dtype.itemsize == 2 and is_blackwell(qkv.device),
        num_warps=warps, num_stages=stages, **options(qkv.device),
    )
    return out


@attend.register_fake
def _(qkv, cos, sin, q_norm, k_norm, eps, kv, layer, length, local, oldest=None):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] - 2 * kv.shape[3] * kv.shape[5])
