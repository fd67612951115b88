"""Runs that stop go on exactly, on one process or several, also after kill -9."""
import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from helpers.launching import ONE_THREAD, Launch
from helpers.training import log_of, options
from safetensors.torch import load_file

import train
from training import session, trainer, writing

pytestmark = pytest.mark.slow
# train.py that saves its state after every step.
SAVING = "import sys, train; from training import trainer; trainer.SAVE_INTERVAL = 0; sys.exit(train.main())"


def weights(folder: Path) -> dict:
    return load_file(folder / "head" / "model.safetensors")


def test_a_killed_run_resumes_exactly(golden, prompt_file, tmp_path, capsys):
    """kill -9 at whatever instant it hits; log and head are those of a run left alone."""
    asked = {"epochs": 8, "validate-prompts": 0, "batch-tokens": 200}
    assert train.main(options(golden, prompt_file, tmp_path / "undisturbed", **asked)) == 0
    argv = options(golden, prompt_file, tmp_path / "broken", **asked)
    log = tmp_path / "broken" / "head-work" / "log.jsonl"
    run = subprocess.Popen([sys.executable, "-c", SAVING, *argv], cwd=ROOT, env=ONE_THREAD,
                           stderr=subprocess.DEVNULL)
    limit = time.time() + 300
    while not (log.exists() and len(log.read_text().splitlines()) >= 8):
        assert run.poll() is None and time.time() < limit
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "broken" / "head").exists()
    assert train.main(argv) == 0 and "resumed at step" in capsys.readouterr().err
    assert log_of(tmp_path / "broken") == log_of(tmp_path / "undisturbed")
    a, b = (weights(tmp_path / name) for name in ("undisturbed", "broken"))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_run_of_so_many_minutes(golden, prompt_file, tmp_path, monkeypatch, capsys):
    """It ends in its time, with the learning rate down, though it was interrupted."""
    ticks = itertools.count()

    def monotonic() -> float:
        """Three seconds more at every call, two for most steps. Ctrl-C comes in the fifth step."""
        if (tick := next(ticks)) == 14:
            raise KeyboardInterrupt
        return 3.0 * tick

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=monotonic, time=time.time))
    for module in train, session, writing:  # the text takes no time
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(session, "LOW_TAU", 9.0)
    argv = options(golden, prompt_file, tmp_path, epochs=50, minutes=1)
    assert train.main(argv) == 130
    assert capsys.readouterr().err.endswith("\nstopped; run the same command to go on\n")
    assert train.main(argv) == 0
    rates = [entry["lr"] for entry in log_of(tmp_path) if "loss" in entry]
    assert len(rates) == 7 and rates[-1] == pytest.approx(0.1 * 1e-3) and max(rates) > 0.5e-3
    assert "tau" in log_of(tmp_path)[-1]  # of the epoch that was cut short
    assert "warning: acceptance length" in capsys.readouterr().err
    assert train.main(argv) == 0 and "--minutes 1: used up; raise it" in capsys.readouterr().err
    argv[-1] = "2"
    assert argv[-2] == "--minutes" and train.main(argv) == 0  # more minutes go on
    assert len([entry for entry in log_of(tmp_path) if "loss" in entry]) > 12
    monkeypatch.undo()
    assert train.main(options(golden, prompt_file, tmp_path / "short", minutes=1e-9)) == 1
    assert "--minutes 1e-09: this model needs at least 1 here" in capsys.readouterr().err


@pytest.mark.expensive
def test_two_processes_have_the_text_and_the_gradients_of_one(golden, prompt_file, tmp_path):
    """Two machines of a process each, of which one is killed in training; then two processes go on.

    Text, losses, norms of gradients, which Adam hides, and the head agree with one process.
    """
    run = {"epochs": 3, "batch-tokens": 200, "decode-batch": 1, "max-new-tokens": 16, "synthesize": 4}
    one, two = tmp_path / "one", tmp_path / "two"
    assert train.main(options(golden, prompt_file, one, **run)) == 0
    argv = options(golden, prompt_file, two, **run)
    script = tmp_path / "saving.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SAVING}\n")
    launch, log = Launch([str(script), *argv], machines=2, each=1), two / "head-work" / "log.jsonl"
    launch.kill_one(lambda: log.exists() and log.read_text().count("\n") > 2)
    codes, _ = launch.end()
    assert all(codes) and not (two / "head").exists()
    codes, printed = Launch(["train.py", *argv], machines=1, each=2).end()
    assert codes == [0] and "resumed at step" in printed, printed
    a, b = (sorted("".join(p.read_text() for p in (x / "head-work/data").iterdir()).splitlines())
            for x in (one, two))
    assert a == b and len(a) == 28 and len(list((two / "head-work/data").iterdir())) == 2
    first, second = log_of(one), log_of(two)
    assert len(first) == len(second) > 6
    for a, b in zip(first, second):
        assert a["step"] == b["step"] and a.keys() == b.keys()
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-4)
        assert a.get("norm", 0) == pytest.approx(b.get("norm", 0), rel=1e-3)
        assert a.get("tau", 0) == pytest.approx(b.get("tau", 0), rel=0.1)
    a, b = weights(one), weights(two)
    for name in a:
        torch.testing.assert_close(a[name].float(), b[name].float(), rtol=0.02, atol=2e-3)


def test_a_loss_that_is_not_finite_ends_the_run(golden, prompt_file, tmp_path, capsys):
    changes = {"validate-prompts": 0, "batch-tokens": 200, "synthesize": 0, "lr": 1e6, "epochs": 9}
    assert train.main(options(golden, prompt_file, tmp_path, **changes)) == 1
    assert "nan at step 1; train with a smaller --lr" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "head").exists()
