"""train.py as a user runs it, on the golden target: heads learn, runs resume exactly, processes share the
work, mistakes are told.
"""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from safetensors.torch import load_file, save_file

import train
from checkpoint.convert import convert
from checkpoint.loading import load_head, load_model
from engine.decoder import Decoder
from sampling.options import Sampling
from training.objective import Eagle3Objective
from training.trainer import SHORT, Trainer
from training.validate import drafter_of
from tree import TreeShape


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"turns": [f"question {i}: what is {i} and {i * i}?"]}) + "\n" for i in range(24))
    )
    return file


def options(golden, prompt_file, tmp_path, **changes) -> list[str]:
    given = {
        "checkpoint": golden, "prompts": prompt_file, "out": tmp_path / "head", "work": tmp_path / "work",
        "max-new-tokens": 40,
        "decode-batch": 12, "draft-vocab": 64, "epochs": 2, "steps": 3, "batch-tokens": 512, "synthesize": 4,
        "seed": 1,
        "validate-prompts": 2, "validate-tokens": 12, "tree": "12,3,4", **changes,
    }
    return [
        "--no-compile", "--dtype", "fp32",
        *(str(x) for k, v in given.items() if v is not None for x in (f"--{k}", v))
    ]


def weights(folder: Path) -> dict:
    return load_file(folder / "model.safetensors")


def log_of(work: Path) -> list[dict]:
    return [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]


def same(a: Path, b: Path) -> bool:
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa", "hydra"])
def test_trains_exports_and_decodes(golden, prompt_file, tmp_path, kind):
    def last(folder: Path, **changes) -> dict:
        assert train.main(options(golden, prompt_file, folder, epochs=6, kind=kind, **changes)) == 0
        log = log_of(folder / "work")
        assert sum("held_out" in row and row["tau"] >= 1 for row in log) == 6
        return [row for row in log if "loss" in row][-1]

    # Medusa heads begin with the target's own guess at the next token, and the run is short.
    trained, control = last(
        tmp_path, **({"lr": 1e-2} if kind == "medusa" else {})
    ), last(tmp_path / "control", lr=1e-12)
    assert trained["loss"] < (0.93 if kind in ("eagle", "medusa") else 0.85) * control["loss"]
    # An EAGLE-1 head begins with the feature itself, which says much on this target.
    assert trained["accuracy"][0] >= control["accuracy"][0] + (0 if kind == "eagle" else 0.05)
    folder = convert(tmp_path / "head", tmp_path / "converted", target=golden, quiet=True)
    target, _ = load_model(golden)
    head = load_head(folder, target, kind)
    prompt = list(b"u:question 3\na:")
    (plain,) = Decoder(target, compile=False, max_seq_len=200).generate([prompt], Sampling(60))
    (fast,) = Decoder(
        target, drafter_of(head, TreeShape(16, 3, 4)), compile=False, max_seq_len=200
    ).generate([prompt], Sampling(60))
    assert fast.ids == plain.ids
    card = (tmp_path / "head" / "README.md").read_text()
    assert card.startswith(
        "# " + {"eagle3": "EAGLE-3", "eagle": "EAGLE-1", "medusa": "Medusa", "hydra": "Hydra"}[kind]
    )
    assert "answers" in card and "| 6 |" in card and "python train.py" in card
    assert (tmp_path / "head" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_both_layouts_hold_the_same_head(golden, prompt_file, tmp_path):
    assert train.main(options(golden, prompt_file, tmp_path, layout="both", epochs=1)) == 0
    target, _ = load_model(golden)
    folders = tmp_path / "head", tmp_path / "head" / "speculators"
    one, other = (
        load_head(convert(f, tmp_path / f"back-{f.name}", target=golden, quiet=True), target) for f in folders
    )
    assert one.args == other.args and all(
        torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items()
    )


def test_a_narrow_head_with_an_average(golden, prompt_file, tmp_path):
    narrow = {
        "hidden-size": 32, "heads": 2, "kv-heads": 1, "intermediate-size": 48, "ema": 0.9,
        "schedule": "linear", "epochs": 1
    }
    assert train.main(options(golden, prompt_file, tmp_path, **narrow)) == 0
    target, _ = load_model(golden)
    head = load_head(convert(tmp_path / "head", tmp_path / "converted", target=golden, quiet=True), target)
    assert (head.args.hidden_size, head.args.num_kv_heads, head.args.own_embedding) == (32, 1, True)


def test_an_interrupted_run_resumes_exactly(golden, prompt_file, tmp_path, monkeypatch):
    assert train.main(options(golden, prompt_file, tmp_path / "whole", ema=0.9)) == 0
    original, calls = Trainer.gradients, iter(range(1000))

    def stops(self, *args):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Trainer, "gradients", stops)
    argv = options(golden, prompt_file, tmp_path / "broken", ema=0.9, **{"save-seconds": 0})
    assert train.main(argv) == 130 and not (tmp_path / "broken" / "head").exists()
    assert train.main(argv) == 0
    assert same(tmp_path / "whole" / "head", tmp_path / "broken" / "head")


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_killed_run_has_the_same_curve(golden, prompt_file, tmp_path, kind):
    """kill -9 in the middle of training, at whatever instant it hits; the log of the whole is that of a run
    left alone.
    """
    def argv(folder: Path) -> list[str]:
        slow = {"epochs": 12, "log-every": 1, "save-seconds": 0, "validate-prompts": 0, "kind": kind}
        return options(golden, prompt_file, folder, **slow)

    assert train.main(argv(tmp_path / "whole")) == 0
    work = tmp_path / "killed" / "work"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [sys.executable, "train.py", *argv(tmp_path / "killed")], cwd=ROOT, env=environment,
        stderr=subprocess.DEVNULL
    )
    limit = time.time() + 120
    while not ((work / "log.jsonl").exists() and len((work / "log.jsonl").read_text().splitlines()) >= 8):
        assert run.poll() is None and time.time() < limit
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (tmp_path / "killed" / "head").exists()
    assert train.main(argv(tmp_path / "killed")) == 0
    assert log_of(work) == log_of(tmp_path / "whole" / "work")
    assert same(tmp_path / "whole" / "head", tmp_path / "killed" / "head")


