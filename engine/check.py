"""GPU self-check: compare each kernel, then one captured step, with their PyTorch definitions.

It runs once, at the start of warmup, with the loaded model. A kernel that is wrong or raises an error falls
back to its definition (`kernels.gpu.fallback`). If the captured step is wrong, steps run uncompiled.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from common.errors import first_line
from engine.runner import ModelRunner, round_up
from engine.sampling import Modes, Sampling, restrict
from engine.step import accept_and_commit, draft_and_verify
from kernels.gpu import fallback
from model import KVCache, KVCaches
from tree import gather_tokens

MAX_CONTEXT = 3000  # tokens, enough for several splits of the keys
STALE_VALUE = 50.0  # in cache slots that no token may attend to
KERNEL_EPS, STEP_EPS = 2, 8  # maximum relative errors, in units of the dtype's epsilon
MIN_MAX_ERROR, MAX_MISMATCH = 1e-4, 0.1  # lower bound of both; maximum fraction of integers that differ


class Difference(NamedTuple):
    """The difference between a result and its definition. ratio: error / maximum allowed error."""

    name: str
    error: float
    ratio: float


def difference(name: str, result, expected, max_error: float) -> Difference:
    """Return the largest relative error ‖result - expected‖ / ‖expected‖ among tensors in any nesting.

    The error of integers is the fraction that differs.
    """
    errors = [Difference(name, 0.0, 0.0)]
    for x, y in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        floating = y.dtype.is_floating_point
        x, y = (z.double().where(z != float("-inf"), 0) for z in (x, y))
        error = (x - y).norm() / y.norm().clamp(min=1e-30) if floating else (x != y).double().mean()
        error = float(error.nan_to_num(nan=float("inf")))
        errors.append(Difference(name, error, error / (max_error if floating else MAX_MISMATCH)))
    return max(errors, key=lambda e: e.ratio)


def entries(cache: KVCache, slots: Tensor) -> tuple[Tensor, ...]:
    """Return copies of the keys and values at slots [B, n]."""
    b = torch.arange(len(slots), device=slots.device)[:, None]
    kv = cache.k[b, slots], cache.v[b, slots]
    return tuple(x.view(torch.float8_e4m3fn).float() if x.dtype == torch.uint8 else x for x in kv)


def snapshot(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that restores the present values of all buffers."""
    values = {name: x.clone() for name, x in module.named_buffers()}

    def restore() -> None:
        for name, x in values.items():
            module.get_buffer(name).copy_(x)

    return restore


def fill_requests(runner: ModelRunner) -> None:
    """Fill the batch and its caches with random requests."""
    state, B, rng = runner.state, runner.batch, torch.Generator(runner.device).manual_seed(0)
    max_length = min(MAX_CONTEXT, runner.cache_slots - runner.extra_slots - state.max_commit - 2)
    state.length.copy_(torch.linspace(max_length, min(63, max_length), B).long())
    state.tokens.random_(runner.target.args.vocab_size, generator=rng)
    state.root.copy_(state.tokens.gather(1, state.length[:, None]))
    state.features.normal_(generator=rng)
    state.limit.copy_(state.length + state.max_commit + 1)
    for name, value in {"n_unread": 1, "done": False, "temperature": 1, "top_k": 50, "top_p": 0.9}.items():
        state.get_buffer(name).fill_(value)
    count = min(max_length + runner.extra_slots + 64, runner.cache_slots)
    slots = torch.arange(count, device=runner.device).expand(B, -1)
    stale = (slots >= state.length[:, None])[..., None, None]
    for cache in (*runner.caches, *(runner.drafter.caches or ())):
        if not isinstance(cache, KVCache):
            cache.randomize(state.length, rng)
            continue
        kv = torch.randn(2, B, count, *cache.k.shape[2:], device=runner.device, generator=rng)
        cache.write(*kv.masked_fill(stale, STALE_VALUE).to(state.features.dtype), slots)


