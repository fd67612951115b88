"""make and pip, as far as they run without a network."""
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("prompt", ["plain", 'say "hi"', "it's $5 & `ls` \\ $(date)", ""])
def test_make_demo_keeps_what_a_shell_would_read(prompt, tmp_path):
    command = ["make", "-n", "demo", f"VENV={tmp_path}", f"PROMPT={prompt}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    (line,) = (line for line in printed.splitlines() if " generate.py " in line)
    words = shlex.split(line)
    assert words[words.index("--prompt") + 1] == prompt and words[-1] == "--compare"


def test_pip_install_brings_what_the_commands_need(tmp_path):
    """And nothing of ours: the commands run in the repository."""
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "requirements.txt", "common/__init__.py", "llm.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    code = "from setuptools.build_meta import *; print(build_wheel('.'))"
    pipes = {"capture_output": True, "text": True, "timeout": 120}
    made = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, **pipes)
    assert made.returncode == 0, made.stderr[-2000:]
    wheel = tmp_path / made.stdout.splitlines()[-1]
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    (info,) = (tmp_path / "wheel").iterdir()
    assert "Requires-Dist: torch==" in (info / "METADATA").read_text() and info.name.endswith(".dist-info")
