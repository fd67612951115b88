"""The self-check on a GPU: kernels, then one captured step, against their PyTorch definitions.

It runs once, in this process, at the start of warmup, with the loaded model. A kernel that is wrong or raises
is left out (`kernels.gpu.parts`). If the captured step is wrong, steps are launched uncompiled.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.errors import first_line
from engine.passes import Passes, round_up
from engine.step import accept_and_commit, draft_and_verify
from kernels.float8 import from_bytes
from kernels.gpu import parts
from model import KVCache
from sampling.noise import restrict
from sampling.options import Modes
from tree import Tree, pick

MAX_TOKENS = 3000  # committed before the step: several splits of the keys
STALE = 50.0  # what slots hold that no token may see
ONE_KERNEL, WHOLE_STEP = 2, 8  # limits of relative errors, in units of the dtype's epsilon
MIN_LIMIT, MAX_MISMATCH = 1e-4, 0.1  # of relative errors; of the fraction of whole numbers that differ


class Difference(NamedTuple):
    """The distance of a result from its definition. ratio: relative error over its limit."""

    what: str
    error: float
    ratio: float


def difference(what: str, found, wanted, limit: float) -> Difference:
    """Return the largest relative error ‖found - wanted‖ / ‖wanted‖ among tensors in any nesting.

    For whole numbers: the fraction that differs. limit: of floating-point errors.
    """
    each = [Difference(what, 0.0, 0.0)]
    for x, y in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        floating = y.dtype.is_floating_point
        x, y = (z.double().where(z != float("-inf"), 0) for z in (x, y))
        error = float((x - y).norm() / y.norm().clamp(min=1e-30) if floating else (x != y).double().mean())
        error = error if error == error else float("inf")
        each.append(Difference(what, error, error / (limit if floating else MAX_MISMATCH)))
    return max(each, key=lambda one: one.ratio)


def entries(cache: KVCache, slots: Tensor) -> tuple[Tensor, ...]:
    """Return copies of the keys and values at slots [B, n]."""
    rows = torch.arange(len(slots), device=slots.device)[:, None]
    held = cache.k[rows, slots], cache.v[rows, slots]
    return tuple(from_bytes(x, torch.float32) if x.dtype == torch.uint8 else x for x in held)


@contextlib.contextmanager
def filled(passes: Passes) -> Iterator[Callable[[], None]]:
    """Fill the batch with random requests in this context. Yields a function that resets them."""
    state, B, draw = passes.state, passes.batch, torch.Generator(passes.device).manual_seed(0)
    before = {name: x.clone() for name, x in state.named_buffers()}
    longest = min(MAX_TOKENS, passes.slots - passes.extra - state.max_commit - 2)
    state.length.copy_(torch.linspace(longest, min(63, longest), B).long())
    state.tokens.random_(passes.target.args.vocab_size, generator=draw)
    state.root.copy_(state.tokens.gather(1, state.length[:, None]))
    state.features.normal_(generator=draw)
    state.limit.copy_(state.length + state.max_commit + 1)
    for name, value in {"n_new": 1, "done": False, "temperature": 1, "top_k": 50, "top_p": 0.9}.items():
        state.get_buffer(name).fill_(value)
    at = torch.arange(min(longest + passes.extra + 64, passes.slots), device=passes.device).expand(B, -1)
    stale = (at >= state.length[:, None])[..., None, None]
    dtype = passes.target.embed.weight.dtype
    for cache in (*passes.caches, *(passes.drafter.caches or ())):
        held = torch.randn(2, B, at.shape[1], *cache.k.shape[2:], device=passes.device, generator=draw)
        cache.write(*held.masked_fill(stale, STALE).to(dtype), at)
    start = {name: x.clone() for name, x in state.named_buffers()}

    def reset(values: dict[str, Tensor] = start) -> None:
        for name, x in values.items():
            state.get_buffer(name).copy_(x)

    try:
        yield reset
    finally:
        reset(before)


@contextlib.contextmanager
def compared(limit: float) -> Iterator[dict[str, str]]:
    """Compare each call of a kernel in this context with its definition. Yields the errors by part."""
    failed: dict[str, str] = {}

    def observe(part: str, kernel: Callable, definition: Callable, args: tuple):
        if part == "move" or part in parts.left_out:  # moving is not repeatable: the whole step shows it
            return (definition if part in parts.left_out else kernel)(*args)
        written = (lambda: entries(args[0], args[3].slots)) if part == "attend" else (lambda: ())
        try:
            found = kernel(*args), written()
            wanted = definition(*args), written()
            off = difference(part, found, wanted, limit)
            if off.ratio > 1:
                failed[part] = f"{off.error:.2g} from its definition"
            return wanted[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # whatever Triton's compiler or a launch raises
            failed[part] = first_line(e)
            return definition(*args)

    parts.observers.append(observe)
    try:
        yield failed
    finally:
        parts.observers.pop()


def launched(passes: Passes, span: Tensor, modes: Modes) -> tuple[Tree, Tensor]:
    """Run one step uncompiled."""
    arguments = passes.device_step, passes.target, passes.caches, passes.drafter, passes.state
    return accept_and_commit(*arguments, draft_and_verify(*arguments, span, modes.noisy), *modes)


def step_difference(
    passes: Passes, step: Callable, reset: Callable, span: Tensor, modes: Modes, limit: float
) -> Difference:
    """Run a step, then its definition on the tree that it drafted. Return the largest difference."""
    state, target, drafter, W = passes.state, passes.target, passes.drafter, passes.drafter.shape.max_commit
    reset()
    length = state.length.clone()
    drafted, path = step()
    drafted, path = Tree(*(None if x is None else x.clone() for x in drafted)), path.clone()
    slots = length[:, None] + torch.arange(drafted.tokens.shape[1], device=length.device)
    found = [entries(cache, slots) for cache in passes.caches]
    tokens, count = state.out[:, :W].clone(), state.out[:, -3].clone()
    emitted = torch.arange(W, device=length.device) < count[:, None]
    features = state.features[:, :W].clone()

    reset()
    with patch.object(parts, "left_out", {*parts.PARTS}):  # all by their definitions
        device_step = passes.device_step
        noise = device_step.noise(state, W, target.args.vocab_size) if modes.noisy else None
        again = device_step.draft(drafter, state, span, noise)
        logits, read = device_step.verify(target, drafted, state, span, passes.caches, drafter.aux_layers)
        passes.caches.move(length[:, None] + path, slots[:, :1] + torch.arange(W, device=length.device))
    found = [difference(f"layer {i}", x, entries(cache, slots), limit)
             for i, (x, cache) in enumerate(zip(found, passes.caches))]
    if again.scores is not None:
        found.append(difference("draft", *(x.scores.sort().values for x in (drafted, again)), limit))
    if read is not None and drafter.reads:
        found.append(difference("features", features[emitted], pick(read, path)[emitted], limit))
    if target.ranks is None:  # emitted tokens have the largest of the defined logits, but for near ties
        scale = pick(logits, path).square().mean(-1).sqrt()
        if modes.restricted:
            logits = restrict(logits, state.temperature, state.top_k, state.top_p)
        drawn = pick(logits, path) if noise is None else pick(logits, path) + noise
        gap = drawn.amax(-1) - drawn.gather(-1, tokens[..., None])[..., 0]
        error = float((gap / scale)[emitted].max())
        found.append(Difference("emitted tokens", error, error / (2 * limit)))
    return max(found, key=lambda one: one.ratio)


def agreed(passes: Passes, failed: dict[str, str], names: tuple[str, ...] = parts.PARTS) -> list[str]:
    """Return what failed on any rank: all ranks must launch the same kernels."""
    ranks = passes.target.ranks
    if ranks is None:
        return [*failed]
    everywhere = ranks.all_gather(torch.tensor([name in failed for name in names], device=passes.device))
    return [name for name, anywhere in zip(names, everywhere.any(0).tolist()) if anywhere]


@torch.no_grad()
def check(passes: Passes, modes: Modes, log: Callable[[str], None]) -> None:
    """Check the kernels, leave out those that fail, then check the captured step. Log what falls back."""
    epsilon = torch.finfo(passes.target.embed.weight.dtype).eps
    one, whole = (max(n * epsilon, MIN_LIMIT) for n in (ONE_KERNEL, WHOLE_STEP))
    try:
        with passes.here(), filled(passes) as reset:
            span = passes.slot_ids[: round_up(int(passes.state.length.max()) + passes.extra + 1, 64)]
            with compared(one) as failed:
                launched(passes, span, Modes(noisy=True, restricted=True))
            for part in agreed(passes, failed):
                why = failed.get(part, "it fails on another rank")
                parts.left_out.add(part)
                passes.fell_back(f"the GPU path does without {part!r}, which is slower: {why}")
            rows, live = passes.rows(0, passes.batch), passes.span(span.shape[0])
            found = step_difference(
                passes, lambda: passes.step(rows, live, passes.drafter, modes), reset, span, modes, whole
            )
            wrong = {"step": f"{found.what} {found.error:.2g} from its definition"} if found.ratio > 1 else {}
            if agreed(passes, wrong, ("step",)):
                passes.launch_uncompiled()
                passes.fell_back(f"the captured step is wrong and runs uncompiled: {wrong.get('step')}")
    except torch.OutOfMemoryError:
        log("the kernels are not checked: too little memory is free")
