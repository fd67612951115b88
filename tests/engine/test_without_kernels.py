"""A machine that cannot have our kernels: one line, and the text of PyTorch alone."""
import pytest
from helpers.decoding import load

from kernels import build, cpu

TREE = {"tree": "8,2,4"}


def failing(error: str):
    """Makes a compiler that has a version and no more."""
    def write(folder) -> str:
        script = folder / "bad-g++"
        script.write_text(f"#!/bin/sh\n[ $1 = --version ] || {{ echo 'error: {error}' >&2; exit 1; }}\n")
        script.chmod(0o755)
        return str(script)

    return write


MACHINES = {  # what $CXX is, and what is said about it
    "no compiler": (lambda folder: "no-such", "no C++ compiler: the kernels need no-such; install it or set"),
    "too old": (failing("unknown -std=c++20"), "(error: unknown -std=c++20); set another CXX"),
}


@pytest.fixture(params=MACHINES)
def words(request, monkeypatch, tmp_path) -> str:
    """The kernels cannot be compiled; what is said about it."""
    compiler, words = MACHINES[request.param]
    monkeypatch.setenv("CXX", compiler(tmp_path))
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(cpu.CpuBackend, "loaded", {})
    return words


def said(lines: list[str]) -> list[str]:
    """What was said but that compiling has begun."""
    return [line for line in lines if not line.startswith("compiling the kernels for ")]


def test_one_line_and_the_text_of_pytorch(golden, words):
    lines, dtype = [], "fp32"
    model = load(golden, "eagle3", dtype=dtype, say=lines.append, **TREE)
    text = model.generate("Hello", max_new_tokens=24)
    (line,) = said(lines)
    assert words in line and line.endswith(". Until then PyTorch decodes alone, which is slower")
    same = load(golden, "eagle3", dtype=dtype, compile=False, **TREE).generate("Hello", max_new_tokens=24)
    assert text.ids == same.ids and text.accept_lengths == same.accept_lengths and text.tau > 1
