"""generate.py on several ranks, as a user starts it: one voice, the text of one process, one error."""
import json
import subprocess

import pytest
from helpers import ROOT
from helpers.launching import ONE_THREAD, TORCHRUN

import generate

EAGLE = ("--speculate", "eagle3", "--tree", "8,2,3", "--prompt", "Hello")


def on_two_ranks(*args) -> tuple[dict, list[str]]:
    """Run generate.py --json -> its row, and its lines on stderr: torchrun adds a report, and warnings."""
    command = *TORCHRUN, "--standalone", "--nproc-per-node", "2", "generate.py", *map(str, args)
    run = subprocess.run(command, cwd=ROOT, env=ONE_THREAD, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, f"{' '.join(command)}: {run.stderr[-3000:]}"
    (row,), known = map(json.loads, run.stdout.splitlines()), ("error: ", "loaded ", "ready ", "2 ranks: ")
    return row, [line for line in run.stderr.splitlines() if line.startswith(known)]


@pytest.mark.slow
def test_two_ranks_speak_with_one_voice(golden, capsys, tmp_path):
    """With the text, the trees and the trace of one process; a grammar guides both, the head is dealt."""
    args = (
        "--checkpoint", golden, *EAGLE, "--max-new-tokens", 24, "--no-compile", "--temperature", 0.8,
        "--json", "--json-object",
    )
    assert generate.main([*map(str, args), "--trace", str(tmp_path / "one")]) == 0
    alone = json.loads(capsys.readouterr().out)
    row, lines = on_two_ranks(*args, "--compare", "--shard-head", "--trace", tmp_path / "two")
    assert row["ranks"] == row["plain"]["ranks"] == 2 and alone["ranks"] == 1
    assert row["output_ids"] == alone["output_ids"] and row["accept_lengths"] == alone["accept_lengths"]
    assert row["text"].startswith("{") and row["equal"] is True
    assert (tmp_path / "two").stat().st_size == (tmp_path / "one").stat().st_size
    assert [line.split()[0] for line in lines] == ["2", "loaded", "ready"]
    assert "caches 256 values a token" in lines[0]  # 8 layers, a key and a value of 16 of one head


@pytest.mark.slow
@pytest.mark.kernels
def test_drafted_text_is_plain_text_on_the_kernels_too(golden):
    """In bfloat16: a row's sum over the ranks does not depend on the rows beside it."""
    args = "--checkpoint", golden, *EAGLE, "--max-new-tokens", 30, "--dtype", "bf16", "--kv", "int8"
    args += "--temperature", 1, "--seed", 4, "--json", "--compare"
    row, lines = on_two_ranks(*args)
    assert row["equal"] is True and row["tau"] > 1.2 and row["tokens"] == 30, lines
