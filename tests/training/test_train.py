"""train.py from the command line on the golden target: data generation, training, resuming, output files."""
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, edit
from helpers.launching import ONE_THREAD, Launch
from helpers.training import log_of, loss_on, options, user_messages
from safetensors.torch import load_file, save_file

import quantize
import train
from checkpoint.folder import weights_fingerprint
from checkpoint.load import load_head, load_model
from engine.engine import Engine
from engine.sampling import Sampling
from engine.step import TORCH_BACKEND
from training import collector, data, session, trainer
from training.features import Features, without_layers
from training.heads import TRAINED, HeadShape, new_head
from training.validate import make_drafter
from tree import TreeShape

pytestmark = pytest.mark.slow


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.expensive] * (kind != "eagle3")) for kind in TRAINED
])
def test_trained_heads(golden, trained, kind):
    """They are better than an untrained head on held-out rows, are lossless, and have a model card."""
    argv, folder = trained(kind)
    log = log_of(folder)
    assert sum("held_out" in row and row["tau"] >= 1 for row in log) == 6
    target, _ = load_model(golden)
    head = load_head(folder / "head", target, kind)
    shape = {"num_layers": head.args.num_layers, "states": 3 if kind == "dspark" else None}
    shape |= {name: getattr(head.args, name, None) for name in ("drafts", "markov_rank")}
    untrained = new_head(target, kind, head.draft_ids, HeadShape(**shape), 0)
    paths = data.shards_in(folder / "head-work" / "data")
    lines = data.read_shards(paths, 320, weights_fingerprint(target))
    held_out, rows = data.hold_out(data.training_rows(lines, 200)[0])
    with torch.no_grad():
        objectives = (TRAINED[kind].objective(target, x, 4) for x in (head, untrained))
        (loss, hits, *_), (untrained_loss, untrained_hits, *_) = (
            loss_on(objective, rows=held_out) for objective in objectives)
    assert head.args.draft_window == max(len(row["ids"]) for row in rows)
    assert loss < 0.95 * untrained_loss and hits.sum() >= untrained_hits.sum()
    drafter, prompt = make_drafter(head, TreeShape(16, 3, 4)), list(b"u:question 3\na:")
    plain, drafted = (
        Engine(target, x, compile=False, max_seq_len=200).generate([prompt], Sampling(60))[0].ids
        for x in (None, drafter)
    )
    assert plain == drafted
    files = sorted(p.name for p in (folder / "head").iterdir())
    assert files == ["README.md", "config.json", "model.safetensors"]
    card = (folder / "head" / "README.md").read_text()
    assert card.startswith(f"# {TRAINED[kind].title}") and "- epoch 6: held-out" in card
    assert f"python train.py {' '.join(argv)}" in card


def test_a_run_resumes_only_with_the_same_options_data_and_target(
    golden, trained, tmp_path, capsys, monkeypatch
):
    """A finished run changes nothing and keeps other files in OUT."""
    argv, folder = trained("eagle3")
    shutil.copytree(folder, tmp_path / "run")
    argv = [word.replace(str(folder), str(tmp_path / "run")) for word in argv]
    head = tmp_path / "run" / "head"
    assert {len(row["held_out"]) for row in log_of(folder) if "held_out" in row} == {4}
    content = (head / "model.safetensors").read_bytes()
    (head / "LICENSE").write_text("mine")
    assert train.main(argv) == 0
    assert (head / "LICENSE").read_text() == "mine" and (head / "model.safetensors").read_bytes() == content
    with monkeypatch.context() as patch:  # nothing is loaded
        patch.setattr("training.session.load_model", None)
        for option, value in (("lr", "2e-3"), ("--steps", "2"), ("--draft-vocab", "65")):
            assert train.main([*argv, f"--{option.strip('-')}", value]) == 1
            assert f"or data ({option}); use another" in last_line(capsys)
        state = torch.load(file := tmp_path / "run" / "head-work" / "state.pt", weights_only=True)
        torch.save({key: value for key, value in state.items() if key != "before"}, file)
        assert train.main(argv) == 1 and f"{file}: cannot be read; if it is damaged" in last_line(capsys)
        torch.save(state, file)
    tuned = shutil.copytree(golden, tmp_path / "tuned")  # a fine-tune differs in its inner weights only
    state = load_file(tuned / "model.safetensors")
    state["layers.3.mlp.w_down.weight"] *= 1.1
    save_file(state, tuned / "model.safetensors")
    assert train.main([*argv, "--checkpoint", str(tuned)]) == 1
    assert "other data or another target; use another --out" in last_line(capsys)


@pytest.mark.kernels
def test_training_on_a_quantized_target(golden, prompt_file, tmp_path):
    """The head learns from the states that the target's kernels compute."""
    folder = tmp_path / "w8a8"
    assert quantize.main(["--checkpoint", str(golden), "--mode", "w8a8", "--out", str(folder)]) == 0
    assert train.main(options(folder, prompt_file, tmp_path, epochs=2, steps=2)) == 0
    assert all(row["held_out"][0] > 0.5 and row["tau"] > 1.5 for row in log_of(tmp_path) if "held_out" in row)
    target, _ = load_model(folder)
    assert without_layers(target).output_layer.weight.equal(target.lm_head.dequantize(target.embed.dtype))