def test_two_processes_have_the_gradients_of_one(golden, prompt_file, tmp_path):
    """The same run, text and features included, on one process and on two (gloo): the norms of the gradients,
    which Adam would not tell apart, the curves and the heads agree.
    """
    def argv(folder: Path) -> list[str]:
        given = {"log-every": 1, "synthesize": 24, "clip": 1e5, "cache-features": folder / "features"}
        return options(golden, prompt_file, folder, **given)

    assert train.main(argv(tmp_path / "one")) == 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py",
        *argv(tmp_path / "two")
    ]
    done = subprocess.run(launch, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
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


def test_features_on_disk_change_nothing(golden, prompt_file, tmp_path, capsys):
    whole = options(golden, prompt_file, tmp_path / "a", **{"feature-memory": 0, "batch-tokens": 200})
    assert train.main(whole) == 0
    stored = options(golden, prompt_file, tmp_path / "b", **{"batch-tokens": 200}) + ["--cache-features"]
    assert train.main(stored) == 0
    assert "rows need 0.00 GB" in capsys.readouterr().err and list(
        (tmp_path / "b" / "work" / "features").glob("*/*.bin")
    )
    losses = [[row["loss"] for row in log_of(tmp_path / x / "work") if "loss" in row] for x in "ab"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_short_epochs_unroll_fewer_steps(golden, prompt_file, tmp_path, monkeypatch):
    original, seen = Trainer.gradients, []

    def watched(self, places, steps):
        seen.append((self.epoch, steps))
        return original(self, places, steps)

    monkeypatch.setattr(Trainer, "gradients", watched)
    assert train.main(options(golden, prompt_file, tmp_path, steps=5, **{"short-epochs": 1})) == 0
    assert set(seen) == {(0, SHORT), (1, 5)}
    # What is reported stays comparable.
    assert {len(row["held_out"]) for row in log_of(tmp_path / "work") if "held_out" in row} == {5}


def test_other_settings_do_not_resume(golden, prompt_file, tmp_path, capsys):
    assert train.main(options(golden, prompt_file, tmp_path)) == 0
    assert train.main(options(golden, prompt_file, tmp_path, steps=2)) == 1
    assert "other settings or data (steps)" in capsys.readouterr().err
    state = tmp_path / "work" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert train.main(options(golden, prompt_file, tmp_path)) == 1
    assert "state.pt: damaged" in capsys.readouterr().err


def test_other_prompts_and_settings_have_their_own_shards(golden, prompt_file, tmp_path, capsys):
    def collected(**changes) -> tuple[dict, str]:
        given = {"synthesize": 0, "limit": 12, **changes}
        assert train.main([*options(golden, prompt_file, tmp_path, **given), "--collect-only"]) == 0
        return {
            p: p.stat().st_mtime_ns for p in (tmp_path / "work" / "data").iterdir()
        }, capsys.readouterr().err

    first, _ = collected()
    assert len(first) == 1 and collected()[0] == first
    more, said = collected(limit=24)  # the first half is there already
    # And one held out.
    assert len(more) == 2 and first.items() < more.items() and "23 conversations (prompts 23)" in said
    for change in ({"temperature": 0.3}, {"seed": 2}, {"max-new-tokens": 30}):
        found, said = collected(**change)
        assert len(found) == len(more) + 1 and "11 conversations" in said, change
        more = found
    data = json.loads((tmp_path / "work" / "data.json").read_text())
    assert data["rows"] == 11 and data["answer_tokens"] > 11 * 3


def test_all_kinds_of_text_are_mixed(golden, prompt_file, tmp_path, capsys):
    share = [
        {
            "conversations": [
                {"from": "human", "value": f"hello {i}"}, {"from": "gpt", "value": "good day to you"}
            ]
        } for i in range(9)
    ]
    (tmp_path / "share.json").write_text(json.dumps(share))
    (tmp_path / "openings.txt").write_text("Write \n\nSum\n")
    target = shutil.copytree(golden, tmp_path / "target")  # one that ends its turns with a line
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"stop_ids": [ord("\n")]}))
    given = {
        "conversations": tmp_path / "share.json", "openings": tmp_path / "openings.txt", "turns": 2,
        "synthesize": 24
    }
    assert train.main([*options(target, prompt_file, tmp_path, **given), "--collect-only"]) == 0
    assert train.main(
        [
            *options(target, None, tmp_path / "again", shards=tmp_path / "work" / "data", synthesize=0),
            "--collect-only"
        ]
    ) == 0
    first, again = (line for line in capsys.readouterr().err.splitlines() if " conversations (" in line)
    assert all(f"{source} " in first for source in ("prompts", "synthesized", "conversations"))
    assert first.split(" ")[0] == again.split(" ")[0]  # the same text, read back


