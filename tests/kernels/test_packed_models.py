"""Whole models on the kernels: they are the models, and speculative text is plain text."""
import copy
from functools import partial

import pytest
import torch
from helpers.decoding import check_texts, ids
from helpers.kernels import DTYPES, same
from helpers.models import model_of
from helpers.states import state_of
from shapes import random_models

from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from engine.step import Step
from kernels.choose import choose_backend
from kernels.packed import PackedLinear
from model import MLP, ModelArgs, Transformer
from schedulers.marginal_costs import MarginalCosts
from tree import TreeShape

pytestmark = pytest.mark.kernels


def tiny(dtype, seed=0, head_dim=32, of_head=None, **options):
    """A random target and EAGLE-3 head."""
    torch.manual_seed(seed)
    size = {
        "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": head_dim
    }
    target = model_of(num_layers=6, max_seq_len=512, **size, **options)
    of_head = {"num_layers": 1, "draft_vocab_size": 96, **(of_head or {})}
    head = model_of("eagle3", target_hidden_size=64, aux_layers=(2, 3, 4), **size, **of_head)
    head.draft_ids.copy_(torch.randperm(160)[: head.args.draft_vocab_size].sort().values)
    for p in [*target.parameters(), *head.parameters()]:
        p.data = (
            torch.randn(p.shape) * 0.25
        ).to(dtype) if p.dim() > 1 else torch.rand(p.shape).to(dtype) + 0.5
    target.requires_grad_(False), head.requires_grad_(False)
    head.use_target(target)
    return target.eval(), head.eval()


WINDOWS = {"windows": (9, 9, 0, 9, 40, 0)}
GEMMA = WINDOWS | {
    "local_rope_base": 500.0, "activation": "gelu_tanh", "scaled_embedding": True, "zero_centred": True,
    "output_norms": True, "query_scalar": 24, "qk_norm": True, "norm_eps": 0.5, "tie_embeddings": True,
}


GPT_OSS = WINDOWS | {
    "num_experts": 6, "experts_per_token": 3, "qkv_bias": True, "biases": True, "sinks": True,
    "activation": "clamped_swiglu",
}


VARIANTS = (  # Gemma 2; OLMo 3; SmolLM3, Granite and Phi-4 in one
    GEMMA | {"score_cap": 1.5, "logit_cap": 4.0, "qk_norm": False, "local_rope_base": None},
    WINDOWS | {"local_rope_base": 500.0, "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}} | dict.fromkeys(
            ("output_norms", "only_output_norms", "wide_qk_norm"), True),
    {"unrotated_layers": (0, 1, 0, 0, 1, 0), "residual_factor": 0.3, "embedding_factor": 6.0,
     "logit_divisor": 3.0, "query_scalar": 9.0, "rotary_dim": 4},
)


@pytest.mark.parametrize("options", (
    *VARIANTS, {},
    {"tie_embeddings": True}, {"qkv_bias": True}, {"qk_norm": True, "norm_eps": 0.5}, WINDOWS, GEMMA,
    *({"of_head": options} for options in (
        {"num_layers": 2, "windows": (5, 30)}, {"recycle_normed": True}, {"own_embedding": True},
        {"own_lm_head": False, "draft_vocab_size": 160}, {"norm_before_residual": True},
    )),
    {"num_experts": 5, "experts_per_token": 2},
    {"num_experts": 20, "experts_per_token": 3, "renormalise_experts": False}, GPT_OSS,
    {"biases": True, "activation": "clamped_swiglu"},
))
def test_a_packed_model_is_the_model(options):
    target, head = tiny(torch.float32, **options)
    prompt = list(range(3, 40))
    shape = TreeShape(12, 3, 4)

    def decode():
        return Engine(
            target, HeadDrafter(head, shape), compile=False, max_seq_len=200
        ).generate([prompt], Sampling(80))[0]

    tokens = torch.randint(0, 160, (2, 30))
    before, logits = decode(), target.logits(target.causal(tokens)[0])
    choose_backend("cpu").prepare(target, head)
    assert isinstance(target.layers[0].wo, PackedLinear) and isinstance(target.lm_head, PackedLinear)
    assert isinstance(head.fc, PackedLinear)
    in_parts = getattr(head.args, "norm_before_residual", False)
    assert (head.fused is None) == in_parts
    target = copy.deepcopy(target)
    after = decode()
    assert after.ids == before.ids and after.accept_lengths == before.accept_lengths
    found = target.logits(target.causal(tokens)[0])
    assert (found - logits).norm() < 1e-5 * logits.norm()


@pytest.mark.slow
@pytest.mark.parametrize("dtype, temperature, cache, head_dim, options", (
    (torch.bfloat16, 0.0, "auto", 32, {}), (torch.bfloat16, 1.0, "int8", 6, {}),
    (torch.float32, 0.0, "int8", 100, {}), (torch.float32, 1.0, "auto", 100, {}),
    (torch.bfloat16, 0.0, "auto", 32, GEMMA), (torch.bfloat16, 1.0, "int8", 32, GEMMA),
    (torch.bfloat16, 0.0, "auto", 32, GPT_OSS), (torch.bfloat16, 1.0, "int8", 32, GPT_OSS),
    *((torch.bfloat16, 0.0, "auto", 32, options) for options in VARIANTS),
    (torch.bfloat16, 1.0, "int8", 32, VARIANTS[0]),
))
def test_speculative_text_is_plain_text_in_any_dtype(dtype, temperature, cache, head_dim, options):
    """Six prompts, 150 tokens, on models so flat that bfloat16 ties abound: on plain PyTorch half of the
    texts part.
    """
    target, head = tiny(dtype, head_dim=head_dim, **options)
    assert choose_backend("cpu").prepare(target, head)
    target.Caches = target.backend.caches[cache]
    made = [
        ([*range(i, 10 + 8 * i)], Sampling(150, temperature, 0.9 + 0.1 * (i % 2), 40 * (i % 3), seed=i))
        for i in range(1, 7)
    ]
    prompts, sampling = map(list, zip(*made))
    plain = Engine(target, compile=False, max_seq_len=300).generate(prompts, sampling)
    for shape in (TreeShape(2, 0, 1), TreeShape(40, 4, 6)):
        fast = Engine(target, HeadDrafter(head, shape), batch=3, compile=False, max_seq_len=300)
        check_texts(ids(fast, prompts, sampling), [o.ids for o in plain], made)