def test_prompts_synthesized_conversations_and_shards(golden, prompt_file, tmp_path, capsys, monkeypatch):
    """Prompts and synthesized conversations are mixed, and read back as shards. Conversations that the chat
    template rejects are skipped.
    """
    monkeypatch.setattr("training.session.choose_backend", lambda *_, **__: TORCH_BACKEND)
    target = shutil.copytree(golden, tmp_path / "target")
    rejection = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    edit(target, stop_ids=[ord("\n")])
    tokenizer = json.loads((target / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = rejection + tokenizer["chat_template"]
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    rejected = [{"role": "system", "content": "s"}, *user_messages("u")]
    prompts, openings = tmp_path / "p.jsonl", tmp_path / "openings.txt"
    prompts.write_text(f'{prompt_file.read_text()}{json.dumps({"messages": rejected})}\n{{"prompt": ""}}\n')
    openings.write_text("Write \n\nSum\n")
    source = {"openings": openings, "synthesize": 24}
    assert train.main([*options(target, prompts, tmp_path, **source), "--collect-only"]) == 0
    source = {"shards": tmp_path / "head-work" / "data", "synthesize": 0}
    assert train.main([*options(target, None, tmp_path / "again", **source), "--collect-only"]) == 0
    err = capsys.readouterr().err
    generated, read_back = (line for line in err.splitlines() if " conversations (" in line)
    assert all(f"{name} " in generated for name in ("prompts", "synthesized"))
    assert generated.split(" ")[0] == read_back.split(" ")[0]  # equal numbers of conversations
    for message in "skipped 1 conversation: rejected by the chat template (", "1 conversation: empty":
        assert message in err, err


# -- interrupted runs resume exactly, on one process or several, also after SIGKILL --------------------------


# train.py that saves its state after every step.
SAVING = (
    "import sys, train; from training import trainer; trainer.SAVE_INTERVAL_SECONDS = 0;"
    " sys.exit(train.main())"
)


def weights(folder: Path) -> dict:
    return load_file(folder / "head" / "model.safetensors")


def test_a_killed_run_resumes_exactly(golden, prompt_file, tmp_path, capsys):
    """After SIGKILL during training, log and head equal those of an uninterrupted run."""
    settings = {"epochs": 8, "validate-prompts": 0, "batch-tokens": 200}
    assert train.main(options(golden, prompt_file, tmp_path / "uninterrupted", **settings)) == 0
    argv = options(golden, prompt_file, tmp_path / "killed", **settings)
    log = tmp_path / "killed" / "head-work" / "log.jsonl"
    run = subprocess.Popen([sys.executable, "-c", SAVING, *argv], cwd=ROOT, env=ONE_THREAD,
                           stderr=subprocess.DEVNULL)
    deadline = time.time() + 300
    while not (log.exists() and len(log.read_text().splitlines()) >= 8):
        assert run.poll() is None and time.time() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "killed" / "head").exists()
    assert train.main(argv) == 0 and "resumed at step" in capsys.readouterr().err
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "uninterrupted")
    a, b = (weights(tmp_path / name) for name in ("uninterrupted", "killed"))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_time_limited_run(golden, prompt_file, tmp_path, monkeypatch, capsys):
    """An interrupted run with --minutes ends in time, with the learning rate decayed. Larger --minutes resume
    it.
    """
    ticks = itertools.count()

    def monotonic() -> float:
        """Advance three seconds per call; most steps have two calls. Raise Ctrl-C in the fifth step."""
        if (tick := next(ticks)) == 14:
            raise KeyboardInterrupt
        return 3.0 * tick

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=monotonic, time=time.time))
    for module in train, session, collector:  # data generation takes no time
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(session, "LOW_TAU", 9.0)
    argv = options(golden, prompt_file, tmp_path, epochs=50, minutes=1)
    assert train.main(argv) == 130
    assert capsys.readouterr().err.endswith("\ninterrupted; run the same command to resume\n")
    assert train.main(argv) == 0
    rates = [entry["lr"] for entry in log_of(tmp_path) if "loss" in entry]
    assert len(rates) == 7 and rates[-1] == pytest.approx(0.1 * 1e-3) and max(rates) > 0.5e-3
    assert "tau" in log_of(tmp_path)[-1]  # also for an incomplete epoch
    assert "warning: acceptance length" in capsys.readouterr().err
    assert train.main(argv) == 0 and "--minutes 1: used up; raise it" in capsys.readouterr().err
    argv[-1] = "2"
    assert argv[-2] == "--minutes" and train.main(argv) == 0
    assert len([entry for entry in log_of(tmp_path) if "loss" in entry]) > 12
    monkeypatch.undo()
    monkeypatch.setattr(session, "MAX_DATA_FRACTION", 1e-6)
    assert train.main(options(golden, prompt_file, tmp_path / "slow", minutes=1)) == 1
    assert re.search(r"--minutes 1: half of it went to loading; raise --minutes to \d+$", last_line(capsys))
    assert not [*tmp_path.glob("slow*")]
    assert train.main(options(golden, prompt_file, tmp_path / "short", minutes=1e-9)) == 1
    assert "--minutes 1e-09: this model needs at least 1 on this machine" in capsys.readouterr().err


