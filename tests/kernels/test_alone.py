"""The kernels without PyTorch: the program in `driver/` checks them, aarch64's in an emulator."""
import os
import shutil
import subprocess

import pytest
import torch
from helpers import ROOT

from kernels import build, cpu, isa

CROSS = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64", "-cpu", "max")
NATIVE = os.environ.get("CXX", "g++")
# The other instruction sets of this processor are run with the compiler in use by test_cpu_kernels.py.
CASES = dict.fromkeys([(NATIVE, isa.available()[0]), *(("clang++", name) for name in isa.available())])
CASES |= dict.fromkeys((CROSS, name) for name in isa.SETS if name.startswith(("neon", "portable")))


def same_packing(printed: str, monkeypatch) -> bool:
    """Whether the driver has packed its numbers as kernels/cpu.py packs the same ones."""
    cpu.load_kernels()
    found = dict(line.split(" ", 1) for line in printed.splitlines())
    layout = cpu.Layout(*map(int, found.pop("layout").split()))
    monkeypatch.setattr(cpu, "_layout", layout, raising=False)
    values = (torch.arange(74 * 8) * 7 % 16 - 8).to(torch.int8).view(74, 8)
    expected = {
        "pack": cpu.pack(values, layout.bf16_per_word), "pack_bytes": cpu.pack_bytes(values),
        "pack_int4": cpu.pack_int4(values, layout.bf16_per_word), "pack_w4a8": cpu.pack_w4a8(values),
        "pack_scale": cpu.pack_scale(values), "interleave": cpu.interleave(values),
    }
    return found == {name: packed.numpy().tobytes().hex() for name, packed in expected.items()}


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """A folder for the driver itself, which no instruction set changes, compiled once by each compiler."""
    return tmp_path_factory.mktemp("objects")


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("compiler, name", CASES, ids=map("-".join, CASES))
def test_kernels_alone(compiler, name, objects, tmp_path, monkeypatch):
    """Every kernel against double precision, and its rows' independence, with this compiler."""
    if compiler == CROSS and not (shutil.which(CROSS) and shutil.which(EMULATOR[0])):
        pytest.skip(f"aarch64 needs {CROSS} and {EMULATOR[0]}")
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    driver, static = tmp_path / "driver", ("-static",) if compiler == CROSS else ()
    kernels = [path for path in build.sources() if path.suffix == ".cpp" and path.name != "operators.cpp"]
    main, source = objects / f"{compiler}.o", ROOT / "tests/kernels/driver/main.cpp"
    if not main.exists():
        command = [compiler, "-O1", "-std=c++20", f"-I{build.SOURCE}", "-c", source, "-o", main]
        subprocess.run(command, check=True, timeout=300)
    command = [compiler, *build.FLAGS, *isa.SETS[name].flags, *static, *kernels, main, "-o", driver]
    subprocess.run(command, check=True, timeout=300)
    command = (*(EMULATOR if compiler == CROSS else ()), driver)
    checked = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    packed = subprocess.run([*command, "packing"], capture_output=True, text=True, timeout=60, check=True)
    assert same_packing(packed.stdout, monkeypatch)
