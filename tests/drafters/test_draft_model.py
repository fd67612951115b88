"""A smaller model drafts: it reads what the target reads; random proposals keep the distribution."""
import dataclasses

import pytest
import torch
from helpers.decoding import check_distribution, ids, plain

from drafters.draft_model import DraftModel
from engine.engine import Engine
from model import Transformer, inverse_frequencies
from sampling.options import Sampling
from tree import TreeShape

CHAIN, WIDE = TreeShape(5, 3, 1), TreeShape(16, 3, 4)
PROMPTS = [[256, 104, 105], [256, *range(97, 120)], [256, 1]]


def smaller(target: Transformer, seed: int = 0) -> Transformer:
    """A random model of one layer with the target's vocabulary, its embedding and so some of its habits."""
    torch.manual_seed(seed)
    model = Transformer(dataclasses.replace(target.args, num_layers=1)).requires_grad_(False)
    model.embed.weight.copy_(target.embed.weight)
    model.norm.load_state_dict(target.norm.state_dict())
    model.layers[0].load_state_dict(target.layers[0].state_dict())
    if target.lm_head is not None:
        model.lm_head.load_state_dict(target.lm_head.state_dict())
    model.inv_freq = inverse_frequencies(model.args)
    return model.eval()


def engine_of(
    target: Transformer, model: Transformer, shape: TreeShape, rule: str = "equal", **options
) -> Engine:
    options = {"max_seq_len": 250, "compile": False} | options
    return Engine(target, DraftModel(model, shape, rule=rule), **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_is_never_wrong(models, temperature):
    """Every token it drafts is accepted, also with noise, and where a conversation goes on in kept caches: it
    reads what the target reads, where the target reads it. This is the whole of the drafter's book-keeping.
    """
    engine, text = engine_of(models[0], models[0], CHAIN, chunks=(8,)), PROMPTS[1]
    for _ in range(3):
        request, = engine.generate([text], Sampling(41, temperature, seed=5))
        assert set(request.accept_lengths[:-1]) == {CHAIN.window}
        assert request.cached == 0 if text is PROMPTS[1] else request.cached > len(text) - 8
        assert [request.ids] == ids(plain(models), [text], Sampling(41, temperature, seed=5))
        text = [*request.tokens, 50, 51, 52]


@pytest.mark.slow
def test_residual_acceptance_has_the_targets_distribution(models):
    """With a draft model that is often wrong; each chi-square at 1e-6."""
    target, draft, sizes = models[0], smaller(models[0]), {"batch": 256, "max_seq_len": 64}
    engine = engine_of(target, draft, TreeShape(3, 1, 1), "residual", **sizes)
    check_distribution(target, engine)
    requests = engine.generate([PROMPTS[0]] * 256, [Sampling(12, 0.8, seed=i) for i in range(256)])
    lengths = [n for r in requests for n in r.accept_lengths]
    assert 1.02 < sum(lengths) / len(lengths) < 3
