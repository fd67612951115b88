"""What gpu.sh runs, on a CPU, as far as that goes."""
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import bench
import gpu_attention
import probe
import profiled
import pytest
import sanitize
import torch
from helpers import ROOT
from shapes import SHAPES

ON_CPU = ["--shape", "tiny", "--device", "cpu", "--threads", "1"]
ATTENTION = [*ON_CPU, "--rows", "3", "--context", "40"]


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    """No time is spent on the memory's bandwidth, nor on copies of weights that fill it."""
    monkeypatch.setattr(bench, "memory_rates", lambda device: {"copy": 1e10, "read": 1e10})
    monkeypatch.setattr(probe, "COPIES_OF", 2**20)


def test_probe(results, capsys):
    assert probe.main([*ON_CPU, "--rows", "1", "2"]) == 0
    record = json.loads((results / "probe.json").read_text())
    assert record["products"].keys() == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in record["products"].values())
    assert record["about"]["torch"] and "| lm_head |" in capsys.readouterr().out
    assert probe.main(["--shape", "huge", "--device", "cpu"]) == 1
    assert "error: --shape huge: unknown" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.slow
def test_attention(results, capsys):
    """Every way that runs here; our kernel says why it does not."""
    assert gpu_attention.main(ATTENTION) == 0
    (row,) = json.loads((results / "gpu-attention.json").read_text())["rows"]
    assert row["masked"] > 0 and row["flex"] > 0 and "ours" not in row
    assert "ours, 3 rows, context 40: left out (our kernels do not run here)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_attention_in_the_interpreter(tmp_path):
    """Our kernel, with the queries, keys and tree that the benchmark gives it. Results go to OUT."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OUT": str(tmp_path / "out")}
    few = "import bench, gpu_attention as it, sys; bench.memory_rates = lambda _: {'read': 1e10};"
    few += "it.LAYERS = 2; it.Case.flex = None; sys.exit(it.main(sys.argv[1:]))"
    command = [sys.executable, "-c", few, *ATTENTION]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "out" / "gpu-attention.json").read_text())["rows"]
    assert row["ours"] > 0 and row["masked"] > 0 and row["share"] > 0
    assert row["fp8"] > 0 and row["fp8_share"] > 0


def test_the_ways_attend_to_the_same_slots():
    """The mask of the others is the committed prefix and the tree, as our kernel sees it."""
    case = gpu_attention.Case(SHAPES["tiny"][0], 3, 40, torch.float32, "cpu")
    assert case.visible.shape == (1, 1, 6, 43) and case.visible[..., :40].all()
    assert torch.equal(case.visible[0, 0, :, 40:], case.local[0].repeat(2, 1))


def kernel(start, end, name="gemm"):
    return profiled.Kernel(start, end, name)


def test_split_of_a_profile(capsys):
    """Two marks tell draft, verify and rest apart; plain decoding has one. Without them all is unknown."""
    mark = "lshift_kernel"
    kernels = [kernel(0, 400), kernel(500, 510, mark), kernel(510, 2000), kernel(2500, 2510, mark)]
    kernels.append(kernel(2600, 3000))
    assert profiled.split(kernels, 8) == {"draft": 0.5, "verify": 2.0, "rest": 0.5}
    assert profiled.split([kernel(0, 900), kernel(1000, 1001, mark), kernel(1100, 1200)], 1) == {
        "verify": 1.0, "rest": 0.2
    }
    assert capsys.readouterr().err == ""
    assert profiled.split([kernel(0, 900)], 8) == {}
    assert "draft, verify and rest: unknown, 0 marks in the profile of 8 rows" in capsys.readouterr().err


def test_a_profile_without_kernels(capsys):
    """As where CUPTI may not be used."""
    assert profiled.profile_step(lambda: torch.zeros(3) + 1, 8) == {}
    assert "the profiler shows no kernels" in capsys.readouterr().err


def test_without_compute_sanitizer(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert sanitize.main([]) == 0
    assert "compute-sanitizer is not installed: left out" in capsys.readouterr().err
