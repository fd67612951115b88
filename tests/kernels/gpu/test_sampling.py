"""Top-k with log-probabilities, and the thresholds of top-k and top-p, against their definitions."""
import pytest
import torch
from helpers.guards import check

from engine.step import Step
from kernels.gpu import ranking, sampling

V = 200


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(ranking, "MAX_CHUNK", 64)
    monkeypatch.setattr(sampling, "MAX_CHUNK", 128)


def random(device, *shape, seed=0):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("rows, noise_rows, named", ((1, None, False), (4, 1, True), (3, 3, False)))
def test_rank(device, backend, rows, noise_rows, named):
    names = torch.randperm(V, generator=torch.Generator().manual_seed(1)).to(device) if named else None
    noise = None if noise_rows is None else random(device, 2, noise_rows, V, seed=1)
    given = random(device, 2, rows, V), noise, 4, names
    check(lambda: backend.step.rank(*given), lambda: Step().rank(*given), 1e-5)


def test_ties(device, backend):
    """The first of equal logits comes first."""
    logits = torch.zeros(1, 1, V, device=device)
    logits[0, 0, [3, 150, 70]] = 1.0
    logits[0, 0, 9] = -0.0
    assert backend.step.rank(logits, None, 6)[1].tolist() == [[[3, 70, 150, 0, 1, 2]]]


def test_restrict(device, backend):
    top_k = torch.tensor([0, 0, 1, 50, V // 2], device=device)
    top_p = torch.tensor([0.9, 1e-6, 1.0, 0.95, 0.999], device=device)
    temperature, logits = torch.tensor([0.7, 1.3, 1.0, 0.8, 0.0], device=device), random(device, 5, 2, V)
    logits[:, 0, :7] = logits[:, 0].amax(-1, keepdim=True)
    logits[:, 1, :9], logits[:, 1, 4:6], logits[3, 1, 50:] = 0.0, -0.0, float("-inf")
    given = logits, temperature, top_k, top_p
    check(lambda: backend.step.restrict(*given), lambda: Step().restrict(*given))
