"""generate.py on several ranks, as a user starts it: one voice, the text of one process, one error."""
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.launching import ONE_THREAD, TORCHRUN

import generate
from kernels.tp import Ranks

EAGLE = ("--speculate", "eagle3", "--tree", "8,2,3", "--prompt", "Hello")


def start(*args) -> subprocess.Popen:
    command = *TORCHRUN, "--standalone", "--nproc-per-node", "2", *map(str, args)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=ONE_THREAD, **pipes)


def ours(err: str) -> list[str]:
    """The lines of generate.py on stderr: torchrun adds a report of its own, and warnings."""
    known = "error: ", "loaded ", "ready ", "2 ranks: ", "interrupted"
    return [line for line in err.splitlines() if line.startswith(known)]


@pytest.mark.slow
def test_two_ranks_speak_with_one_voice(golden, capsys, tmp_path):
    """With the text, the trees and the trace of one process; a grammar guides both, the head is dealt."""
    args = (
        "--checkpoint", golden, *EAGLE, "--max-new-tokens", 24, "--no-compile", "--temperature", 0.8,
        "--json", "--json-object",
    )
    assert generate.main([*map(str, args), "--trace", str(tmp_path / "one")]) == 0
    alone = json.loads(capsys.readouterr().out)
    run = start("generate.py", *args, "--compare", "--shard-head", "--trace", tmp_path / "two")
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err[-3000:]
    (row,), lines = map(json.loads, out.splitlines()), ours(err)
    assert row["ranks"] == row["plain"]["ranks"] == 2 and alone["ranks"] == 1
    assert row["output_ids"] == alone["output_ids"] and row["accept_lengths"] == alone["accept_lengths"]
    assert row["text"].startswith("{") and row["equal"] is True
    assert (tmp_path / "two").stat().st_size == (tmp_path / "one").stat().st_size
    assert [line.split()[0] for line in lines] == ["2", "loaded", "ready"]
    assert "caches 256 numbers a token" in lines[0]  # 8 layers, a key and a value of 16 of one head


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("kv", [pytest.param("auto", marks=pytest.mark.dear), "int8"])
def test_drafted_text_is_plain_text_on_the_kernels_too(golden, kv):
    """In bfloat16: a row's sum over the ranks does not depend on the rows beside it. Greedily with one cache,
    at a temperature with the other: the cache does not depend on how tokens are chosen.
    """
    args = "--checkpoint", golden, *EAGLE, "--max-new-tokens", 60, "--dtype", "bf16", "--kv", kv
    more = {"auto": (), "int8": ("--temperature", 1, "--seed", 4)}[kv]
    out, err = start("generate.py", *args, *more, "--json", "--compare").communicate(timeout=240)
    (row,) = map(json.loads, out.splitlines())
    assert row["equal"] is True and row["tau"] > 1.2 and row["tokens"] == 60, err[-3000:]


@pytest.mark.parametrize("checkpoint, args, words", [
    ("golden", ("--interactive",), "--num-samples, --raw and torchrun"),
    ("golden", ("--prompt", "Hello", "--autotune"), "--autotune: ranks would choose different kernels"),
    ("source", ("--prompt-ids", "1,2"), "not converted yet; run python convert_checkpoint.py"),
], ids=str)
def test_what_ranks_refuse(golden, capsys, monkeypatch, checkpoint, args, words):
    """Each of them by itself, so one does here, which takes the command of all as the same."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr("llm.joined", lambda *_: contextlib.nullcontext(Ranks(0, 2, "")))
    monkeypatch.setattr(Ranks, "agree", lambda *_: None)
    folder = {"golden": golden, "source": ROOT / "tests" / "golden" / "target"}[checkpoint]
    assert generate.main(["--checkpoint", str(folder), *args, "--no-compile"]) == 1
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert not out and words in line


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
def test_when_one_dies_all_end_within_seconds(golden):
    """A rank is killed while they decode: the other one reports it in one line, and nobody is left."""
    prompts = [x for i in range(40) for x in ("--prompt", f"Hello {i}")]
    options = "--batch-size", 1, "--max-new-tokens", 900, "--no-compile"
    run, said = start("generate.py", "--checkpoint", golden, *prompts, *options), ""
    while "ready" not in said:
        said += run.stderr.readline()
        assert run.poll() is None, said
    time.sleep(0.5)
    pids = [int(x) for x in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    numbers = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in pids}
    began, lost = time.monotonic(), next(pid for pid in pids if "RANK=1" in numbers[pid])
    os.kill(lost, signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert len(pids) == 2 and time.monotonic() - began < 20 and run.returncode != 0
    (line,) = (line for line in ours(err) if line.startswith("error: "))
    assert line.startswith("error: rank 0 of 2 ") and ("has lost another one" in line or "is ended: " in line)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
