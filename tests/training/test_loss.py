"""Losses against their definitions, their gradients against autograd, and what they say of drawing."""
import pytest
import torch

from training.choices import LOSSES
from training.loss import TOP, DraftLoss, row_loss


def agreement(p, q):
    """How often both draw the same with one noise, by the formula, over all pairs [n]."""
    a, b = (x[:, None] / x[..., None] for x in (p, q))
    return (1 / torch.maximum(a, b).sum(-1)).sum(-1)


DEFINITIONS = {
    "ce": lambda p, q: -(p * q.log()).sum(-1), "lk": lambda p, q: -torch.minimum(p, q).sum(-1).log(),
    "coupled": lambda p, q: -agreement(p, q).log(),
}


def random_pair(rows: int, vocabulary: int, seed: int = 0, sharp: float = 2.0):
    g = torch.Generator().manual_seed(seed)
    logits, other = (sharp * torch.randn(rows, vocabulary, generator=g, dtype=torch.float64) for _ in "ab")
    return logits, (other + 0.5 * logits).softmax(-1)


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_and_gradients_are_those_of_the_definition(kind):
    """On a vocabulary that is looked at whole."""
    logits, p = random_pair(40, TOP - 2)
    logits.requires_grad_(True)
    expected = DEFINITIONS[kind](p, logits.softmax(-1))
    slope, = torch.autograd.grad(expected.sum(), logits)
    loss, found, overlap = row_loss(kind, logits.detach(), p)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, slope, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(overlap, torch.minimum(p, logits.detach().softmax(-1)).sum(-1))


def test_of_a_large_vocabulary_the_top_is_looked_at():
    """Near the truth where the top holds nearly everything; the gradient is that of what is computed."""
    logits, _ = random_pair(30, 500, sharp=5.0)
    p = (logits + random_pair(30, 500, seed=1, sharp=0.7)[0]).softmax(-1)
    loss, slope, _ = row_loss("coupled", logits, p)
    truth = DEFINITIONS["coupled"](p, logits.softmax(-1))
    assert (loss - truth).abs().mean() < 0.03 < 0.2 < truth.mean()
    moved = logits.clone()
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved += 1e-6 * direction
    change = (row_loss("coupled", moved, p)[0] - loss) / 1e-6
    torch.testing.assert_close(change, (slope * direction).sum(-1), rtol=1e-2, atol=1e-3)


def test_the_coupled_loss_is_how_often_one_noise_draws_the_same():
    """200,000 draws of each of 4 pairs; each agreement within 5 deviations: a false alarm in a million."""
    logits, p = random_pair(4, 12)
    q, draws = logits.softmax(-1), 200_000
    uniform = torch.rand(draws, 1, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise = -(-uniform.log()).log()
    same = ((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).double().mean(0)
    expected = (-row_loss("coupled", logits, p)[0]).exp()
    assert ((same - expected).abs() < 5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_losses_are_summed_with_their_shares():
    """Gradients for what the lm_head reads and for itself, over more rows than a block holds."""
    g = torch.Generator().manual_seed(3)
    x, head = torch.randn(300, 8, generator=g), torch.randn(30, 8, generator=g)
    teacher, places = torch.randn(50, 30, generator=g), torch.randint(0, 50, (300,), generator=g)
    weight = torch.rand(300, generator=g)
    kinds = (("ce", 0.3), ("lk", 0.7))
    x.requires_grad_(True), head.requires_grad_(True)
    loss, choices, overlap = DraftLoss.apply(x, head, teacher, places, weight, kinds)
    found = torch.autograd.grad(loss, (x, head))
    logits, p = x @ head.T, teacher[places].softmax(-1)
    q = logits.softmax(-1)
    expected = sum(share * (DEFINITIONS[kind](p, q) * weight).sum() for kind, share in kinds)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(choices, logits.argmax(-1))
    torch.testing.assert_close(overlap, torch.minimum(p, q).sum(-1).detach())
    for a, b in zip(found, torch.autograd.grad(expected, (x, head))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