def test_bad_input_is_one_line(golden, prompt_file, tmp_path, capsys):
    def refused(words: str, *extra: str, **changes) -> None:
        assert train.main(
            [*options(golden, **{"prompt_file": prompt_file, "tmp_path": tmp_path, **changes}), *extra]
        ) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("error: ") and words in lines[-1], lines

    refused("nothing to train on", prompt_file=None, synthesize=0)
    refused("not a folder; convert", checkpoint=tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    refused("not a folder that can be written", out=tmp_path / "file")
    refused("--device cuda:9", device="cuda:9")
    refused("holds no prompts", prompts=tmp_path / "file")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "text.jsonl").write_text('{"text": "no chat"}\n')
    refused("line 1: no conversation", prompts=tmp_path / "text.jsonl")
    refused("line 1: no conversation", conversations=tmp_path / "text.jsonl")
    refused("holds no lines", openings=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    refused("holds no shards", shards=tmp_path / "empty")
    refused("the target's context is", **{"max-prompt-tokens": 10**6})
    refused(
        "24 prompts or conversations were left out (empty, longer than --max-prompt-t",
        **{"max-prompt-tokens": 3, "synthesize": 0}
    )
    refused("fewer than two different prompts", limit=1, synthesize=0)
    refused("--lr", lr=0)
    refused("is --out or lies in it", work=tmp_path / "head")
    refused("at least 2", **{"validate-tokens": 1})
    refused("holds something else", out=golden)
    refused("--shards takes the data folder", shards=tmp_path / "log")
    refused("--ema", ema=1)
    refused("--short-epochs", **{"short-epochs": 3})
    refused("EAGLE-3 heads only", kind="eagle", layout="both")
    refused("EAGLE-1 head predicts", kind="eagle", **{"hidden-size": 32})
    refused("not a multiple", heads=4, **{"kv-heads": 3})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jsonl").write_text('{"ids": [1, 2, 999999], "answers": [[0, 3]]}\n')
    refused("line 1 is no row", shards=tmp_path / "bad")
    (tmp_path / "bad" / "a.jsonl").write_text('{"ids": [1, 2, 3, 4, 5, 6], "answers": [[1, 3, 6]]}\n')
    refused("line 1 is no row", shards=tmp_path / "bad")
    (tmp_path / "bad" / "a.jsonl").write_bytes(b"\xff\xfe\n")
    refused("cannot be read", shards=tmp_path / "bad")
    refused("is --out or lies in it", work=tmp_path / "head" / "work")
    refused("--limit: belongs to --prompts", prompt_file=None, limit=3)
    refused("--turns: belongs to --synthesize", turns=3, synthesize=0)
    refused("--guesses: belongs to --kind medusa", guesses=3)
    refused("is no folder", **{"cache-features": tmp_path / "file"})
    refused("--decode-batch", **{"decode-batch": 10**8})
    with pytest.raises(SystemExit):
        train.main(options(golden, prompt_file, tmp_path, tree="1,2"))
    assert not (tmp_path / "head").exists()


def test_what_a_template_refuses_is_left_out(golden, tmp_path, capsys):
    """A strict template costs the prompts and conversations it refuses, and says why; not the run."""
    strict = tmp_path / "strict"
    shutil.copytree(golden, strict)
    config = json.loads((strict / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + config["chat_template"]
    )
    (strict / "tokenizer_config.json").write_text(json.dumps(config))
    asked = [[{"role": "user", "content": f"question {i}"}] for i in range(6)]
    asked += [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]]
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"messages": m}) + "\n" for m in asked) + '{"prompt": ""}\n'
    )
    said = [
        [*m, {"role": "assistant", "content": "some answer or other"}] for m in asked
    ] + [[{"role": "tool", "content": "x"}]]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in said))
    argv = options(strict, tmp_path / "p.jsonl", tmp_path, conversations=tmp_path / "c.jsonl", synthesize=0)
    assert train.main([*argv, "--collect-only"]) == 0
    error = capsys.readouterr().err
    assert "3 prompts or conversations were left out" in error and "no system messages" in error
    assert "c.jsonl: 1 rows are left out" in error
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": said[6]}) + "\n")
    assert train.main(
        [
            *options(strict, None, tmp_path / "b", conversations=tmp_path / "c.jsonl", synthesize=0),
            "--collect-only"
        ]
    ) == 1
    assert "takes none of them" in capsys.readouterr().err


