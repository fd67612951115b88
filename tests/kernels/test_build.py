"""Building, loading and choosing kernels; failures are one-line messages."""
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.decoding import load

from common.errors import InputError
from engine.step import TORCH_BACKEND
from engine.target import Runtime
from kernels import build, choose, cpu, isa
from kernels.gpu import device as gpu_device
from tree import TreeShape


@pytest.fixture(scope="module")
def built():
    """A library compiled for this machine."""
    return build.build_library(isa.choose(), lambda line: None)


@pytest.fixture
def cached(built, tmp_path, monkeypatch):
    """The same library in an empty cache folder."""
    monkeypatch.setattr(build, "CACHE", tmp_path)
    return Path(shutil.copy(built, tmp_path))


@pytest.mark.kernels
def test_cached_library_needs_no_compiler(cached, monkeypatch):
    monkeypatch.setenv("CXX", "no-such compiler")
    assert build.build_library(isa.choose(), pytest.fail) == cached
    cached.unlink()
    with pytest.raises(build.NoKernels, match="the kernels need no-such; install it"):
        build.build_library(isa.choose(), pytest.fail)


def test_libraries_of_other_users_are_not_loaded(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "CACHE", tmp_path / "file" / "kernels")  # cannot be created
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"eagle-kernels-{os.getuid()}"
    assert build.writable_folder(build.CACHE) == folder and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    (tmp_path / f"eagle-kernels-{os.getuid()}").mkdir()
    with pytest.raises(InputError, match="belongs to another user"):
        build.writable_folder(build.CACHE)


def test_failed_build_falls_back_to_pytorch(golden, monkeypatch, tmp_path):
    """The compiler prints its version, but does not support C++20."""
    old = tmp_path / "old-g++"
    old.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'error: unknown -std=c++20' >&2; exit 1; }\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(cpu.CpuBackend, "loaded", {})
    lines, options = [], {"dtype": "fp32", "tree": "8,2,4"}
    model = load(golden, "eagle3", log=lines.append, **options)
    text = model.generate("Hello", max_new_tokens=24)
    (line,) = (line for line in lines if not line.startswith("compiling the kernels for "))
    assert "(error: unknown -std=c++20); set another CXX" in line
    assert line.endswith(". Using PyTorch without our kernels, which is slower")
    eager = load(golden, "eagle3", compile=False, **options).generate("Hello", max_new_tokens=24)
    assert text.ids == eager.ids and text.accept_lengths == eager.accept_lengths and text.tau > 1


# -- choice of kernels on simulated GPUs; a log line tells what is unsupported -------------------------------


GPU = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch):
    """A function: simulate a GPU of this compute capability; `multiply` replaces `torch._scaled_mm`."""
    def pretend(capability, multiply):
        monkeypatch.setattr(gpu_device, "FP8_DEVICES", set())
        monkeypatch.setattr(gpu_device, "HAS_TRITON", True)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch, "_scaled_mm", multiply)
        for name in ("zeros", "ones"):
            make = getattr(torch, name)
            monkeypatch.setattr(torch, name, lambda *size, device, make=make: make(*size))

    return pretend


def unsupported(*args, **options):
    raise RuntimeError("NOT_SUPPORTED\nmore")


@pytest.mark.parametrize("capability, multiply, has_fp8, expected_lines", (
    ((8, 9), lambda *a, **o: None, True, []),
    ((8, 9), unsupported, False, ["fp8 matmuls fall back to float32 without tensor cores (NOT_SUPPORTED)"]),
    ((8, 6), unsupported, False, []),
    ((7, 5), unsupported, False, [
        "using PyTorch's kernels: ours need compute capability 8.0 and Triton"]),
))
def test_gpu_capabilities_are_detected(gpu, capability, multiply, has_fp8, expected_lines):
    lines = []
    gpu(capability, multiply)
    chosen = choose.choose_backend(GPU, kernels=capability < (8, 0), log=lines.append)
    assert chosen is TORCH_BACKEND and lines == expected_lines and (GPU in gpu_device.FP8_DEVICES) == has_fp8
    assert gpu_device.runs_kernels(GPU) == (capability >= (8, 0))


@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_cublas_reduces_in_float32(dtype):
    flag = f"allow_{dtype}_reduced_precision_reduction"
    setattr(torch.backends.cuda.matmul, flag, True)
    Runtime(device="cpu", compile=False).prepare()
    assert not getattr(torch.backends.cuda.matmul, flag)


def test_default_trees_on_gpus_shrink_with_the_batch():
    """Small GPUs are compute-bound from about 70 tokens in bf16, so the paper's tree could be slower than
    plain decoding.
    """
    trees = [TORCH_BACKEND.default_tree(torch.device("cuda"), False, batch) for batch in (1, 12, 16, 24, 64)]
    assert trees == [TreeShape(*s) for s in ((16, 4, 5), (16, 4, 5), (12, 3, 4), (8, 2, 4), (4, 2, 2))]
