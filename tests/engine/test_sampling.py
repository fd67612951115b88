"""Gumbel noise, logits processing and the sampler. Statistical tests have fixed seeds and thresholds at
chi-square quantiles of 1e-6: with another seed, correct code passes all with probability above 0.9999.
"""
import math

import pytest
import torch
from helpers.decoding import check_counts, check_distribution, speculative
from helpers.drafters import small_models

from engine.sampling import MAX_STOPS, Modes, Sampling, gumbel, random_bits, restrict, seed_keys
from engine.state import State
from engine.step import Step, process_logits
from tree import TreeShape, depth_and_ancestors


def test_noise_bits_are_stable():
    """Outputs of a seed depend on these bits, which passed tests of uniformity and independence."""
    key, positions = seed_keys([0, 2**40 + 5, -1]), torch.tensor([[0, 7], [3, 2**20], [1, 2]])
    assert seed_keys([-1]).equal(seed_keys([2**64 - 1])) and key[1].tolist() == [5, 256]
    assert random_bits(key, positions, 50_000)[:, :, [0, 1, -1]].tolist() == [
        [[1771138254, 2551901228, 1372108264], [305896318, 1417611487, 3751644114]],
        [[4216488514, 1048815898, 4054664030], [3158697459, 1907099943, 2069743635]],
        [[466583475, 259554027, 699699022], [439003345, 486545697, 2027781060]],
    ]
    noise = gumbel(key, positions, 50_000)
    assert noise.max() == pytest.approx(12.3256493)
    torch.testing.assert_close(noise[..., [0, -1]].flatten(), torch.tensor([
        0.63173836, 0.95481926, 2.60523772, -0.72633767, -1.3868866, -1.05892945, -0.28494814, 0.41917893,
        2.16281271, 1.72695351, 2.22726512, 0.44800037,
    ]))


def reference_restrict(logits, temperature, top_k, top_p):
    """Apply top-k and top-p to logits [V] by sorting, in float64."""
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


def reference_process(logits, prompt: list[int], output: list[int], sampling: Sampling) -> torch.Tensor:
    """Return the logits [V] after prompt and output: biases and penalties token by token, then top-k, top-p
    and min-p.
    """
    logits, bias, repetition = logits.double(), dict(sampling.logit_bias), sampling.repetition_penalty
    for token, x in enumerate(logits.tolist()):
        x, times = x + bias.get(token, 0.0), output.count(token)
        if times or token in prompt:
            x = x / repetition if x > 0 else x * repetition
        logits[token] = x - sampling.frequency_penalty * times - sampling.presence_penalty * (times > 0)
    if not sampling.temperature:
        return logits
    logits = reference_restrict(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    p = (logits / sampling.temperature).softmax(-1)
    return logits.masked_fill(p < sampling.min_p * p.max(), -math.inf)


SAMPLINGS = [
    Sampling(presence_penalty=0.7), Sampling(frequency_penalty=-0.4), Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.5, logit_bias={"0": 5, 3: -100}), Sampling(top_k=2, top_p=0.3, min_p=0.5),
    Sampling(temperature=0.3, min_p=0.5), Sampling(temperature=1.0, min_p=1.0),
    Sampling(
        temperature=1.4, top_k=9, top_p=0.9, min_p=0.05, presence_penalty=-1, frequency_penalty=1.5,
        repetition_penalty=2, logit_bias={7: 0.25},
    ),
]


