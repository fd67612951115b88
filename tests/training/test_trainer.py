"""The training loop: batches, gradients, the average, the schedule, the saved state."""
import pytest
import torch
from helpers.training import ROWS

from training.batches import batches
from training.features import Features
from training.losses import Eagle3Objective
from training.processes import Processes
from training.trainer import Plan, Trainer


def trainer(models, tmp_path, **plan) -> Trainer:
    target, head = models
    head = head.twin(target, torch.float32).requires_grad_(True)
    head.embed.requires_grad_(False)
    objective = Eagle3Objective(target, head, 3)
    plan, features = Plan(epochs=1, batch_tokens=64, **plan), Features(target, objective.aux_layers)
    return Trainer(objective, features, ROWS, ROWS, plan, tmp_path, processes=Processes())


def test_batches_hold_every_row_once():
    rows = [{"ids": [0] * n} for n in (5, 300, 7, 9, 100, 2)]
    for generator in (None, torch.Generator().manual_seed(0)):
        groups = batches(rows, 110, generator)
        assert sorted(i for group in groups for i in group) == list(range(6))
        assert all(len(g) == 1 or len(g) * max(len(rows[i]["ids"]) for i in g) <= 110 for g in groups)


def test_gradients_do_not_depend_on_how_a_batch_is_split(models, tmp_path, monkeypatch):
    undivided, split = trainer(models, tmp_path), trainer(models, tmp_path)
    loss, accuracy = undivided.gradients([0, 1, 2, 3], 3)
    monkeypatch.setattr("training.trainer.MICRO", 25)
    assert len(split.micro_batches([0, 1, 2, 3])) > 2
    again = split.gradients([0, 1, 2, 3], 3)
    assert again[0] == pytest.approx(loss, rel=1e-5) and again[1] == pytest.approx(accuracy)
    for name, p in undivided.parameters.items():
        torch.testing.assert_close(split.parameters[name].grad, p.grad, rtol=1e-4, atol=1e-6)
        assert p.grad.abs().max() > 0, name


def test_the_average_is_what_is_used(models, tmp_path):
    t = trainer(models, tmp_path, ema=0.5, lr=1e-2)
    first = {name: p.detach().clone() for name, p in t.parameters.items()}
    t.gradients([0, 1, 2, 3], 3)
    t.update()
    name = "layer.wo.weight"
    now, mean = t.parameters[name].detach().clone(), t.average[name]
    # At first the average is short: (1 + 0) / (10 + 0).
    torch.testing.assert_close(mean, first[name] * 0.1 + now * 0.9)
    assert torch.equal(t.trained().state_dict()[name], mean) and torch.equal(t.parameters[name], now)
