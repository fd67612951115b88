"""The tree in kernels, one program a sequence: a beam gets children, the best stay, a path is accepted."""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import begin, options
from kernels.gpu.ranking import NONE, key_of, largest, place_of, value_of


@triton.jit
def extend_kernel(
    scores, tokens, old_scores, old_tokens, old_parents, beam_scores, beam_flat, beam_sees, all_scores,
    all_tokens, all_parents, rows, next_scores, next_tokens, next_flat, next_sees, C, K, M,
    BEST: tl.constexpr, CHILDREN: tl.constexpr, SEEN: tl.constexpr, EARLY: tl.constexpr,
):
    """See `extend`. The k*k children are in one tile."""
    begin(EARLY)
    b = tl.program_id(0)
    child, slot = tl.arange(0, CHILDREN), tl.arange(0, BEST)
    here, kept = child < K * K, slot < K
    all_scores += b * (C + K * K)
    all_tokens += b * (C + K * K)
    all_parents += b * (C + K * K)
    for start in range(0, C, CHILDREN):
        old, known = start + child, start + child < C
        tl.store(all_scores + old, tl.load(old_scores + b * C + old, mask=known), mask=known)
        tl.store(all_tokens + old, tl.load(old_tokens + b * C + old, mask=known), mask=known)
        tl.store(all_parents + old, tl.load(old_parents + b * C + old, mask=known), mask=known)
    above = b * K + child // K
    score = tl.load(scores + b * K * K + child, mask=here, other=float("-inf"))
    score += tl.load(beam_scores + above, mask=here, other=0.0)
    tl.store(all_scores + C + child, score, mask=here)
    tl.store(all_tokens + C + child, tl.load(tokens + b * K * K + child, mask=here), mask=here)
    tl.store(all_parents + C + child, tl.load(beam_flat + above, mask=here), mask=here)

    best = largest(tl.where(here, key_of(score, child), NONE), K, BEST)
    place = tl.where(kept, place_of(best), 0)
    row, to = place // K, b * K + slot
    tl.store(next_scores + to, value_of(best), mask=kept)
    tl.store(next_tokens + to, tl.load(tokens + b * K * K + place, mask=kept, other=0), mask=kept)
    tl.store(next_flat + to, (C + place).to(tl.int64), mask=kept)
    tl.store(rows + to, row.to(tl.int64), mask=kept)
    column = tl.arange(0, SEEN)
    sees = beam_sees + (b * K + row)[:, None] * M + column[None]
    seen = tl.load(sees, mask=kept[:, None] & (column < M)[None], other=0) != 0
    seen = seen | (column[None] - M == slot[:, None])
    here = kept[:, None] & (column < M + K)[None]
    tl.store(next_sees + to[:, None] * (M + K) + column[None], seen, mask=here)


@torch.library.custom_op("eagle_gpu::extend", mutates_args=())
def extend(
    scores: Tensor, tokens: Tensor, old_scores: Tensor, old_tokens: Tensor, old_parents: Tensor,
    beam_scores: Tensor, beam_flat: Tensor, beam_sees: Tensor,
) -> list[Tensor]:
    """`tree.Growth.extend`, then `advance`: the scores and tokens of the beam's children [B, k, k].

    old [B, C]: the candidates before; beam [B, k] and [B, k, M]: see `Growth`. Returns scores, tokens and
    parents of all candidates [B, C+k*k], which row of the beam each one of the next came from [B, k], and
    the next beam: scores, tokens, places among all candidates [B, k], what it sees [B, k, M+k].
    """
    (B, k, M), C = beam_sees.shape, old_scores.shape[1]
    given = scores, tokens, old_scores, old_tokens, old_parents, beam_scores, beam_flat, beam_sees
    made = _extended(*given)
    extend_kernel[(B,)](
        *(x.contiguous() for x in given), *made, C, k, M, BEST=triton.next_power_of_2(k),
        CHILDREN=triton.next_power_of_2(k * k), SEEN=triton.next_power_of_2(M + k), num_warps=4,
        **options(scores.device),
    )
    return made


@extend.register_fake
def _extended(scores, tokens, old_scores, old_tokens, old_parents, beam_scores, beam_flat, beam_sees):
    (B, k, M), count = beam_sees.shape, old_scores.shape[1] + scores[0].numel()
    sizes = [(scores, (B, count)), *[(tokens, (B, count))] * 2, (tokens, (B, k)), (scores, (B, k))]
    return [x.new_empty(size) for x, size in (*sizes, *[(tokens, (B, k))] * 2, (beam_sees, (B, k, M + k)))]


