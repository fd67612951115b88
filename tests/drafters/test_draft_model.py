"""A smaller model drafts: it reads what the target reads; random proposals keep the distribution."""
import pytest
import torch
from helpers.decoding import ids, plain
from helpers.drafters import few_tokens
from helpers.statistics import chi_square, chi_square_limit

from drafters.draft_model import DraftModel
from engine.engine import Engine
from sampling.options import Sampling
from tree import TreeShape

CHAIN = TreeShape(5, 3, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_is_never_wrong(models, temperature):
    """Every token it drafts is accepted, also with noise, and where a conversation goes on in kept caches: it
    reads what the target reads, where the target reads it. This is the whole of the drafter's book-keeping.
    """
    engine = Engine(models[0], DraftModel(models[0], CHAIN), chunks=(8,), max_seq_len=250, compile=False)
    text = prompt = [256, *range(97, 120)]
    for _ in range(3):
        request, = engine.generate([text], Sampling(41, temperature, seed=5))
        assert set(request.accept_lengths[:-1]) == {CHAIN.window}
        assert request.cached == 0 if text is prompt else request.cached > len(text) - 8
        assert [request.ids] == ids(plain(models), [text], Sampling(41, temperature, seed=5))
        text = [*request.tokens, 50, 51, 52]


@pytest.mark.slow
def test_residual_acceptance_has_the_targets_distribution():
    """Of 6,000 whole texts of four tokens of a vocabulary of three, so also of the token after a chain that
    was accepted whole: chi-square at 1e-6. The other model is often wrong.
    """
    V, T, B = 3, 4, 60
    target, draft = few_tokens(V, 0), few_tokens(V, 3)
    engine = Engine(target, DraftModel(draft, TreeShape(3, 1, 1), rule="residual"), batch=B,
                    max_seq_len=16, compile=False)
    found, lengths = torch.zeros(V**T), []
    for begin in range(0, 6000, B):
        samplings = [Sampling(T, 1.0, seed=begin + i) for i in range(B)]
        for request in engine.generate([[0, 1]] * B, samplings):
            found[sum(token * V**i for i, token in enumerate(request.ids))] += 1
            lengths.append(request.accept_lengths[0])
    texts = torch.arange(V**T)[:, None] // V ** torch.arange(T) % V
    x, _ = target.causal(torch.cat((torch.tensor([[0, 1]]).expand(V**T, -1), texts[:, :-1]), 1))
    p = target.logits(x[:, 1:]).double().softmax(-1).gather(2, texts[..., None])
    expected = len(lengths) * p.prod(1)[:, 0]
    common = expected > 20
    statistic, limit = chi_square(found[common], expected[common]), chi_square_limit(int(common.sum()))
    assert statistic < limit and common.sum() > V**T / 2
    assert all(lengths.count(n) > 500 for n in (1, 2, 3))
