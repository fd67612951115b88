"""Muon: orthogonal updates of the matrices between hidden states, AdamW for what has a row for each token."""
import pytest
import torch
import torch.nn as nn

from training.choices import OPTIMIZERS
from training.optimizer import MOMENTUM, UPDATE, Muon, make_optimizers, orthogonal


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthogonal rows or columns, by its definition."""
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


@pytest.mark.parametrize("shape", [(24, 24), (16, 60), (60, 16)])
def test_orthogonal(shape):
    """Near the definition: the polynomial leaves singular values between 0.65 and 1.25."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    near = orthogonal(x)
    values = torch.linalg.svdvals(near)
    assert near.shape == x.shape and 0.65 < values.min() and values.max() < 1.25
    assert torch.cosine_similarity(near.flatten(), nearest(x).flatten(), dim=0) > 0.97
    torch.testing.assert_close(orthogonal(1e3 * x), near, rtol=1e-3, atol=1e-5)  # the size does not matter


def test_updates_by_the_formula():
    generator = torch.Generator().manual_seed(1)
    p = nn.Parameter(torch.randn(12, 30, generator=generator))
    start, lr, decay = p.detach().clone(), 0.01, 0.1
    optimizer, mean = Muon([p], lr, decay), torch.zeros(12, 30)
    for _ in range(3):
        p.grad = torch.randn(12, 30, generator=generator)
        mean = MOMENTUM * mean + (1 - MOMENTUM) * p.grad
        ahead = MOMENTUM * mean + (1 - MOMENTUM) * p.grad
        start = (1 - lr * decay) * start - lr * UPDATE * 30**0.5 * orthogonal(ahead)
        optimizer.step()
        torch.testing.assert_close(p.detach(), start)


def test_an_update_is_as_large_as_adams():
    """So one learning rate serves both: entries of about 0.2 of the rate."""
    p = nn.Parameter(torch.zeros(64, 96))
    p.grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    Muon([p], 1.0, 0.0).step()
    assert p.detach().pow(2).mean().sqrt() == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_parameter_has_one_optimizer(kind):
    names = ("layer.wo.weight", "fc.weight", "lm_head.weight", "embed.weight", "markov_out.weight")
    parameters = {name: nn.Parameter(torch.zeros(4, 4)) for name in names}
    parameters["norm.weight"] = nn.Parameter(torch.zeros(4))
    made = make_optimizers(kind, parameters, 1e-3, 0.0)
    places = {id(p): type(one) for one in made for group in one.param_groups for p in group["params"]}
    counted = [p for one in made for group in one.param_groups for p in group["params"]]
    assert len(counted) == len(parameters) and places.keys() == {id(p) for p in parameters.values()}
    hidden = {name for name, p in parameters.items() if places[id(p)] is Muon}
    assert hidden == ({"layer.wo.weight", "fc.weight"} if kind == "muon" else set())
