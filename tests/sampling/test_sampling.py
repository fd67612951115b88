"""The noise and the sampler, by statistics with fixed seeds: what fails here fails always, and nothing fails
by chance.

Thresholds are quantiles of the chi-square distribution at 1e-6: a correct generator with another seed would
pass all of them with probability above 0.9999.
"""
import math

import pytest
import torch
from helpers.statistics import chi_square, chi_square_limit

from engine.state import State
from engine.step import noise_ahead, shape_logits
from kernels.backend import TORCH
from sampling.adjust import restrict
from sampling.noise import gumbel, random_bits, seed_keys
from sampling.options import Modes


def test_noise_is_what_it_was():
    """Its bits, which passed tests of uniformity and independence, are part of what a seed means."""
    key, positions = seed_keys([0, 2**40 + 5, -1]), torch.tensor([[0, 7], [3, 2**20], [1, 2]])
    assert seed_keys([-1]).equal(seed_keys([2**64 - 1])) and key[1].tolist() == [5, 256]
    assert random_bits(key, positions, 50_000)[:, :, [0, 1, -1]].tolist() == [
        [[1771138254, 2551901228, 1372108264], [305896318, 1417611487, 3751644114]],
        [[4216488514, 1048815898, 4054664030], [3158697459, 1907099943, 2069743635]],
        [[466583475, 259554027, 699699022], [439003345, 486545697, 2027781060]],
    ]
    found = gumbel(key, positions, 50_000)
    assert found.max() == pytest.approx(12.3256493)
    torch.testing.assert_close(found[..., [0, -1]].flatten(), torch.tensor([
        0.63173836, 0.95481926, 2.60523772, -0.72633767, -1.3868866, -1.05892945, -0.28494814, 0.41917893,
        2.16281271, 1.72695351, 2.22726512, 0.44800037,
    ]))


def reference_restrict(logits, temperature, top_k, top_p):
    """Sorted, one row at a time, in float64."""
    keep = torch.ones_like(logits, dtype=torch.bool)
    if temperature > 0:
        if 0 < top_k < logits.numel():
            keep &= logits >= logits.sort(descending=True).values[top_k - 1]
        if top_p < 1:
            p = (logits.double().masked_fill(~keep, -math.inf) / temperature).softmax(-1)
            order = p.argsort(descending=True, stable=True)
            needed = int((p[order].cumsum(0) < top_p).sum()) + 1
            keep &= logits >= logits[order[min(needed, logits.numel()) - 1]]
    return logits.masked_fill(~keep, -math.inf)


@pytest.mark.parametrize("top_k", [0, 1, 5, 300, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_restrict_equals_sorting(top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(3, 3, 300) * 4
    logits[0, 0, :7] = logits[0, 0].max()  # ties
    temperature = torch.tensor([0.7, 1.3, 0.0])
    got = restrict(logits, temperature, torch.full((3,), top_k), torch.full((3,), top_p))
    for b in range(3):
        for t in range(3):
            want = reference_restrict(logits[b, t], float(temperature[b]), top_k, top_p)
            assert torch.equal(got[b, t], want)


def test_the_token_that_reaches_top_p_exactly_is_the_last():
    kept = restrict(torch.tensor([[[2.0, 1.0, 1.0]]]).log(), *map(torch.tensor, ([1.0], [0], [0.5])))
    assert (kept > -math.inf).tolist() == [[[True, False, False]]]


@pytest.mark.parametrize(
    "temperature,top_k,top_p", [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.5, 6, 1.0), (1.0, 0, 0.8), (0.9, 8, 0.7)]
)
def test_sampler_has_the_exact_distribution(temperature, top_k, top_p):
    """60,000 seeds at one position against exact probabilities."""
    torch.manual_seed(1)
    B, V = 60000, 24
    logits = torch.randn(V)
    state = State(B, 8, 1, 0, [], torch.float32, "cpu")
    state.key.copy_(seed_keys(list(range(B))))
    state.length.fill_(17)
    state.temperature.fill_(temperature)
    state.top_k.fill_(top_k)
    state.top_p.fill_(top_p)
    modes, root = Modes(True, top_k > 0 or top_p < 1), torch.zeros(B, 1, dtype=torch.int64)
    allowed = shape_logits(logits.expand(B, 1, V), state, modes, root)
    chosen = TORCH.draw(allowed, noise_ahead(state, 1, V))
    p = (reference_restrict(logits, temperature, top_k, top_p).double() / temperature).softmax(-1)
    counts = chosen.flatten().bincount(minlength=V)
    assert counts[p == 0].sum() == 0
    counts, p = counts[p > 0], p[p > 0]
    assert len(p) > 1
    assert chi_square(counts, B * p) < chi_square_limit(len(p) - 1)
