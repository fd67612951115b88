"""What gpu.sh runs, on a CPU, as far as that goes."""
import json

import bench
import gpu_attention
import probe
import pytest
import sanitize


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "memory_rates", lambda device: {"copy": 1e10, "read": 1e10})
    return tmp_path


def test_probe(results, capsys):
    assert probe.main(["--shape", "tiny", "--rows", "1", "2", "--device", "cpu"]) == 0
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
    options = ["--shape", "tiny", "--rows", "3", "--context", "40", "--device", "cpu"]
    assert gpu_attention.main(options) == 0
    (row,) = json.loads((results / "gpu-attention.json").read_text())["rows"]
    assert row["masked"] > 0 and "ours" not in row
    assert "ours, 3 rows, context 40: left out (our kernels do not run here)" in capsys.readouterr().err


def test_without_compute_sanitizer(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert sanitize.main([]) == 0
    assert "compute-sanitizer is not installed: left out" in capsys.readouterr().err
