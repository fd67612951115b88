"""Runs that stop go on exactly, on one process or several, and other runs do not take their state."""
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from helpers.training import log_of, options
from safetensors.torch import load_file, save_file

import train
from training import trainer
from training.choices import OPTIMIZERS
from training.objective import Eagle3Objective
from training.trainer import Trainer

pytestmark = pytest.mark.slow
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def weights(folder: Path) -> dict:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def interrupt_after(steps: int, monkeypatch) -> None:
    """Ctrl-C, once, after so many optimizer steps."""
    original, calls = Trainer.gradients, itertools.count()

    def stops(self, *args):
        if next(calls) == steps:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Trainer, "gradients", stops)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_interrupted_run_resumes_exactly(golden, prompt_file, tmp_path, monkeypatch, capsys, optimizer):
    asked = {"ema": 0.9, "optimizer": optimizer}
    assert train.main(options(golden, prompt_file, tmp_path / "undisturbed", **asked)) == 0
    interrupt_after(5, monkeypatch)
    argv = options(golden, prompt_file, tmp_path / "broken", **asked, **{"save-seconds": 0})
    assert train.main(argv) == 130 and not (tmp_path / "broken" / "head").exists()
    assert capsys.readouterr().err.endswith("\nstopped; run the same command to go on\n")
    assert train.main(argv) == 0
    assert same(tmp_path / "undisturbed" / "head", tmp_path / "broken" / "head")


def test_a_run_of_so_many_minutes(golden, prompt_file, tmp_path, monkeypatch, capsys):
    """It ends in its time, with the learning rate down, whether it is interrupted or not."""
    ticks = itertools.count()
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: 6.0 * next(ticks), time=time.time))
    asked = {"epochs": 50, "minutes": 1, "log-every": 1, "save-seconds": 0}
    argv = options(golden, prompt_file, tmp_path, **asked)
    interrupt_after(5, monkeypatch)
    assert train.main(argv) == 130
    assert train.main(argv) == 0
    steps = [entry for entry in log_of(tmp_path / "work") if "loss" in entry]
    assert len(steps) == 10
    rates = [entry["lr"] for entry in steps]
    assert rates[-1] == pytest.approx(0.1 * 1e-3) and max(rates) > 0.5e-3
    head = weights(tmp_path / "head")
    assert "tau" in log_of(tmp_path / "work")[-1]  # of the epoch that was cut short
    assert train.main(argv) == 0  # there is nothing left to do
    assert all(torch.equal(head[name], tensor) for name, tensor in weights(tmp_path / "head").items())
    assert train.main(options(golden, prompt_file, tmp_path, **asked | {"minutes": 2})) == 1
    assert "other settings or data (minutes)" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_killed_run_has_the_same_curve(golden, prompt_file, tmp_path, kind):
    """kill -9 in the middle of training, at whatever instant it hits; the complete log is that of a run left
    alone.
    """
    def argv(folder: Path) -> list[str]:
        slow = {"epochs": 12, "log-every": 1, "save-seconds": 0, "validate-prompts": 0, "kind": kind}
        return options(golden, prompt_file, folder, **slow)

    assert train.main(argv(tmp_path / "undisturbed")) == 0
    work = tmp_path / "killed" / "work"
    run = subprocess.Popen(
        [sys.executable, "train.py", *argv(tmp_path / "killed")], cwd=ROOT, env=ONE_THREAD,
        stderr=subprocess.DEVNULL,
    )
    limit = time.time() + 120
    while not ((work / "log.jsonl").exists() and len((work / "log.jsonl").read_text().splitlines()) >= 8):
        assert run.poll() is None and time.time() < limit
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "killed" / "head").exists()
    assert train.main(argv(tmp_path / "killed")) == 0
    assert log_of(work) == log_of(tmp_path / "undisturbed" / "work")
    assert same(tmp_path / "undisturbed" / "head", tmp_path / "killed" / "head")


def test_two_processes_have_the_gradients_of_one(golden, prompt_file, tmp_path):
    """The same run, text and features included, on one process and on two (gloo): the norms of the gradients,
    which Adam would not tell apart, the curves and the heads agree.
    """
    def argv(folder: Path) -> list[str]:
        changes = {"log-every": 1, "synthesize": 24, "clip": 1e5, "cache-features": folder / "features"}
        return options(golden, prompt_file, folder, **changes)

    assert train.main(argv(tmp_path / "one")) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launch, "train.py", *argv(tmp_path / "two")], cwd=ROOT, env=ONE_THREAD, capture_output=True,
        text=True, timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(list((tmp_path / "two" / "features").glob("*/*.bin"))) == 2  # each computed its share
    one, two = log_of(tmp_path / "one" / "work"), log_of(tmp_path / "two" / "work")
    assert len(one) == len(two) > 6
    for a, b in zip(one, two):
        assert a["step"] == b["step"] and a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-4)
        assert a.get("norm", 0) == pytest.approx(b.get("norm", 0), rel=1e-3)
    assert all(row["norm"] > 0 for row in one if "loss" in row)
    a, b = weights(tmp_path / "one" / "head"), weights(tmp_path / "two" / "head")
    for name in a:
        torch.testing.assert_close(a[name].float(), b[name].float(), rtol=0.02, atol=2e-3)