@triton.jit
def prune_kernel(scores, tokens, parents, root, tree_tokens, tree_parent, depth, ancestors, tree_scores,
                 place, C, T, LEVELS, CANDIDATES: tl.constexpr, NODES: tl.constexpr, SOME: tl.constexpr,
                 EARLY: tl.constexpr):
    """See `prune`. place [B, C]: scratch, the node that each candidate becomes."""
    begin(EARLY)
    b = tl.program_id(0)
    scores += b * C
    tokens += b * C
    parents += b * C
    place += b * C
    at = tl.arange(0, CANDIDATES)
    here = at < C
    score = tl.load(scores + at, mask=here, other=float("-inf"))
    keys = tl.where(here, key_of(score, at), NONE)
    better = tl.zeros((CANDIDATES,), tl.int32)
    for start in range(0, C, SOME):
        some = start + tl.arange(0, SOME)
        theirs = tl.load(scores + some, mask=some < C, other=float("-inf"))
        others = tl.where(some < C, key_of(theirs, some), NONE)
        better += tl.sum((others[None] > keys[:, None]).to(tl.int32), 1)
    kept = here & (better < T - 1)
    node = tl.cumsum(kept.to(tl.int32), 0)  # in the order of candidates; the root is node 0
    tl.store(place + at, node, mask=here)
    tl.debug_barrier()
    above = tl.load(parents + at, mask=kept, other=-1)
    parent = tl.load(place + above, mask=kept & (above >= 0), other=0)
    to = b * T + node
    tl.store(tree_tokens + to, tl.load(tokens + at, mask=kept, other=0), mask=kept)
    tl.store(tree_scores + to, score, mask=kept)
    tl.store(tree_parent + to, parent.to(tl.int64), mask=kept)
    tl.store(tree_tokens + b * T, tl.load(root + b))
    tl.store(tree_scores + b * T, 0.0)
    tl.store(tree_parent + b * T, tl.full((), 0, tl.int64))
    tl.debug_barrier()
    nodes = tl.arange(0, NODES)
    for start in range(0, T, SOME):
        column, step = start + tl.arange(0, SOME), nodes
        seen, levels = nodes[:, None] == column[None], tl.zeros((NODES,), tl.int64)
        for _ in range(LEVELS):
            levels += (step > 0).to(tl.int64)
            step = tl.load(tree_parent + b * T + step, mask=nodes < T, other=0).to(tl.int32)
            seen = seen | (step[:, None] == column[None])
        tl.store(
            ancestors + (b * T + nodes)[:, None] * T + column[None], seen,
            mask=(nodes < T)[:, None] & (column < T)[None],
        )
        tl.store(depth + b * T + nodes, levels, mask=nodes < T)