def test_only_a_head_of_this_run_is_replaced(golden, prompt_file, tmp_path, capsys):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "model.safetensors.partial").write_bytes(b"cut off")
    assert train.main(options(golden, prompt_file, tmp_path, epochs=1)) == 0
    assert train.main(options(golden, prompt_file, tmp_path, epochs=1)) == 0
    assert train.main(options(golden, prompt_file, tmp_path, epochs=1, work=tmp_path / "other")) == 1
    assert "not trained in --work" in capsys.readouterr().err.splitlines()[-1]


def test_a_target_without_a_template_is_refused(golden, prompt_file, tmp_path, capsys):
    shutil.copytree(golden, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer_config.json"))
    assert train.main(options(tmp_path / "bare", prompt_file, tmp_path)) == 1
    assert "chats need a tokenizer and a chat template" in capsys.readouterr().err


def test_nan_loss_stops_names_the_batch_and_keeps_the_last_state(
    golden, prompt_file, tmp_path, capsys, monkeypatch
):
    original, calls = Eagle3Objective.loss, iter(range(1000))

    def breaks(self, *args):
        loss, hits = original(self, *args)
        return loss * (float("nan") if next(calls) == 4 else 1), hits

    monkeypatch.setattr(Eagle3Objective, "loss", breaks)
    argv = options(
        golden, prompt_file, tmp_path, **{"save-seconds": 0, "validate-prompts": 0, "batch-tokens": 200}
    )
    assert train.main(argv) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert all(
        words in error
        for words in ("the loss is nan", "at step", "batch", "begin with the ids [", "last good state")
    )
    state = torch.load(tmp_path / "work" / "state.pt", weights_only=True)
    assert all(t.isfinite().all() for t in state["head"].values())
    assert train.main(argv) == 0  # the mishap does not come back


def test_the_default_folders(golden, prompt_file, tmp_path, monkeypatch):
    """As in the README: --out alone; the work lies beside it. A second head of the same kind may take its
    place.
    """
    monkeypatch.chdir(tmp_path)
    argv = options(golden, prompt_file, tmp_path, out="runs/mine", work=None, epochs=1)
    assert train.main(argv) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["mine", "mine-work"]
    assert sorted(p.name for p in (tmp_path / "runs" / "mine").iterdir()) == [
        "README.md", "config.json", "curves.png", "model.safetensors"
    ]
    assert train.main(argv) == 0
    assert train.main(
        options(golden, prompt_file, tmp_path, out="runs/mine", work="w", kind="eagle", epochs=1)
    ) == 1


def test_another_target_has_its_own_text_and_state(golden, prompt_file, tmp_path, capsys):
    """A fine-tune differs in its inner weights only."""
    tuned = shutil.copytree(golden, tmp_path / "tuned")
    state = load_file(tuned / "model.safetensors")
    state["layers.3.mlp.w_down.weight"] *= 1.1
    save_file(state, tuned / "model.safetensors")
    assert train.main(options(golden, prompt_file, tmp_path)) == 0
    assert train.main(options(tuned, prompt_file, tmp_path)) == 1
    assert "target); use another --work" in capsys.readouterr().err
    assert len(list((tmp_path / "work" / "data").iterdir())) == 6  # its text is its own too
    assert train.main(
        options(tuned, None, tmp_path / "b", shards=tmp_path / "work" / "data", synthesize=0)
    ) == 1
    assert "was written by another target" in capsys.readouterr().err


def test_large_seeds_and_gradients_that_are_not_finite(golden, prompt_file, tmp_path, capsys):
    assert train.main(options(golden, prompt_file, tmp_path, kind="eagle", seed=20261121, epochs=1)) == 0
    wild = options(
        golden, prompt_file, tmp_path / "wild", lr=9e5, clip=1e5, epochs=30, **{"validate-prompts": 0}
    )
    assert train.main(wild) == 1
    assert "gradient" in capsys.readouterr().err.splitlines()[-1]
    state = tmp_path / "wild" / "work" / "state.pt"
    assert all(t.isfinite().all() for t in torch.load(state, weights_only=True)["head"].values())