def compare_kernels(runner: ModelRunner, live: Tensor, of_kernel: float, of_pass: float) -> dict[str, str]:
    """Compare each kernel launch of an eager step with its definition. Return errors by kernel name.

    live: the live cache slots. of_kernel: the maximum error; of_pass: of "dense", which is a whole pass.
    """
    arguments = runner.device_step, runner.target, runner.caches, runner.drafter, runner.state
    failed: dict[str, str] = {}

    def observe(name: str, kernel: Callable, definition: Callable, args: tuple):
        reset, written = (lambda: None), list  # what the kernel writes, besides its result
        if name == "delta":
            reset, written = snapshot(args[0]), lambda: [x.clone() for x in args[0].buffers()]
        elif name == "attend":
            written = partial(entries, args[0], args[3].slots)
        try:
            result = kernel(*args), written()
            reset()
            expected = definition(*args), written()
            largest = difference(name, result, expected, of_pass if name == "dense" else of_kernel)
            if largest.ratio > 1:
                failed[name] = f"relative error {largest.error:.2g}"
            return expected[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # Triton's compiler and launches raise various errors
            failed[name] = first_line(e)
            return definition(*args)

    with patch.object(fallback, "observer", observe):
        verified = draft_and_verify(*arguments, live, True)
        accept_and_commit(*arguments, verified, *Modes(sampled=True, restricted=True))
    return failed


def compare_step(runner: ModelRunner, reset: Callable, live_slots: Tensor, modes: Modes, max_error: float):
    """Run a captured step, then its definition on the drafted tree. Return the largest `Difference`."""
    state, target, drafter, W = runner.state, runner.target, runner.drafter, runner.drafter.shape.max_commit
    step, caches = runner.device_step, [cache for cache in runner.caches if isinstance(cache, KVCache)]
    reset()
    length = state.length.clone()
    ran = runner.step(runner.slot_range(0, runner.batch), runner.live_slots(len(live_slots)), drafter, modes)
    drafted, path = tree_map_only(Tensor, torch.clone, ran)
    slots = length[:, None] + torch.arange(drafted.tokens.shape[1], device=length.device)
    kv = [entries(cache, slots) for cache in caches]
    tokens, features = state.out[:, :W].clone(), state.features[:, :W].clone()
    window = torch.arange(W, device=length.device)
    emitted = window < state.out[:, -3, None]

    reset()
    with patch.object(fallback, "disabled", {*fallback.KERNELS}):
        noise = step.noise(state, W, target.args.vocab_size) if modes.sampled else None
        expected = step.draft(drafter, state, live_slots, noise)
        logits, new = step.verify(target, drafted, state, live_slots, runner.caches, drafter.aux_layers)
        KVCaches.move(caches, length[:, None] + path, length[:, None] + window)
    differences = [difference(f"layer {i}", x, entries(cache, slots), max_error)
                   for i, (x, cache) in enumerate(zip(kv, caches))]
    if expected.scores is not None:
        scores = (x.scores.sort().values for x in (drafted, expected))
        differences.append(difference("draft", *scores, max_error))
    if new is not None and not drafter.defers_head:
        new = gather_tokens(new, path)[emitted]
        differences.append(difference("features", features[emitted], new, max_error))
    if target.ranks is None:  # emitted tokens have the largest expected logits, except for near ties
        scale = gather_tokens(logits, path).square().mean(-1).sqrt()
        if modes.restricted:
            logits = restrict(logits, state.temperature, state.top_k, state.top_p)
        noisy = gather_tokens(logits, path) if noise is None else gather_tokens(logits, path) + noise
        gap = noisy.amax(-1) - noisy.gather(-1, tokens[..., None])[..., 0]
        error = float((gap / scale)[emitted].max())
        differences.append(Difference("emitted tokens", error, error / (2 * max_error)))
    return max(differences, key=lambda d: d.ratio)


def failed_on_any_rank(runner: ModelRunner, failed: dict[str, str], names=fallback.KERNELS) -> list[str]:
    """Return the names that failed on any rank: all ranks must launch the same kernels."""
    if (ranks := runner.target.ranks) is None:
        return [*failed]
    by_rank = ranks.all_gather(torch.tensor([name in failed for name in names], device=runner.device))
    return [name for name, any_failed in zip(names, by_rank.any(0).tolist()) if any_failed]


@torch.no_grad()
def check(runner: ModelRunner, samplings: Sequence[Sampling]) -> None:
    """Check the kernels, disable those that fail, then check the captured step. Log every fallback.

    samplings: those of the first request; its kind of step is checked. Empty: a greedy step.
    """
    modes = Modes.of_requests(samplings, runner.has_graphs)
    epsilon = torch.finfo(runner.target.embed.dtype).eps
    of_kernel, of_step = (max(n * epsilon, MIN_MAX_ERROR) for n in (KERNEL_EPS, STEP_EPS))
    restore = snapshot(runner.state)
    try:
        with runner.device_context():
            fill_requests(runner)
            reset, max_length = snapshot(runner.state), int(runner.state.length.max())
            live = runner.slot_ids[: round_up(max_length + runner.extra_slots + 1, 64)]
            failed = compare_kernels(runner, live, of_kernel, of_step)
            for name in failed_on_any_rank(runner, failed):
                reason = failed.get(name, "it fails on another rank")
                fallback.disabled.add(name)
                runner.fell_back(f"kernel {name!r} falls back to PyTorch, which is slower: {reason}")
            largest = compare_step(runner, reset, live, modes, of_step)
            if failed_on_any_rank(runner, {"step": ""} if largest.ratio > 1 else {}, ("step",)):
                runner.run_eagerly()
                runner.fell_back("the captured step gives wrong results; steps now run eagerly:"
                                 f" {largest.name}: relative error {largest.error:.2g}")
    except torch.OutOfMemoryError:
        runner.fell_back("the kernels are not checked: too little memory is free")
    finally:
        restore()
