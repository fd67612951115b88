"""Text that actors of Ray write is that of one process. Needs the package ray[data]."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.training import options

import train


def test_without_ray_one_line_says_so(golden, prompt_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    assert train.main(options(golden, prompt_file, tmp_path, queue="ray")) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--queue ray: the package ray is not installed; pip install" in said
    assert not list(tmp_path.iterdir())


def actors() -> list[int]:
    """The processes of Ray that write text here."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::") and b"Writer" in title:
            found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_actors_write_what_one_process_does(golden, prompt_file, tmp_path):
    """Also where one of them is killed."""
    pytest.importorskip("ray.data")
    run = {"synthesize": 4, "decode-batch": 1}
    one = [*options(golden, prompt_file, tmp_path / "one", **run), "--collect-only"]
    assert train.main(one) == 0
    two = [*options(golden, prompt_file, tmp_path / "two", **run, queue="ray", actors=2), "--collect-only"]
    command = [sys.executable, "train.py", *two]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    data, limit = tmp_path / "two" / "work" / "data", time.time() + 200
    while not list(data.glob("*.answers")):
        assert process.poll() is None and time.time() < limit, process.communicate()[1]
        time.sleep(0.01)
    os.kill(actors()[0], signal.SIGKILL)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 0, said
    folders = [tmp_path / name / "work" / "data" for name in ("one", "two")]
    first, second = ({path.name: path.read_text() for path in folder.iterdir()} for folder in folders)
    assert first == second and len(first) == 3
