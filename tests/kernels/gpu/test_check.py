"""The self-check: right kernels pass, and each planted fault is found and left out."""
import pkgutil

import pytest
import torch
from helpers.drafters import small_models

from engine import check as checking
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling, restrict
from families.hybrid import Hybrid, HybridArgs
from kernels.gpu import attention, delta, fallback, products, sampling
from kernels.gpu.device import INTERPRETED, gpu_of
from kernels.quantized import Scheme, quantize_linears
from tree import TreeShape


def lowest(logits, *restrictions):
    """`sampling.thresholds` by definition."""
    kept = restrict(logits, *restrictions)
    return kept.masked_fill(kept.isneginf(), torch.inf).amin(-1)


@pytest.fixture
def runner(device, backend, monkeypatch):
    """ModelRunner of a random target and a head in int8, for two requests."""
    if INTERPRETED:  # slowly
        monkeypatch.setattr(attention, "gpu_of", lambda device: gpu_of(device)._replace(multiprocessors=1))
        monkeypatch.setattr(sampling, "thresholds", lowest)
    monkeypatch.setattr(checking, "MAX_CONTEXT", 66)
    target, head = small_models(64, 32)
    quantize_linears(head.to(device), Scheme("int8", 0, None))
    backend.prepare(target.to(device), head)
    drafter = HeadDrafter(head, TreeShape(5, 1, 3))
    yield Engine(target, drafter, batch=2, max_seq_len=150, compile=False, chunks=(16,)).runner
    fallback.disabled.clear()


def check(runner) -> list[str]:
    """Run the self-check; the lines that it logs."""
    lines = []
    runner.fell_back = lines.append
    before = {name: x.clone() for name, x in runner.state.named_buffers()}
    checking.check(runner, [Sampling(temperature=1.0)])
    assert all(torch.equal(x, before[name]) for name, x in runner.state.named_buffers())
    assert not fallback.observers
    return lines


def test_right_kernels_pass(runner):
    assert not check(runner) and not fallback.disabled


@pytest.mark.expensive
def test_states_are_checked(device, backend, monkeypatch):
    """Of a target with a delta net: a wrong state is found, though it changes no output of this pass."""
    monkeypatch.setattr(checking, "MAX_CONTEXT", 66)
    target = Hybrid(HybridArgs(
        64, 32, 48, 2, 4, 2, 16, delta_layers=(1, 0), delta_heads=2, delta_key_heads=1, delta_key_dim=8,
        delta_value_dim=12, delta_taps=4,
    )).requires_grad_(False)
    for x in target.parameters():
        x.normal_(std=0.2)
    backend.prepare(target.to(device))
    runner = Engine(target, None, batch=2, max_seq_len=150, compile=False, chunks=(16,)).runner
    assert not check(runner)
    right = delta.delta

    def wrong(*args):
        out = right(*args)
        args[4][0, 0, 0] += 1
        return out

    monkeypatch.setattr(delta, "delta", wrong)
    (line,) = check(runner)
    fallback.disabled.clear()
    assert line.startswith("kernel 'delta' falls back to PyTorch, which is slower: ")


def no_launch(*args):
    raise RuntimeError("out of resource: shared memory\nmore")


FAULTS = {  # the part, its kernel, and what a wrong one does to its result
    "attention": ("attend", "kernels.gpu.cache.attend", lambda y, a: y * (1 + (a[8] == 63).any())),
    "products": ("linear", "kernels.gpu.products.linear", lambda y, a: y + 1e-3),
    "ids": ("rank", "kernels.gpu.ranking.top_k", lambda y, a: (y[0], y[1].flip(-1))),
    "thresholds": ("restrict", "kernels.gpu.sampling.thresholds", lambda y, a: y + 10.0),
    "no launch": ("linear", "kernels.gpu.products.linear", no_launch),
}


@pytest.mark.parametrize("part, kernel, wrong", FAULTS.values(), ids=FAULTS)
def test_a_wrong_kernel_is_left_out(runner, monkeypatch, part, kernel, wrong):
    """Its definition computes the part, so the step is right, and runs captured."""
    right = pkgutil.resolve_name(kernel)
    monkeypatch.setattr(kernel, lambda *a: wrong(right(*a), a))
    (line,) = check(runner)
    assert line.startswith(f"kernel {part!r} falls back to PyTorch, which is slower: ")
    assert fallback.disabled == {part} and runner.device_step.reads_length == (part != "attend")


def test_a_wrong_step_is_launched_uncompiled(runner, monkeypatch):
    """Capturing or compiling is at fault: a replay, say, that reads memory given away."""
    monkeypatch.setattr(runner, "captured", lambda key, call, still: broken(call()))

    def broken(result):
        runner.caches[1].k[:, 63:] += 0.5
        return result

    (line,) = check(runner)
    assert line.startswith("the captured step is wrong and runs uncompiled: layer 1 ")
    assert runner.captured is None and not fallback.disabled and not check(runner)


@pytest.mark.parametrize("what, wrong", (
    ("kernels.gpu.cache.LayerCaches.move", lambda right, a: None),
    ("kernels.gpu.backend.CudaStep.draw", lambda right, a: (right(*a) - 1).clamp(min=0)),
))
def test_what_only_the_step_shows(runner, monkeypatch, what, wrong):
    """A path that is not moved, tokens that are not the best."""
    right = pkgutil.resolve_name(what)
    monkeypatch.setattr(what, lambda *a: wrong(right, a))
    (line,) = check(runner)
    assert line.startswith("the captured step is wrong and runs uncompiled: ")


def test_ranks_leave_out_what_fails_on_any(runner, monkeypatch):
    sent = []

    class Ranks:
        def all_gather(self, x):
            sent.append(x)
            return torch.stack((x, x.new_tensor([part == "rank" for part in fallback.KERNELS])))

    runner.target.ranks = Ranks()
    assert checking.failed_on_any_rank(runner, {"attend": "wrong"}) == ["attend", "rank"]


@pytest.mark.parametrize("four", (False, True))
def test_the_layout_of_weights_is_inverted(four):
    weight = torch.randint(0, 256, (3, 70, 96), dtype=torch.uint8)
    weight = weight if four else weight.view(torch.int8)
    words = torch.stack([products.to_register_order(x) for x in weight])
    assert torch.equal(products.from_register_order(words, 70, 192 if four else 96, four), weight)


def test_lost_keys_are_seen_in_bfloat16():
    """Of 3,000 keys 32 are lost: by an absolute limit of 2e-2 that would pass."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, n, 128, generator=draw).bfloat16() for n in (8, 3000, 3000))
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(q.float(), k.float(), v.float()).bfloat16()
    right, wrong = attend(q, k, v), attend(q, k[:, :, 32:], v[:, :, 32:])
    limit = checking.KERNEL_EPS * torch.finfo(torch.bfloat16).eps
    assert (wrong - exact).abs().max() < 2e-2 and checking.difference("keys", wrong, exact, limit).ratio > 3
    assert checking.difference("keys", right, exact, limit).ratio < 0.5
