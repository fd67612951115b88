"""Logits moved by penalties and biases: as the words say, at every node of a tree as at the end of a text."""
import math
from types import SimpleNamespace

import pytest
import torch
from helpers.states import chain

from sampling.adjust import adjust, floor, scores
from sampling.options import MOST_STOPS, Sampling
from tree import Tree, link

V = 12


def moved(logits: list[float], prompt: list[int], output: list[int], request: Sampling) -> list[float]:
    """The logits of the token after prompt and output, one by one."""
    bias, found = dict(request.logit_bias), []
    for token, x in enumerate(logits):
        x += bias.get(token, 0.0)
        times = output.count(token)
        if times or token in prompt:
            x = x / request.repetition_penalty if x > 0 else x * request.repetition_penalty
        found.append(x - request.frequency_penalty * times - request.presence_penalty * (times > 0))
    return found


def adjustments(prompts, outputs, requests) -> SimpleNamespace:
    """What a state holds of these requests."""
    counts = torch.stack([torch.tensor(o, dtype=torch.int64).bincount(minlength=V) for o in outputs]).int()
    prompted, bias = torch.zeros(len(prompts), V, dtype=torch.bool), torch.zeros(len(prompts), V)
    for i, (prompt, request) in enumerate(zip(prompts, requests)):
        prompted[i, prompt] = True
        for token, value in request.logit_bias:
            bias[i, token] = value
    penalties = {
        name: torch.tensor([getattr(r, f"{name}_penalty") for r in requests])
        for name in ("presence", "frequency", "repetition")
    }
    return SimpleNamespace(counts=counts, prompted=prompted, bias=bias, **penalties)


REQUESTS = [
    Sampling(presence_penalty=0.7), Sampling(frequency_penalty=-0.4), Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.5, logit_bias={0: 5, 3: -100}), Sampling(),
    Sampling(presence_penalty=-1, frequency_penalty=1.5, repetition_penalty=2, logit_bias={7: 0.25}),
]


def test_every_node_is_the_end_of_its_path():
    """Random trees in which tokens repeat, on a path and beside it."""
    draw = torch.Generator().manual_seed(2)
    B, T = len(REQUESTS), 10
    for _ in range(20):
        parent = torch.stack([torch.randint(0, max(i, 1), (B,), generator=draw) for i in range(T)], 1)
        depth, ancestors = link(parent, T)
        tokens = torch.randint(0, 5, (B, T), generator=draw)
        tree = Tree(tokens, parent, depth, ancestors, None)
        prompts, texts = (torch.randint(0, V, (B, 4), generator=draw).tolist() for _ in range(2))
        outputs = [text + [int(root)] for text, root in zip(texts, tokens[:, 0])]
        logits = torch.randn(B, T, V, generator=draw) * 3
        found = adjust(logits, adjustments(prompts, outputs, REQUESTS), tree.tokens, tree.ancestors)
        for b, request in enumerate(REQUESTS):
            for t in range(T):
                above = [a for a in range(1, T) if ancestors[b, t, a]]
                text = outputs[b] + tokens[b, above].tolist()
                expected = moved(logits[b, t].tolist(), prompts[b], text, request)
                torch.testing.assert_close(found[b, t], torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_a_bias_is_pairs_of_numbers():
    assert Sampling(logit_bias={"5": 1, 3: -2.5}).logit_bias == ((3, -2.5), (5, 1.0))


def test_nothing_asked_for_changes_no_bit():
    logits, tokens = torch.randn(1, 3, V), torch.tensor([[1, 2, 3]])
    by = adjustments([[1]], [[1, 1]], [Sampling()])
    assert torch.equal(adjust(logits, by, tokens, chain(tokens).ancestors), logits)
    warm, off = torch.tensor([1.0]), torch.tensor([0.0])
    assert torch.equal(floor(logits, warm, off), logits)
    assert torch.equal(floor(logits, off, torch.tensor([0.9])), logits)  # greedy


@pytest.mark.parametrize("min_p, temperature", [(0.1, 1.0), (0.5, 0.3), (1.0, 1.0)])
def test_min_p(min_p, temperature):
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(5)) * 2
    kept = floor(logits, torch.tensor([temperature]), torch.tensor([min_p])) > float("-inf")
    p = (logits / temperature).softmax(-1)
    assert torch.equal(kept, p >= min_p * p.amax(-1, keepdim=True) * (1 - 1e-6))
    assert kept.sum() < kept.numel() and kept.any(-1).all()


def test_scores():
    logits, tokens = torch.randn(2, 3, V), torch.randint(0, V, (2, 3))
    logprob, top, ids = scores(logits, tokens, 5)
    p = logits.double().log_softmax(-1)
    of_tokens, best = p.gather(-1, tokens[..., None])[..., 0], p.sort(-1, descending=True).values[..., :5]
    torch.testing.assert_close(logprob.double(), of_tokens, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(top.double(), best, rtol=1e-5, atol=1e-6)
    assert torch.equal(ids, p.argsort(-1, descending=True)[..., :5])
    assert scores(logits, tokens, 99)[2].shape == (2, 3, V)


BAD = [
    {"temperature": -1}, {"temperature": math.nan}, {"temperature": 1e7}, {"top_p": 0}, {"top_p": 1.5},
    {"min_p": -0.1}, {"min_p": math.nan}, {"presence_penalty": 2.1}, {"frequency_penalty": math.inf},
    {"logit_bias": {1: math.nan}}, {"logit_bias": 5}, {"logit_bias": {"x": 1}}, {"stop": ["a", ""]},
    {"stop": [3]}, {"stop": ["a"] * (MOST_STOPS + 1)}, {"logprobs": 21}, {"logprobs": -1},
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:40])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)
