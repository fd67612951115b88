"""A machine that cannot have our kernels: one line, and the text of PyTorch alone."""
from helpers.decoding import load

from kernels import build, cpu

TREE = {"tree": "8,2,4"}


def test_one_line_and_the_text_of_pytorch(golden, monkeypatch, tmp_path):
    """Its compiler is too old: it has a version, and fails."""
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'error: unknown -std=c++20' >&2; exit 1; }\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(cpu.CpuStep, "loaded", {})
    lines, dtype = [], "fp32"
    model = load(golden, "eagle3", dtype=dtype, say=lines.append, **TREE)
    text = model.generate("Hello", max_new_tokens=24)
    (line,) = (line for line in lines if not line.startswith("compiling the kernels for "))
    assert "(error: unknown -std=c++20); set another CXX" in line
    assert line.endswith(". Until then PyTorch decodes alone, which is slower")
    same = load(golden, "eagle3", dtype=dtype, compile=False, **TREE).generate("Hello", max_new_tokens=24)
    assert text.ids == same.ids and text.accept_lengths == same.accept_lengths and text.tau > 1