def test_a_pass_that_needs_more_room_than_a_thread_keeps():
    """It computes what passes over fewer rows do, and so do those after it."""
    sizes = {"hidden_size": 64, "intermediate_size": 8192, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    target = Transformer(ModelArgs(vocab_size=160, num_layers=2, max_seq_len=1024, **sizes)).bfloat16().eval()
    backend = choose_backend("cpu")
    backend.prepare(target)
    tokens, slots, caches = torch.randint(160, (1, 700)), torch.arange(700), target.caches(1, 700)

    def read(start: int, end: int) -> torch.Tensor:
        visible = backend.causal_mask(slots, torch.tensor([start]), end - start)
        at = slots[None, start:end]
        return target(tokens[:, start:end], at, at, visible, caches)[0]

    with torch.no_grad(), backend.threads():
        parts = [read(at, at + 100) for at in range(0, 700, 100)]
        for _ in range(2):
            same(read(0, 700), torch.cat(parts, 1))
            same(read(600, 700), parts[-1])


def test_what_the_kernels_cannot_take_is_left_alone():
    target, head = tiny(torch.float16)
    assert not choose_backend("cpu").prepare(target, head)
    assert not any(isinstance(m, PackedLinear) for m in target.modules())
    # 9 values in a row: no pairs.
    odd = Transformer(ModelArgs(20, 12, 9, 1, 2, 1, 6)).to(torch.bfloat16).requires_grad_(False)
    assert not choose_backend("cpu").prepare(odd)
    assert isinstance(odd.layers[0].mlp, MLP) and isinstance(odd.layers[0].wo, PackedLinear)
    assert len(Engine(odd, compile=False, max_seq_len=60).generate([[1, 2]], Sampling(20))[0].ids) == 20


@pytest.mark.parametrize("mode", (None, "int8", "w8a8", "w4a8", "mxfp4"))
def test_a_mixture(mode):
    """In float32 it is its definition. In any dtype a row's bits depend on no other row, and drafted text is
    plain text.
    """
    rounds = mode in ("w8a8", "w4a8", "mxfp4")
    limit = 1e-2 if rounds else 1e-5  # inputs near a tie may round to the next value
    for dtype in DTYPES:
        target, head = random_models("tiny-mixture", dtype, "cpu", mode, 32)
        for layer in target.layers:
            layer.mlp.router.weight.data *= 50  # so that rounding makes no tie
        defined, tokens, at = copy.deepcopy(target), torch.randint(0, 512, (2, 50)), torch.arange(50)[None]
        assert choose_backend("cpu").prepare(target, head) and target.fused
        found, want = target.causal(tokens)[0], defined.causal(tokens)[0]
        assert dtype != torch.float32 or (found - want).norm() < limit * want.norm()
        at, visible = at.expand(2, -1), (torch.arange(64) <= at[0, :, None]).expand(2, -1, -1)
        together, caches = target(tokens, at, at, visible, target.caches(2, 64))[0], target.caches(2, 64)
        rows = [target(*(x[:, [i]] for x in (tokens, at, at, visible)), caches)[0] for i in range(50)]
        assert torch.equal(torch.cat(rows, 1), together)
    made = [([1, 2, 3], Sampling(40)), ([*range(9, 40)], Sampling(40, 1.0, seed=3))]
    fast, plain = (Engine(target, drafter, compile=False, max_seq_len=100)
                   for drafter in (HeadDrafter(head, TreeShape(8, 2, 4)), None))
    check_texts(ids(fast, *map(list, zip(*made))), ids(plain, *map(list, zip(*made))), made)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampled", (False, True))
@pytest.mark.parametrize("price", (None, 0.02, 0.12, 1.0))
@pytest.mark.parametrize("of_head, window", (
    ({}, 0), ({"num_layers": 3}, 0), ({}, 6), ({"feature_norm": "each"}, 0), ({"recycle_normed": True}, 0),
))
def test_a_heads_tree_is_one_operator(dtype, sampled, price, of_head, window):
    """The bits of its parts one after the other, after texts of several lengths, whatever drafts cost. One
    variant is not.
    """
    target, head = tiny(dtype, of_head=of_head)
    head.set_sliding_window(window)
    choose_backend("cpu").prepare(target, head)
    assert head.fused.has_draft_operator == head.feeds_residual
    state = state_of([list(range(3, 3 + n)) for n in (12, 9, 20)])
    state.max_commit = 4
    state.n_new.copy_(torch.tensor([1, 4, 7]))  # the last one is held still
    state.features = torch.randn(3, 7, head.args.feature_width).to(dtype)
    noise = torch.randn(3, 5, 160) if sampled else None
    nodes, confidence = torch.linspace(price or 0, 2 * (price or 0), 10), torch.tensor([2.0, 4.0, 0.0])
    costs = MarginalCosts(2 * price, nodes, confidence) if price else None
    found = []
    for draft in (target.backend.draft, partial(Step.draft, target.backend)):
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