def test_each_phase_logs_a_line_before_it_starts(golden, prompt_file, tmp_path, monkeypatch, capsys):
    printed = {}

    def record_output_before(owner, name: str) -> None:
        function = getattr(owner, name)

        def recording(*arguments, **options):
            new = capsys.readouterr().err
            printed.setdefault(name, new)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, recording)

    phases = {
        "load_model": (session, "loading "), "step": (Engine, "data |"),
        "new_head": (session, "initializing "),
        "read": (Features, "target features:"), "gradients": (trainer.Trainer, "training |"),
        "_held_out_accuracy": (trainer.Trainer, "validating |"),
    }
    for name, (owner, _) in phases.items():
        record_output_before(owner, name)
    assert train.main(options(golden, prompt_file, tmp_path)) == 0
    assert list(printed) == list(phases)
    for name, (_, line) in phases.items():
        assert line in printed[name], (name, printed)


def test_interrupted_generation_keeps_its_time_budget(golden, prompt_file, tmp_path, monkeypatch, capsys):
    """Data generation gets half of the remaining minute. Each run takes 20 seconds before Ctrl-C."""
    clock, budgets = SimpleNamespace(now=100.0), []

    def write(_, deadline: float, training_seconds: float) -> None:
        budgets.append(deadline - clock.now)
        clock.now += 20
        raise KeyboardInterrupt

    for module in train, session, collector:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    argv = options(golden, prompt_file, tmp_path, minutes=1)
    with monkeypatch.context() as patch:
        patch.setattr(collector.Collector, "write", write)
        assert [train.main(argv) for _ in range(3)] == [130] * 3 and budgets == [30, 20, 10]
    clock.now += 1000  # between the runs
    assert train.main(argv) == 1
    assert "or --minutes 1 ended before they were generated: raise --minutes to 5" in last_line(capsys)


@pytest.mark.slow
def test_two_ranks_with_a_sharded_target(golden, prompt_file, tmp_path):
    """Data, log and head equal those of one process."""
    settings = {"epochs": 1, "batch-tokens": 200, "decode-batch": 4, "max-new-tokens": 16, "synthesize": 2}
    one, two = tmp_path / "one", tmp_path / "two"
    assert train.main(options(golden, prompt_file, one, **settings)) == 0
    argv = ["train.py", *options(golden, prompt_file, two, **settings), "--shard-target"]
    codes, printed = Launch(argv, machines=1, per_machine=2).wait()
    assert codes == [0], printed
    a, b = (sorted(p.read_text() for p in (x / "head-work/data").iterdir()) for x in (one, two))
    assert sorted(a[0].splitlines()) == sorted(b[0].splitlines()) and len(b) == 1
    for a, b in zip(log_of(one), log_of(two), strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-4) and ("tau" in a) == ("tau" in b)
    a, b = weights(one), weights(two)
    for name in a:
        torch.testing.assert_close(a[name].float(), b[name].float(), rtol=0.02, atol=2e-3)


@pytest.mark.expensive
def test_two_ranks_have_the_data_and_gradients_of_one(golden, prompt_file, tmp_path):
    """Two machines train with one rank each; one rank is killed, and two ranks on one machine resume.

    Data, losses, gradient norms (Adam hides their scale) and the head agree with one process.
    """
    settings = {"epochs": 3, "batch-tokens": 200, "decode-batch": 1, "max-new-tokens": 16, "synthesize": 4}
    one, two = tmp_path / "one", tmp_path / "two"
    assert train.main(options(golden, prompt_file, one, **settings)) == 0
    argv = options(golden, prompt_file, two, **settings)
    script = tmp_path / "saving.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SAVING}\n")
    launch, log = Launch([str(script), *argv], machines=2, per_machine=1), two / "head-work" / "log.jsonl"
    launch.kill_one(lambda: log.exists() and log.read_text().count("\n") > 2)
    codes, _ = launch.wait()
    assert all(codes) and not (two / "head").exists()
    codes, printed = Launch(["train.py", *argv], machines=1, per_machine=2).wait()
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


def test_a_nan_loss_ends_the_run(golden, prompt_file, tmp_path, capsys):
    changes = {"validate-prompts": 0, "batch-tokens": 200, "synthesize": 0, "lr": 1e6, "epochs": 9}
    assert train.main(options(golden, prompt_file, tmp_path, **changes)) == 1
    assert "gradient norm nan; train with a smaller --lr" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "head").exists()
