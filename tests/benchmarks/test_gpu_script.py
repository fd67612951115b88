"""gpu.sh with a program in Python's place that notes how it is called and fails where it is told to."""
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

STAGES = ["probe", "correct", "step", "context", "kv", "batch", "quant", "peers", "smollm2"]
STAGES += ["batches", "train"]
# `parts.py join` makes the checkpoint.
STUB = """#!/bin/sh
case "$1" in -c) echo fp8; exit 0 ;; esac
echo "$*" >>"$NOTES"
case "$*" in *"parts.py join"*) mkdir -p "$CHECKPOINT" ;; esac
for word in $FAIL; do case "$*" in *"$word"*) exit 3 ;; esac; done
"""
# The program of this name, without its options and its time.
TIMEOUT = """#!/bin/sh
while case "$1" in -*) true ;; *) false ;; esac; do shift 2; done
shift
exec "$@"
"""
# What stands before every part, and what bounds it.
PART = re.compile(r"^== (\S+): at most (\d+) s$", re.MULTILINE)
MOST = 540  # seconds of a stage
KINDS = "eagle3", "p-eagle", "dflash", "dspark"  # that are trained
BESIDE = "kernels", "captured", "eagle-float32", "float32", "eagle-bfloat16", "bfloat16", "checkpoint"


@pytest.fixture
def script(tmp_path):
    """A function that runs stages -> (exit status, what was printed, what was called).

    The script lies in a folder of its own, without .venv.
    """
    root = tmp_path / "root"
    (root / "benchmarks").mkdir(parents=True)
    (root / "benchmarks" / "gpu.sh").write_text((ROOT / "benchmarks" / "gpu.sh").read_text())
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "timeout").write_text(TIMEOUT)
    (tmp_path / "timeout").chmod(0o755)

    def run(*stages, shell="sh", python="stub", **settings):
        notes = tmp_path / "notes"
        notes.write_text("")
        kept = {k: v for k, v in os.environ.items() if k not in ("OUT", "OPTIONS", "QUESTIONS")}
        environment = {
            **kept, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(notes), "FAIL": "",
            "CHECKPOINT": str(tmp_path / "checkpoint"), "TRAIN_DATA": str(tmp_path),
            "QUESTIONS": "questions.jsonl", **settings,
        }
        if python:
            environment["PYTHON"] = str(tmp_path / python)
        done = subprocess.run(
            [shell, root / "benchmarks/gpu.sh", *stages], env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr, notes.read_text().splitlines()

    return run


@pytest.mark.parametrize("shell", ("sh", "bash"))
def test_each_stage_is_usable_alone(script, shell):
    for stage in STAGES:
        status, said, calls = script(stage, shell=shell)
        assert status == 0 and calls, (stage, said)
        assert "all parts ended well" in said


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_ends_within_nine_minutes(script, stage, tmp_path):
    """Parts follow each other, but for the tests of `correct`, which run side by side. The checkpoint has to
    be joined first.
    """
    (tmp_path / "root" / "runs" / "carry").mkdir(parents=True)
    for kind in KINDS:
        for folder in (f"gpu-{kind}", f"gpu-{kind}-work"):
            (tmp_path / "root" / "runs" / folder).mkdir()
        (tmp_path / "root" / "runs" / f"gpu-{kind}-work" / "log.jsonl").write_text("{}\n")
    out, settings = tmp_path / "out", {"CHECKPOINT": str(tmp_path / "joined")}
    status, said, calls = script(stage, OUT=str(out), **settings)
    assert status == 0, said
    times = {name: int(n) for name, n in PART.findall(said)}
    called = sum(not name.startswith("log-") for name in times)  # those are copied without Python
    assert times and len(calls) == called
    assert ("join" in times) == (stage in ("correct", "smollm2", "batches", "train"))
    beside = [times.pop(name) for name in BESIDE if name in times]
    assert len(beside) == (len(BESIDE) if stage == "correct" else 0)
    assert sum(times.values()) + max(beside, default=0) <= MOST
    assert [(out / f"gpu-train-{kind}.jsonl").is_file() for kind in KINDS] == [stage == "train"] * len(KINDS)


def test_it_goes_on_after_failures_and_sums_them_up(script):
    status, said, calls = script("step", "quant", "peers", FAIL="--modes gpu-peers-ours")
    assert status == 1 and said.rstrip().endswith("failed: quant peers-ours")
    assert [re.search(r"gpu-([\w-]+)", call)[1] for call in calls] == [
        "step", "quant", "products", "peers-ours", "peers"
    ]
    assert script("train", FAIL="train.py")[:2][0] == 1
    status, said, calls = script("train", FAIL="runs/gpu-p-eagle", KINDS="p-eagle dspark")
    assert status == 1 and said.rstrip().endswith("failed: train-p-eagle") and len(calls) == 2


def test_all_is_every_stage_in_order(script):
    _, said, _ = script("all")
    parts = [name for name, _ in PART.findall(said)]
    named = "probe", "sanitizer", "step", "context", "batch", "quant"
    places = [parts.index(part) for part in named]
    assert places == sorted(places) and parts[-1] == f"train-{KINDS[-1]}"


def test_what_is_missing_is_left_out_and_said(script, tmp_path):
    status, said, calls = script("train", "smollm2", CHECKPOINT=str(tmp_path / "none"), TRAIN_DATA="")
    assert status == 0 and not calls
    assert "left out: batches (no QUESTIONS)" in script("batches", QUESTIONS="")[1]
    assert re.search(r"left out: train \(no .*none\),smollm2 \(no .*none\)", said)


@pytest.mark.parametrize("stages, settings, words", [
    ((), {}, "What a GPU is asked, in stages"),
    (("probe", "bogus"), {}, "error: no stage bogus"),
    (("peers",), {"GPT_FAST": "somewhere"}, "GPT_FAST needs GPT_FAST_CHECKPOINT too"),
])
def test_bad_input(script, stages, settings, words):
    status, said, calls = script(*stages, **settings)
    assert status == 2 and words in said and not calls


def test_without_a_gpu_it_says_so(script):
    status, said, calls = script("probe", PYTHON=sys.executable, python=None, CUDA_VISIBLE_DEVICES="")
    assert status == 2 and said.strip() == "error: torch sees no GPU here" and not calls


def test_python3_is_taken_where_there_is_no_environment(script, tmp_path):
    (tmp_path / "stub").rename(tmp_path / "python3")
    status, said, calls = script("probe", python=None, PYTHON="", OUT=str(tmp_path / "out"))
    assert status == 0 and calls[0].startswith("benchmarks/probe.py --name gpu-probe"), said
    assert (tmp_path / "out").is_dir()