def test_other_settings_do_not_resume(golden, prompt_file, tmp_path, capsys):
    assert train.main(options(golden, prompt_file, tmp_path)) == 0
    assert train.main(options(golden, prompt_file, tmp_path, steps=2)) == 1
    assert "other settings or data (steps)" in capsys.readouterr().err
    state = tmp_path / "work" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert train.main(options(golden, prompt_file, tmp_path)) == 1
    assert "state.pt: cut off or damaged" in capsys.readouterr().err


def test_another_target_has_its_own_text_and_state(golden, prompt_file, tmp_path, capsys):
    """A fine-tune differs in its inner weights only."""
    tuned = shutil.copytree(golden, tmp_path / "tuned")
    state = load_file(tuned / "model.safetensors")
    state["layers.3.mlp.w_down.weight"] *= 1.1
    save_file(state, tuned / "model.safetensors")
    assert train.main(options(golden, prompt_file, tmp_path)) == 0
    assert train.main(options(tuned, prompt_file, tmp_path)) == 1
    assert "target); use another --work" in capsys.readouterr().err
    assert len(list((tmp_path / "work" / "data").iterdir())) == 4  # its text is its own too
    text = {"shards": tmp_path / "work" / "data", "synthesize": 0}
    assert train.main(options(tuned, None, tmp_path / "b", **text)) == 1
    assert "was written by another target" in capsys.readouterr().err


def test_only_a_head_of_this_run_is_replaced(golden, prompt_file, tmp_path, capsys):
    """What a user has put beside it stays."""
    (tmp_path / "head").mkdir()
    assert train.main(options(golden, prompt_file, tmp_path, epochs=1)) == 0
    (tmp_path / "head" / "LICENSE").write_text("mine")
    assert train.main(options(golden, prompt_file, tmp_path, epochs=1)) == 0
    assert (tmp_path / "head" / "LICENSE").read_text() == "mine"
    assert train.main(options(golden, prompt_file, tmp_path, epochs=1, work=tmp_path / "other")) == 1
    assert "not trained in --work" in capsys.readouterr().err.splitlines()[-1]


def test_nan_loss_stops_names_the_batch_and_keeps_the_last_state(
    golden, prompt_file, tmp_path, capsys, monkeypatch
):
    original, calls = Eagle3Objective.loss, iter(range(1000))

    def breaks(self, *args):
        loss, hits = original(self, *args)
        return loss * (float("nan") if next(calls) == 4 else 1), hits

    monkeypatch.setattr(Eagle3Objective, "loss", breaks)
    changes = {"save-seconds": 0, "validate-prompts": 0, "batch-tokens": 200}
    argv = options(golden, prompt_file, tmp_path, **changes)
    assert train.main(argv) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    for words in ("the loss is nan", "at step", "batch", "begin with the ids [", "last good state"):
        assert words in error
    state = torch.load(tmp_path / "work" / "state.pt", weights_only=True)
    assert all(t.isfinite().all() for t in state["head"].values())
    assert train.main(argv) == 0  # the mishap does not come back


def test_large_seeds_and_gradients_that_are_not_finite(golden, prompt_file, tmp_path, capsys):
    assert train.main(options(golden, prompt_file, tmp_path, kind="eagle", seed=20261121, epochs=1)) == 0
    wild = {"lr": 9e5, "clip": 1e5, "epochs": 30, "validate-prompts": 0}
    assert train.main(options(golden, prompt_file, tmp_path / "wild", **wild)) == 1
    assert "gradient" in capsys.readouterr().err.splitlines()[-1]
    state = tmp_path / "wild" / "work" / "state.pt"
    assert all(t.isfinite().all() for t in torch.load(state, weights_only=True)["head"].values())


def test_a_head_that_is_not_finite_is_not_exported(golden, prompt_file, tmp_path, capsys, monkeypatch):
    """The last update of a run is not followed by a loss that would show it."""
    original = Trainer.update

    def breaks(self):
        original(self)
        if self.step == self.total - 1:
            self.parameters["norm.weight"].data.fill_(float("inf"))

    monkeypatch.setattr(Trainer, "update", breaks)
    changes = {"epochs": 1, "validate-prompts": 0, "synthesize": 0}
    assert train.main(options(golden, prompt_file, tmp_path, **changes)) == 1
    assert "left weights that are not finite" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "head").exists()