@torch.library.custom_op("eagle_gpu::prune", mutates_args=())
def prune(
    scores: Tensor, tokens: Tensor, parents: Tensor, root: Tensor, nodes: int, levels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of the `tree.Tree` of T nodes, the best of candidates [B, C] below root [B].

    parents [B, C]: the place of each candidate's parent, before its own; below 0 the root. levels: the
    most levels below the root.
    """
    (B, C), made = scores.shape, _pruned(scores, tokens, parents, root, nodes, levels)
    prune_kernel[(B,)](
        scores.contiguous(), tokens.contiguous(), parents.contiguous(), root.contiguous(), *made,
        scores.new_empty(B, C, dtype=torch.int32), C, nodes, levels,
        CANDIDATES=triton.next_power_of_2(C), NODES=triton.next_power_of_2(nodes), SOME=16, num_warps=8,
        **options(scores.device),
    )
    return made


@prune.register_fake
def _pruned(scores, tokens, parents, root, nodes, levels):
    B = scores.shape[0]
    ids = [tokens.new_empty(B, nodes) for _ in range(3)]
    return *ids, tokens.new_empty(B, nodes, nodes, dtype=torch.bool), scores.new_empty(B, nodes)


@triton.jit
def accept_kernel(tokens, parent, depth, chosen, path, count, T, W, NODES: tl.constexpr,
                  WINDOW: tl.constexpr, EARLY: tl.constexpr):
    """See `accept`."""
    begin(EARLY)
    b = tl.program_id(0)
    tokens += b * T
    parent += b * T
    depth += b * T
    chosen += b * T
    node = tl.arange(0, NODES)
    here = node < T
    step, accepted = tl.where(here, node, 0), here
    for _ in range(W):  # as many levels as a path has nodes
        above = tl.load(parent + step).to(tl.int32)
        accepted = accepted & ((step == 0) | (tl.load(tokens + step) == tl.load(chosen + above)))
        step = above
    depths = tl.where(accepted, tl.load(depth + tl.where(here, node, 0)).to(tl.int32), -1)
    deepest = tl.max(depths, 0)
    last = tl.min(tl.where(depths == deepest, node, NODES), 0)
    at = tl.arange(0, WINDOW)
    taken = tl.zeros((WINDOW,), tl.int64)
    for i in range(W):
        taken = tl.where(at == deepest - i, last.to(tl.int64), taken)
        last = tl.load(parent + last).to(tl.int32)
    tl.store(path + b * W + at, taken, mask=at < W)
    tl.store(count + b, (deepest + 1).to(tl.int64))


@torch.library.custom_op("eagle_gpu::accept", mutates_args=())
def accept(
    tokens: Tensor, parent: Tensor, depth: Tensor, chosen: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """`tree.accept` -> path [B, W], count [B]."""
    B, T = tokens.shape
    path, count = tokens.new_empty(B, window), tokens.new_empty(B)
    accept_kernel[(B,)](
        tokens.contiguous(), parent.contiguous(), depth.contiguous(), chosen.contiguous(), path, count, T,
        window, NODES=triton.next_power_of_2(T), WINDOW=triton.next_power_of_2(window), num_warps=4,
        **options(tokens.device),
    )
    return path, count


@accept.register_fake
def _(tokens, parent, depth, chosen, window):
    return tokens.new_empty(tokens.shape[0], window), tokens.new_empty(tokens.shape[0])


@triton.jit
def emit_kernel(tokens, count, text, root, length, done, out, limit, stop_ids, appended, W, S, STOPS, WIDTH,
                WINDOW: tl.constexpr, SOME: tl.constexpr, EARLY: tl.constexpr):
    """See `emit`."""
    begin(EARLY)
    b = tl.program_id(0)
    at = tl.arange(0, WINDOW)
    new = tl.load(tokens + b * W + at, mask=at < W, other=0)
    before, most, was_done = tl.load(length + b), tl.load(limit + b), tl.load(done + b) != 0
    drafted = tl.load(count + b)
    n = tl.where(was_done, 0, tl.minimum(drafted, most - before))
    first = tl.full((), WINDOW, tl.int32)
    for start in range(0, STOPS, SOME):
        some = start + tl.arange(0, SOME)
        stop = tl.load(stop_ids + some, mask=some < STOPS, other=-1)
        hit = (new[:, None] == stop[None]) & (some < STOPS)[None] & ((at < n) & (at < W))[:, None]
        first = tl.minimum(first, tl.min(tl.min(tl.where(hit, at[:, None], WINDOW), 1), 0))
    n = tl.minimum(n, first + 1)
    tl.store(text + b.to(tl.int64) * S + before + 1 + at, new, mask=at < n)
    ended = was_done | (first < WINDOW) | (before + n >= most)
    last = tl.sum(tl.where(at == n - 1, new, 0), 0)
    tl.store(root + b, last, mask=n > 0)
    tl.store(length + b, before + n)
    tl.store(done + b, ended)
    tl.store(appended + b, n)
    wide = out + b * WIDTH
    tl.store(wide + at, new, mask=at < W)
    rest = W + tl.arange(0, WINDOW)
    tl.store(wide + rest, tl.zeros((WINDOW,), tl.int64), mask=rest < WIDTH - 3)
    tl.store(wide + WIDTH - 3, n)
    tl.store(wide + WIDTH - 2, tl.maximum(tl.minimum(drafted - 1, n), 0))
    tl.store(wide + WIDTH - 1, ended.to(tl.int64))


@torch.library.custom_op("eagle_gpu::emit", mutates_args=("text", "root", "length", "done", "out"))
def emit(
    tokens: Tensor, count: Tensor, text: Tensor, root: Tensor, length: Tensor, done: Tensor, out: Tensor,
    limit: Tensor, stop_ids: Tensor,
) -> Tensor:
    """Run `TorchBackend.emit` on a state's buffers, in place -> how many were appended [B]."""
    B, W = tokens.shape
    width = out.shape[1]
    appended = count.new_empty(B)
    emit_kernel[(B,)](
        tokens.contiguous(), count.contiguous(), text, root, length, done, out, limit,
        stop_ids if len(stop_ids) else limit, appended, W, text.shape[1], len(stop_ids), width,
        WINDOW=triton.next_power_of_2(width), SOME=16, num_warps=1, **options(tokens.device),
    )
    return appended


@emit.register_fake
def _(tokens, count, text, root, length, done, out, limit, stop_ids):
    return count.new_empty(count.shape)
