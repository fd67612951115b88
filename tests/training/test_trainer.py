"""The training loop: batches, gradients, the average, the schedule, the saved state."""
import resource
import signal
from functools import partial

import pytest
import torch
from helpers.training import ROWS

import training.state
from common.errors import InputError
from training.batches import batches
from training.chains import eagle3_outputs
from training.features import Features
from training.log import chain_tau
from training.objective import Eagle3Objective
from training.plan import Plan
from training.trainer import Trainer


def trainer(models, tmp_path, plan=None, **options) -> Trainer:
    target, head = models
    head = head.twin(target, torch.float32).requires_grad_(True)
    for part in (head.embed, head.lm_head if not head.args.own_lm_head else None):
        if part is not None:
            part.requires_grad_(False)
    objective = Eagle3Objective(target, head, 3, False)
    plan = Plan(**{"epochs": 1, "batch_tokens": 64, **(plan or {})})
    return Trainer(objective, Features(target, objective.aux_layers), ROWS, ROWS, plan, tmp_path, **options)


def test_batches_hold_every_row_once():
    rows = [{"ids": [0] * n} for n in (5, 300, 7, 9, 100, 2)]
    for generator in (None, torch.Generator().manual_seed(0)):
        groups = batches(rows, 110, generator)
        assert sorted(i for group in groups for i in group) == list(range(6))
        assert all(len(g) == 1 or len(g) * max(len(rows[i]["ids"]) for i in g) <= 110 for g in groups)


def test_gradients_do_not_depend_on_how_a_batch_is_split(models, tmp_path):
    undivided, split = trainer(models, tmp_path), trainer(models, tmp_path, micro_tokens=25)
    loss, accuracy = undivided.gradients([0, 1, 2, 3], 3)
    assert len(split.micro_batches([0, 1, 2, 3])) > 2
    again = split.gradients([0, 1, 2, 3], 3)
    assert again[0] == pytest.approx(loss, rel=1e-5) and again[1] == pytest.approx(accuracy)
    for name, p in undivided.parameters.items():
        torch.testing.assert_close(split.parameters[name].grad, p.grad, rtol=1e-4, atol=1e-6)
        assert p.grad.abs().max() > 0, name


def test_steps_that_are_computed_again_have_the_same_gradients(models, tmp_path):
    """And keep less: saved is what the backward pass will read."""
    def run(again: bool) -> tuple[Trainer, int]:
        t = trainer(models, tmp_path)
        t.objective.outputs = partial(eagle3_outputs, again=again)
        kept = {}

        def keep(x):
            kept[x.data_ptr()] = max(kept.get(x.data_ptr(), 0), x.numel() * x.element_size())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            t.gradients([0, 1, 2, 3], 7)
        return t, sum(kept.values())

    (whole, much), (again, little) = run(False), run(True)
    for name, p in whole.parameters.items():
        torch.testing.assert_close(again.parameters[name].grad, p.grad, rtol=1e-5, atol=1e-7)
    assert little < 0.5 * much, (little, much)


def test_the_average_is_what_is_used(models, tmp_path):
    t = trainer(models, tmp_path, {"ema": 0.5, "lr": 1e-2})
    first = {name: p.detach().clone() for name, p in t.parameters.items()}
    t.gradients([0, 1, 2, 3], 3)
    t.update()
    name = "layer.wo.weight"
    now, mean = t.parameters[name].detach().clone(), t.average[name]
    # At first the average is short: (1 + 0) / (10 + 0).
    torch.testing.assert_close(mean, first[name] * 0.1 + now * 0.9)
    assert torch.equal(t.trained().state_dict()[name], mean) and torch.equal(t.parameters[name], now)


def test_rates_of_the_schedules():
    for schedule, middle in (("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)):
        plan = Plan(lr=2.0, schedule=schedule, warmup=0.1)
        assert plan.rate(0, 110) == pytest.approx(2 / 11) and plan.rate(10, 110) == pytest.approx(2.0)
        assert plan.rate(11 + 99 // 2, 110) == pytest.approx(2 * middle, rel=0.02)
        assert plan.rate(110, 110) == pytest.approx(2.0 if schedule == "constant" else 0.2, rel=0.02)
    assert chain_tau([0.5, 0.5]) == 1.75


@pytest.mark.parametrize("error", [OSError("No space left on device"), RuntimeError("file write failed\nat")])
def test_a_state_that_cannot_be_written(models, tmp_path, monkeypatch, error):
    def fails(state, part):
        part.write(b"a part")
        raise error

    monkeypatch.setattr(training.state.torch, "save", fails)
    words = r"state.pt: the state cannot be written \((No|file)[^\n]*\); make room there, then run"
    with pytest.raises(InputError, match=words):
        trainer(models, tmp_path).save()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_as_the_system_does(tmp_path):
    """torch puts words of its own in its place, about positions in its file."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, previous[1]))
        with pytest.raises(InputError, match=r"the state cannot be written \(File too large\); make"):
            training.state.save_state(tmp_path, {"weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", (None, [{}], {"fc.weight": torch.zeros(1)}, "x"), ids=repr)
def test_a_state_of_something_else(models, tmp_path, other):
    """Options that fit, and the rest of another kind."""
    trainer(models, tmp_path).save()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for part in ("head", "optimizers", "at"):
        training.state.save_state(tmp_path, state | {part: other})
        with pytest.raises(InputError, match=r"state.pt: holds no state of this head; delete it"):
            trainer(models, tmp_path).resume()
