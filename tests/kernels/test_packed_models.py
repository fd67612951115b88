"""Complete models on the CPU kernels: equal to PyTorch, and drafted output equals plain output."""
import copy
from functools import partial

import pytest
import torch
from helpers.decoding import check_outputs, ids
from helpers.drafters import small_models
from helpers.kernels import DTYPES, same
from helpers.states import state_of
from shapes import random_models

from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from engine.step import Step
from families.mixed import causal
from kernels.choose import choose_backend
from kernels.packed import PackedLinear
from model import MLP, ModelArgs, Transformer
from schedulers.costs import MarginalCosts
from tree import TreeShape

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("options", (
    {}, {"tie_embeddings": True}, {"qkv_bias": True}, {"qk_norm": True, "norm_eps": 0.5},
    *({"of_head": options} for options in (
        {"num_layers": 2, "windows": (5, 30), "draft_vocab_size": 96}, {"recycle_normed": True},
        {"own_embedding": True}, {"own_lm_head": False}, {"norm_before_residual": True},
    )),
    {"num_experts": 20, "experts_per_token": 3, "renormalise_experts": False},
    {"biases": True, "activation": "clamped_swiglu"},
))
def test_packed_model_equals_pytorch(options):
    """Other families: tests/checkpoint/test_families.py."""
    target, head = small_models(160, 64, 6, **options)
    prompt = list(range(3, 40))
    shape = TreeShape(12, 3, 4)

    def decode():
        return Engine(
            target, HeadDrafter(head, shape), compile=False, max_seq_len=200
        ).generate([prompt], Sampling(80))[0]

    tokens = torch.randint(0, 160, (2, 30))
    before, logits = decode(), target.logits(causal(target, tokens)[0])
    choose_backend("cpu").prepare(target, head)
    assert isinstance(target.layers[0].wo, PackedLinear) and isinstance(target.lm_head, PackedLinear)
    assert isinstance(head.fc, PackedLinear)
    in_parts = getattr(head.args, "norm_before_residual", False)
    assert (head.fused is None) == in_parts
    target = copy.deepcopy(target)
    after = decode()
    assert after.ids == before.ids and after.accept_lengths == before.accept_lengths
    found = target.logits(causal(target, tokens)[0])
    assert (found - logits).norm() < 1e-5 * logits.norm()


