"""The training loop: batches, gradients."""
import pytest
import torch
from helpers.training import ROWS

from common.errors import InputError
from training.batches import batches
from training.features import Features
from training.heads import TRAINED, HeadShape, new_head
from training.processes import ProcessGroup
from training.trainer import STATE, Plan, Trainer, save_state


def trainer(target, tmp_path, kind: str = "eagle3", number: int = 0, count: int = 1, **plan) -> Trainer:
    """Of one process of `count`, whose sums are its own."""
    shape = HeadShape(drafts=3 if kind == "p-eagle" else None)
    objective = TRAINED[kind].objective(target, new_head(target, kind, torch.arange(320), shape, 0), 3)
    plan, processes = Plan(epochs=1, batch_tokens=64, **plan), ProcessGroup(number, count)
    processes.all_reduce = lambda tensors: None
    features = Features(target, objective.aux_layers)
    return Trainer(objective, features, ROWS, ROWS, plan, tmp_path, processes=processes)


def test_batches_hold_every_row_once():
    rows = [{"ids": [0] * n} for n in (5, 300, 7, 9, 100, 2)]
    for generator in (None, torch.Generator().manual_seed(0)):
        groups = batches(rows, 110, generator)
        assert sorted(i for group in groups for i in group) == list(range(6))
        assert all(len(g) == 1 or len(g) * max(len(rows[i]["ids"]) for i in g) <= 110 for g in groups)


@pytest.mark.parametrize("kind", ("eagle3", "eagle", "p-eagle"))
def test_gradients_do_not_depend_on_how_a_batch_is_split(models, tmp_path, monkeypatch, kind):
    """Over processes, and in each of them: chains and noise that are drawn, too."""
    whole = trainer(models[0], tmp_path, kind)
    steps = whole.objective.steps
    loss, accuracy = whole.gradients([0, 1, 2, 3], steps)
    monkeypatch.setattr("training.trainer.MICRO_BATCH_TOKENS", 25)
    parts = [trainer(models[0], tmp_path, kind, number, 2) for number in (0, 1)]
    found = [part.gradients([0, 1, 2, 3], steps) for part in parts]
    assert len(parts[1].micro_batches([0, 1, 2, 3])) > 1
    assert sum(part[0] for part in found) == pytest.approx(loss, rel=1e-5)
    assert [sum(hits) for hits in zip(*(part[1] for part in found))] == pytest.approx(accuracy)
    for name, p in whole.parameters.items():
        both = sum(part.parameters[name].grad for part in parts)
        torch.testing.assert_close(both, p.grad, rtol=1e-4, atol=1e-6)


def test_a_state_that_cannot_be_written_leaves_the_old_one(tmp_path):
    save_state(tmp_path, {"step": 1})
    with pytest.raises(InputError, match="cannot be written"):
        save_state(tmp_path, {"step": 2, "other": lambda: None})
    assert torch.load(tmp_path / STATE) == {"step": 1} and len([*tmp_path.iterdir()]) == 1
