"""A smaller model drafts: it reads what the target reads; random proposals keep the distribution."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers.decoding import check_distribution, ids, plain
from helpers.states import chain
from helpers.statistics import chi_square, chi_square_limit

from drafters.draft_model import DraftModel
from engine.engine import Engine
from model import Transformer, inverse_frequencies
from sampling.acceptance import residual
from sampling.noise import gumbel
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


def test_every_position_of_a_residual_chain_has_the_targets_distribution():
    """Two Markov chains over six tokens, one of the target and one that drafts three tokens: at every
    position the token emitted after each token is distributed as the target's, also the token after a chain
    that was accepted whole. 200,000 seeds, chi-square at 1e-6 per position.
    """
    g, B, V, D, temperature = torch.Generator().manual_seed(0), 200_000, 6, 3, 0.7
    target, draft = torch.randn(V, V, generator=g), torch.randn(V, V, generator=g)
    p, q = (target / temperature).softmax(-1), (0.5 * draft + target).softmax(-1)
    key = torch.randint(2**31, (B, 2), generator=g)
    tokens = [torch.zeros(B, dtype=torch.int64)]
    for _ in range(D):
        tokens.append(torch.multinomial(q[tokens[-1]], 1, generator=g)[:, 0])
    tree, distribution = chain(torch.stack(tokens, 1)), torch.stack([q[t] for t in tokens[:-1]], 1)
    length, warm = torch.full((B,), 9), torch.full((B,), temperature)
    noise = temperature * gumbel(key, length[:, None] + 1 + torch.arange(D + 1), V)
    state = SimpleNamespace(temperature=warm, key=key, length=length)
    agrees, drawn = residual(tree, distribution, target[tree.tokens], noise, state)
    accepted = agrees[:, 1:].long().cumprod(1).sum(1)
    for position in range(D + 1):
        here = accepted >= position
        before, emitted = tree.tokens[here, position], drawn[here, position]
        if position < D:
            emitted = torch.where(accepted[here] > position, tree.tokens[here, position + 1], emitted)
        seen = torch.zeros(V, V).index_put_((before, emitted), torch.ones(len(emitted)), accumulate=True)
        expected = p * seen.sum(1, keepdim=True)
        common = expected > 20
        statistic = chi_square(seen[common].double(), expected[common].double())
        assert statistic < chi_square_limit(int(common.sum())) and here.sum() > 5000