def test_pass_larger_than_scratch_buffers():
    """A pass larger than the per-thread scratch buffers gives the results of smaller passes, and so do the
    passes after it.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 8192, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    target = Transformer(ModelArgs(vocab_size=160, num_layers=2, max_seq_len=1024, **sizes)).bfloat16().eval()
    backend = choose_backend("cpu")
    backend.prepare(target)
    tokens, slots, caches = torch.randint(160, (1, 700)), torch.arange(700), target.caches(1, 700)

    def read(start: int, end: int) -> torch.Tensor:
        visible = backend.step.causal_mask(slots, torch.tensor([start]), end - start)
        at = slots[None, start:end]
        return target(tokens[:, start:end], at, at, visible, caches)[0]

    with torch.no_grad(), backend.threads():
        parts = [read(at, at + 100) for at in range(0, 700, 100)]
        for _ in range(2):
            same(read(0, 700), torch.cat(parts, 1))
            same(read(600, 700), parts[-1])


def test_unsupported_layers_stay_in_pytorch():
    target, head = small_models(160, 64, dtype=torch.float16)
    assert not choose_backend("cpu").prepare(target, head)
    assert not any(isinstance(m, PackedLinear) for m in target.modules())
    # 9 values in a row: no pairs.
    odd = Transformer(ModelArgs(20, 12, 9, 1, 2, 1, 6)).to(torch.bfloat16).requires_grad_(False)
    assert not choose_backend("cpu").prepare(odd)
    assert isinstance(odd.layers[0].mlp, MLP) and isinstance(odd.layers[0].wo, PackedLinear)
    assert len(Engine(odd, compile=False, max_seq_len=60).generate([[1, 2]], Sampling(20))[0].ids) == 20


@pytest.mark.parametrize("mode", (None, "int8", "w8a8", "w4a8", "mxfp4"))
def test_mixture_of_experts(mode):
    """In float32 it equals PyTorch. In any dtype a row's bits depend on no other row, and speculative output
    equals plain output.
    """
    rounds = mode in ("w8a8", "w4a8", "mxfp4")
    limit = 1e-2 if rounds else 1e-5  # inputs near a tie may round to the next value
    for dtype in DTYPES:
        target, head = random_models("tiny-mixture", dtype, "cpu", mode, 32)
        for layer in target.layers:
            layer.mlp.router.weight.data *= 50  # so that rounding makes no tie
        defined, tokens, at = copy.deepcopy(target), torch.randint(0, 512, (2, 50)), torch.arange(50)[None]
        assert choose_backend("cpu").prepare(target, head) and target.fused
        found, want = causal(target, tokens)[0], causal(defined, tokens)[0]
        assert dtype != torch.float32 or (found - want).norm() < limit * want.norm()
        at, visible = at.expand(2, -1), (torch.arange(64) <= at[0, :, None]).expand(2, -1, -1)
        together, caches = target(tokens, at, at, visible, target.caches(2, 64))[0], target.caches(2, 64)
        rows = [target(*(x[:, [i]] for x in (tokens, at, at, visible)), caches)[0] for i in range(50)]
        assert torch.equal(torch.cat(rows, 1), together)
    made = [([1, 2, 3], Sampling(40)), ([*range(9, 40)], Sampling(40, 1.0, seed=3))]
    fast, plain = (Engine(target, drafter, compile=False, max_seq_len=100)
                   for drafter in (HeadDrafter(head, TreeShape(8, 2, 4)), None))
    check_outputs(ids(fast, *map(list, zip(*made))), ids(plain, *map(list, zip(*made))), made)


@pytest.mark.parametrize("dtype, sampled", zip(DTYPES, (False, True)))
@pytest.mark.parametrize("price", (None, 0.02, 0.4, 8.0))
@pytest.mark.parametrize("of_head, window", (
    ({}, 0), ({"num_layers": 3}, 0), ({}, 6), ({"feature_norm": "each"}, 0), ({"recycle_normed": True}, 0),
))
def test_fused_draft_operator(dtype, sampled, price, of_head, window):
    """The fused operator gives the bits of the separate operations, for texts of several lengths and any
    draft cost. One variant of the head has no fused operator.
    """
    target, head = small_models(160, 64, 6, dtype, {"draft_vocab_size": 96} | of_head)
    head.set_sliding_window(window)
    choose_backend("cpu").prepare(target, head)
    assert head.fused.has_draft_operator == head.feeds_residual
    state = state_of([list(range(3, 3 + n)) for n in (12, 9, 20)])
    state.max_commit = 4
    state.n_unread.copy_(torch.tensor([1, 4, 7]))  # the last one is held still
    state.features = torch.randn(3, 7, head.args.feature_width).to(dtype)
    noise = torch.randn(3, 5, 160) if sampled else None
    nodes, confidence = torch.linspace(price or 0, 2 * (price or 0), 10), torch.tensor([2.0, 4.0, 0.0])
    costs = MarginalCosts(2 * price, nodes, confidence) if price else None
    found = []
    step = target.backend.step
    for draft in (step.draft, partial(Step.draft, step)):
        torch.manual_seed(0)
        drafter = HeadDrafter(head, TreeShape(11, 2, 3))
        drafter.allocate(3, 40, dtype, "cpu")
        for buffer in drafter.caches.buffers():
            buffer.normal_()
        tree = draft(drafter, state, torch.arange(34), noise, costs)
        found.append([*tree, *drafter.caches.buffers()])
    nodes = found[0][0].shape[1]
    if price is None or price < 0.1:
        assert nodes == 11 and tree.levels == 2
    else:
        assert nodes < (10 if price < 1 else 3)
    same(*found)
