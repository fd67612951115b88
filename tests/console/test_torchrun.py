"""generate.py on several ranks, as a user starts it: one voice, the text of one process, one line at the end.
"""
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from helpers.launching import free_port

import evaluate
import generate
import train
from common import torchrun
from common.errors import InputError
from kernels import tp
from kernels.tp import Ranks, joined
from training import processes
from training.processes import Processes

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
EAGLE = ("--speculate", "eagle3", "--tree", "8,2,3", "--prompt", "Hello")


def start(*args) -> subprocess.Popen:
    command = [*LAUNCH, "generate.py", *map(str, args)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ours(err: str) -> list[str]:
    """The lines of generate.py on stderr: torchrun adds a report of its own, and warnings."""
    known = "error: ", "loaded ", "ready ", "2 ranks: ", "interrupted"
    return [line for line in err.splitlines() if line.startswith(known)]


def finished(*args, status: int = 0) -> tuple[str, list[str]]:
    """What a run printed, and its lines on stderr."""
    run = start(*args)
    out, err = run.communicate(timeout=240)
    assert (run.returncode != 0) == bool(status), err[-3000:]
    return out, ours(err)


@pytest.mark.slow
def test_two_ranks_speak_with_one_voice(golden, capsys, tmp_path):
    args = ("--checkpoint", golden, *EAGLE, "--max-new-tokens", 24, "--no-compile", "--temperature", 0.8)
    assert generate.main([*map(str, args), "--json", "--trace", str(tmp_path / "one")]) == 0
    alone = json.loads(capsys.readouterr().out)
    out, lines = finished(*args, "--json", "--compare", "--trace", tmp_path / "two")
    (row,) = map(json.loads, out.splitlines())
    assert row["ranks"] == row["plain"]["ranks"] == 2 and alone["ranks"] == 1
    assert row["output_ids"] == alone["output_ids"] and row["accept_lengths"] == alone["accept_lengths"]
    assert row["equal"] is True and (tmp_path / "two").stat().st_size == (tmp_path / "one").stat().st_size
    assert [line.split()[0] for line in lines] == ["2", "loaded", "ready"]
    assert "each holds at most 0.00 GB of the target's 0.00 GB" in lines[0]
    assert "caches 256 numbers a token" in lines[0]  # 8 layers, a key and a value of 16 of one head


@pytest.mark.slow
def test_a_grammar_guides_every_rank_alike(golden, capsys):
    """The host of each says what may follow; with the head dealt too."""
    args = ("--checkpoint", golden, *EAGLE, "--max-new-tokens", 30, "--no-compile", "--json", "--json-object")
    assert generate.main([*map(str, args)]) == 0
    alone = json.loads(capsys.readouterr().out)
    (row,) = map(json.loads, finished(*args, "--shard-head")[0].splitlines())
    assert row["output_ids"] == alone["output_ids"] and row["text"].startswith("{")


@pytest.mark.slow
def test_what_ranks_refuse_is_said_once(golden):
    args = ("--checkpoint", golden, "--prompt", "Hello", "--max-seq-len", 9999, "--no-compile")
    out, lines = finished(*args, status=1)
    errors = [line for line in lines if line.startswith("error: ")]
    assert not out and len(errors) == 1 and "--max-seq-len 9999: must be 2 to 1024" in errors[0]


@pytest.mark.parametrize("checkpoint, args, words", [
    ("golden", ("--interactive",), "--interactive: ranks have one terminal"),
    ("golden", ("--prompt", "Hello", "--autotune"), "--autotune: ranks would choose different kernels"),
    ("source", ("--prompt-ids", "1,2"), "not converted yet; run python convert_checkpoint.py"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_what_ranks_refuse(golden, capsys, monkeypatch, checkpoint, args, words):
    """Each of them does it by itself, so one does here, that is told that all have one command. `--tree auto`
    is in tests/engine/test_dealing.py.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr("kernels.tp.joined", lambda *_: contextlib.nullcontext(Ranks(0, 2, "")))
    monkeypatch.setattr(Ranks, "agree_on", lambda *_: None)
    folder = {"golden": golden, "source": ROOT / "tests" / "golden" / "target"}[checkpoint]
    assert generate.main(["--checkpoint", str(folder), *args, "--no-compile"]) == 1
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert not out and words in line


@pytest.mark.parametrize("local_rank, lines", [(0, ["interrupted"]), (1, [])])
def test_ctrl_c_is_said_once(golden, local_rank, lines):
    """It comes from the terminal, while torch is imported, and once more from torchrun."""
    group = {"WORLD_SIZE": "2", "RANK": str(local_rank), "LOCAL_RANK": str(local_rank)}
    run = subprocess.Popen(
        [sys.executable, "-X", "importtime", "generate.py", "--checkpoint", str(golden), "--prompt", "x"],
        cwd=ROOT, env={**ENVIRONMENT, **group}, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job of a shell ignores it
    )
    while " torch." not in run.stderr.readline():
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    err = run.communicate(timeout=60)[1]
    assert run.returncode == 130, err[-3000:]
    assert [line for line in err.splitlines() if not line.startswith("import time:")] == lines


def test_a_mistake_of_a_training_is_said_once(golden, capsys, monkeypatch, tmp_path):
    """By the process that is the first to say one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked = iter((True, False))
    monkeypatch.setattr("common.torchrun._is_first_to_say", lambda: next(asked))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        out = ("--out", str(tmp_path / "head"), "--prompts", str(tmp_path / "none"))
        assert train.main(["--checkpoint", str(golden), *out]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: --prompts {tmp_path / 'none'}: no such file" and next(asked, None) is None


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    """Whether a process runs: one that nobody has asked about since it ended does not."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
@pytest.mark.parametrize("lost", [0, 1, "torchrun"])
def test_when_one_dies_all_end_within_seconds(golden, lost):
    """A rank is killed while they decode: the other one says so, in one line. Or torchrun is, which is what
    would keep them from speaking at once. Nobody is left.
    """
    prompts = [x for i in range(40) for x in ("--prompt", f"Hello {i}")]
    run = start("--checkpoint", golden, *prompts, "--batch-size", 1, "--max-new-tokens", 900, "--no-compile")
    said = ""
    while "ready" not in said:
        said += run.stderr.readline()
        assert run.poll() is None, said
    time.sleep(0.5)
    ranks = children(run.pid)
    assert len(ranks) == 2
    numbers = {int(dict(
        line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in line
    )["RANK"]): pid for pid in ranks}
    began = time.monotonic()
    os.kill(numbers.get(lost, run.pid), signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert time.monotonic() - began < 20 and run.returncode != 0
    errors = [line for line in ours(err) if line.startswith("error: ")]
    if lost == "torchrun":
        assert all("is ended: " in line for line in errors) and 1 <= len(errors) <= 2, err[-3000:]
        while any(map(lives, ranks)):  # it has closed what it prints to
            assert time.monotonic() - began < 20
            time.sleep(0.1)
        return
    ends = "has lost another one", "is ended: "  # whichever it notices first
    assert len(errors) == 1 and errors[0].startswith(f"error: rank {1 - lost} of 2 "), err[-3000:]
    assert any(words in errors[0] for words in ends)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_drafted_text_is_plain_text_on_the_kernels_too(golden, kv):
    """In bfloat16: a row's sum over the ranks does not depend on the rows beside it. Greedily with one cache,
    at a temperature with the other: the cache does not know how tokens are chosen.
    """
    args = ("--checkpoint", golden, *EAGLE, "--max-new-tokens", 60, "--dtype", "bf16", "--kv", kv)
    more = {"auto": (), "int8": ("--temperature", 1, "--seed", 4)}[kv]
    (row,) = map(json.loads, finished(*args, *more, "--json", "--compare")[0].splitlines())
    assert row["equal"] is True and row["tau"] > 1.2 and row["tokens"] == 60


def test_trees_are_measured_by_one_process(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert evaluate.main(["--checkpoint", "folder", "--out", str(tmp_path), "--calibrate"]) == 1
    assert "error: --calibrate: trees are measured by one process" in capsys.readouterr().err


def test_a_group_that_is_described_in_part(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="RANK, MASTER_ADDR, MASTER_PORT: not set; start several"):
        with joined("cpu"):
            pass


@pytest.mark.parametrize(
    "name, value, words",
    (
        ("RANK", "5", "RANK='5' in the environment: must be 0 to 1"), ("RANK", "x", "RANK='x'"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE='-2'"), ("MASTER_PORT", "abc", "MASTER_PORT='abc'"),
    ),
)
def test_an_environment_that_is_none(monkeypatch, name, value, words):
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for key, sound in usual.items():
        monkeypatch.setenv(key, sound)
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words), joined("cpu"):
        pass


@pytest.mark.parametrize(
    "join", (lambda: joined("cpu").__enter__(), lambda: Processes.from_environment("cpu")),
)
def test_a_process_that_nobody_joins_says_so(monkeypatch, capfd, join):
    port = str(free_port())
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "QUIET", 0.1)
    for module in (tp, processes):
        monkeypatch.setattr(module, "PATIENCE", timedelta(seconds=3))
    with pytest.raises(InputError, match="do not find each other"):
        join()
    said = f"rank 0 of 2 waits for the others at 127.0.0.1:{port}, 0 minutes at most"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("words", ["--prompt Hello$RANK", "--prompt x --top-k 1$RANK"])
def test_ranks_with_different_options_do_not_decode(golden, words):
    one = f"exec {sys.executable} generate.py --checkpoint {golden} --no-compile {words}"
    run = subprocess.run(
        [*LAUNCH, "--no-python", "bash", "-c", one], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert run.returncode and not run.stdout
    assert ours(run.stderr) == ["error: 2 ranks with different options, prompts or questions (rank 1 has not"
                                " those of rank 0): start all with one command"]


def test_ranks_that_differ_do_not_decode():
    class Unlike(Ranks):
        def every(self, x):
            return x[None] + torch.arange(2)

    with pytest.raises(InputError, match=r"2 ranks that differ: .*avx2, 1 threads"):
        Unlike(0, 2, "").agree("avx2, 1 threads", "cpu")
