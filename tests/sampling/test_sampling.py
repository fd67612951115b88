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


@pytest.fixture(scope="module")
def bits():
    return random_bits(seed_keys([0, 1, 12345678901234567]), torch.arange(40).expand(3, 40), 16384)


def test_bits_are_uniform(bits):
    for shift in (0, 8, 16, 24):  # each byte, over all and per seed
        for part in (bits, *bits):
            counts = ((part >> shift) & 255).flatten().bincount(minlength=256)
            assert chi_square(counts, part.numel() / 256) < chi_square_limit(255)


def test_neighbours_are_independent(bits):
    high, low = bits >> 28, (bits >> 4) & 15
    pairs = {
        "token ids": (high[..., :-1], high[..., 1:]),
        "positions": (high[:, :-1], high[:, 1:]),
        "seeds": (high[0], high[1]),
        "id here, next id at the next position": (high[:, :-1, 1:], high[:, 1:, :-1]),
        "low bits of ids": (low[..., :-1], low[..., 1:]),
        "high and low bits": (high, low),
    }
    for name, (a, b) in pairs.items():
        counts = (a * 16 + b).flatten().bincount(minlength=256)
        assert chi_square(counts, a.numel() / 256) < chi_square_limit(255), name


def test_every_input_bit_moves_half_the_output():
    def at(key, position):
        return random_bits(torch.tensor([key]), torch.tensor([[position]]), 4096)[0, 0]

    base = at([3, 5], 1000)
    for other in (
        at([2, 5], 1000), at([3, 4], 1000), at([3, 5 ^ 2**31], 1000), at([3, 5], 1001), at([3, 5], 1000 ^ 512)
    ):
        flips = torch.stack([((base ^ other) >> i & 1).double().mean() for i in range(32)])
        assert (flips - 0.5).abs().max() < 5 * 0.5 / math.sqrt(4096)


def test_positions_share_no_word():
    """Of 2^23 numbers of 32 bits as many are equal as of independent ones: 8,192 pairs, to 5 sigma (6e-7).

    Were one of a position's two words the same for all, these would be permutations of one another, with a
    tenth fewer pairs.
    """
    bits = random_bits(seed_keys([9]), torch.arange(256)[None], 32768)
    pairs = bits.numel() - len(bits.unique())
    assert abs(pairs - 8192) < 5 * math.sqrt(8192), pairs


@pytest.mark.slow
def test_gumbel_tail_is_resolved():
    """P(g > x) = 1 - exp(-exp(-x)) out to 1e-6, and the largest values are all different."""
    g = torch.cat([gumbel(seed_keys([s]), torch.arange(64)[None], 49152).flatten() for s in range(16)])
    assert torch.isfinite(g).all()
    for p in (0.5, 1e-2, 1e-4, 1e-6):
        above = int((g > -math.log(-math.log1p(-p))).sum())
        mean = p * g.numel()
        assert abs(above - mean) < 5 * math.sqrt(mean * (1 - p)), (p, above, mean)
    top = g.topk(1000).values
    assert top.unique().numel() > 990  # on a 2^-24 grid of uniforms a third of these would coincide
    assert g.max() > -math.log(4 / g.numel())


@pytest.mark.compile
@pytest.mark.dear
def test_same_bits_compiled():
    key, positions = seed_keys([7, 8]), torch.tensor([[5, 6], [900, 901]])
    compiled = torch.compile(random_bits, fullgraph=True)
    assert torch.equal(compiled(key, positions, 1000), random_bits(key, positions, 1000))


def test_noise_depends_on_seed_position_and_id_only():
    key, positions = seed_keys([3, 4]), torch.tensor([[10, 11], [11, 12]])
    g = gumbel(key, positions, 500)
    alone = gumbel(seed_keys([4]), torch.tensor([[12]]), 500)
    assert torch.equal(g[1, 1], alone[0, 0])
    assert not torch.equal(g[0, 1], g[1, 0])  # one position, two seeds
    assert torch.equal(gumbel(key, positions, 200), g[..., :200])


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