def test_logits_of_tree_nodes_follow_their_path():
    """In random trees with repeated tokens, on a node's path and elsewhere, with many sampling options."""
    rng, B, T, V = torch.Generator().manual_seed(2), len(SAMPLINGS), 10, 12
    for _ in range(8):
        parent = torch.stack([torch.randint(0, max(i, 1), (B,), generator=rng) for i in range(T)], 1)
        tokens, (_, ancestors) = torch.randint(0, 5, (B, T), generator=rng), depth_and_ancestors(parent, T)
        prompts, outputs = torch.randint(0, V, (2, B, 4), generator=rng)
        outputs[:, 3] = tokens[:, 0]
        state = State(B, 8, 4, vocabulary=V, nodes=T)
        for b, sampling in enumerate(SAMPLINGS):
            state.start_request(b, prompts[b].tolist(), sampling, 8)
        state.processors.count(outputs, torch.full((B,), 4))
        logits = torch.randn(B, T, V, generator=rng) * 3
        processed = process_logits(Step(), logits, state, Modes.all_modes(True), tokens, ancestors)
        for b, sampling in enumerate(SAMPLINGS):
            for t in range(T):
                path = [a for a in range(1, T) if ancestors[b, t, a]]
                output = outputs[b].tolist() + tokens[b, path].tolist()
                expected = reference_process(logits[b, t], prompts[b].tolist(), output, sampling)
                torch.testing.assert_close(processed[b, t].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", (1e-38, 1e-30, 1e-4))
def test_a_tiny_temperature_keeps_the_top_token(temperature):
    """Logits divided by it overflow to infinity."""
    logits = torch.tensor([[[-50.0, 30.0, 20.0, -90.0]]])
    restricted = restrict(logits, *map(torch.tensor, ([temperature], [0], [0.9])))
    assert restricted.isfinite().tolist() == [[[False, True, False, False]]]


@pytest.mark.parametrize("top_k", [0, 1, 5, 300, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_restrict_equals_sorting(top_k, top_p):
    torch.manual_seed(0)
    logits = torch.randn(3, 3, 300) * 4
    logits[0, 0, :7] = logits[0, 0].max()  # ties
    temperature = torch.tensor([0.7, 1.3, 0.0])
    restricted = restrict(logits, temperature, torch.full((3,), top_k), torch.full((3,), top_p))
    for b in range(3):
        for t in range(3):
            expected = reference_restrict(logits[b, t], float(temperature[b]), top_k, top_p)
            assert torch.equal(restricted[b, t], expected)


def test_the_token_that_reaches_top_p_exactly_is_the_last_one_kept():
    restricted = restrict(torch.tensor([[[2.0, 1.0, 1.0]]]).log(), *map(torch.tensor, ([1.0], [0], [0.5])))
    assert (restricted > -math.inf).tolist() == [[[True, False, False]]]


@pytest.mark.parametrize(
    "temperature,top_k,top_p", [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.5, 6, 1.0), (1.0, 0, 0.8), (0.9, 8, 0.7)]
)
def test_sampler_has_the_exact_distribution(temperature, top_k, top_p):
    """60,000 seeds at one position against exact probabilities."""
    torch.manual_seed(1)
    B, V = 60000, 24
    logits = torch.randn(V)
    state = State(B, 8, 1)
    state.key.copy_(seed_keys(list(range(B))))
    state.length.fill_(17)
    state.temperature.fill_(temperature)
    state.top_k.fill_(top_k)
    state.top_p.fill_(top_p)
    modes, root = Modes(True, top_k > 0 or top_p < 1), torch.zeros(B, 1, dtype=torch.int64)
    allowed = process_logits(Step(), logits.expand(B, 1, V), state, modes, root)
    chosen = Step().draw(allowed, Step().noise(state, 1, V))
    p = (reference_restrict(logits, temperature, top_k, top_p).double() / temperature).softmax(-1)
    counts = chosen.flatten().bincount(minlength=V)
    assert counts[p == 0].sum() == 0
    check_counts(counts[p > 0], B * p[p > 0])


@pytest.mark.slow
def test_speculative_output_has_the_targets_distribution():
    small = small_models()
    check_distribution(small[0], speculative(small, TreeShape(8, 2, 3), batch=256))


@pytest.mark.parametrize("options", [
    {"temperature": -1}, {"temperature": math.nan}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": -0.1},
    {"presence_penalty": 2.1}, {"frequency_penalty": math.inf}, {"logit_bias": {1: math.nan}},
    {"logit_bias": {"x": 1}}, {"stop": ["a", ""]}, {"stop": ["a"] * (MAX_STOPS + 1)}, {"logprobs": 21},
], ids=lambda options: str(options)[:40])
def test_invalid_options_raise_errors_that_name_them(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)
