"""In CI a skip that is not expected on the machine fails the run; elsewhere it is a skip."""
import os
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.skips import expected

TESTS = """
import pytest

@pytest.mark.skip(reason="the files of Qwen3 cannot be had here (TimeoutError)")
def test_network(): pass

def test_passes(): pass

@pytest.mark.xfail
def test_expected_to_fail(): assert False
"""
MARKED = """
@pytest.mark.skipif(True, reason="run `make fetch` first")
def test_marked(): pass
"""
INSIDE = """
def test_inside(): pytest.skip("no time")
"""
MODULE = """
pytest.importorskip("no_such_package")
"""


def run(folder, tests: str, ci: str) -> tuple[int, str]:
    """The exit status of pytest on these tests, and its last line."""
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder]
    command += ["-p", "helpers.skips", "-p", "no:cacheprovider", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "CI": ci, "PYTEST_ADDOPTS": ""}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("tests, ci, status, words", [
    (TESTS, "true", 0, "1 passed, 1 skipped, 1 xfailed"),
    (TESTS + MARKED + INSIDE, "true", 1, "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error"),
    (TESTS + MODULE, "true", 2, "1 error"),
    (TESTS + MARKED + INSIDE, "false", 0, "1 passed, 3 skipped, 1 xfailed"),
    (TESTS + MODULE, "", 5, "1 skipped"),
], ids=["expected", "not expected", "a module", "not in CI", "a module, not in CI"])
def test_unexpected_skips_fail(tmp_path, tests, ci, status, words):
    found, last = run(tmp_path, tests, ci)
    assert found == status and last.startswith(words), last


def test_what_is_expected_depends_on_the_machine(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("helpers.skips.X86", True)
    assert not expected("Triton is not installed")
    monkeypatch.setattr("helpers.skips.X86", False)
    assert expected("Triton is not installed") and expected("names an x86 processor")
    monkeypatch.setattr("helpers.skips.no_gpu", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "qemu-aarch64" else name)
    assert expected("aarch64 needs a compiler and an emulator") and not expected("clang++ is not installed")
    assert not expected("the demo checkpoint is not there")
