"""The kernels without PyTorch, by the program in `driver/`: every instruction set, with both compilers.

aarch64's run in an emulator, AMX' with tiles in software.
"""
import copy
import functools
import os
import platform
import shutil
import subprocess

import pytest
import torch
from helpers import ROOT
from helpers.launching import run

from kernels import build, cpu, isa
from kernels.packed import pack, pack_scale
from kernels.quantized import pack_nibbles

CROSS = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64", "-cpu", "max")
DRIVER = ROOT / "tests/kernels/driver"
NATIVE = os.environ.get("CXX") or "g++"
# With the compiler in use, test_products.py and test_attention.py run this processor's other sets.
CASES = dict.fromkeys([(NATIVE, isa.available()[0]), *(("clang++", name) for name in isa.available())])
# neonbf16 has no instruction that neoni8mm has not, and what it does without it neondot does, too.
CASES |= dict.fromkeys((CROSS, name) for name in isa.SETS if name.startswith("neon") and name != "neonbf16")


def same_packing(printed: str, kernels) -> bool:
    """Whether the driver has packed its numbers as kernels/packed.py packs the same ones."""
    found = dict(line.split(" ", 1) for line in printed.splitlines())
    backend = copy.copy(kernels)
    backend.layout = cpu.Layout(*map(int, found.pop("layout").split()))
    values = (torch.arange(74 * 8) * 7 % 16 - 8).to(torch.int8).view(74, 8)
    stored = {"int8": values, "w8a8": values, "int4": pack_nibbles(values), "w4a8": pack_nibbles(values)}

    def packed(mode: str, gated: bool = False) -> torch.Tensor:
        return pack(backend, stored[mode], mode, torch.bfloat16, gated)

    expected = {
        "pack": packed("int8"), "pack_bytes": packed("w8a8"), "pack_int4": packed("int4"),
        "pack_w4a8": packed("w4a8"), "pack_scale": pack_scale(backend, values), "gated": packed("int8", True),
        "gated_scale": pack_scale(backend, values, True), "gated_int4": packed("int4", True),
    }
    return found == {name: packed.numpy().tobytes().hex() for name, packed in expected.items()}


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """A folder for what `compile_driver` makes: each once."""
    return tmp_path_factory.mktemp("objects")


@functools.cache
def compile_driver(objects, compiler, *flags):
    """The program of the driver, which no instruction set changes, and the kernels, compiled with `flags`."""
    kernels = [path for path in build.sources() if path.suffix == ".cpp" and path.name != "operators.cpp"]
    main, source = objects / f"{compiler}.o", DRIVER / "main.cpp"
    if not main.exists():
        command = [compiler, "-O1", "-std=c++20", f"-I{build.SOURCE}", "-c", source, "-o", main]
        run(*command)
    driver = objects / f"driver{len(list(objects.iterdir()))}"
    run(compiler, *build.FLAGS, *flags, *kernels, main, "-o", driver)
    return driver


@pytest.mark.dear
@pytest.mark.parametrize("compiler, name", CASES, ids=map("-".join, CASES))
def test_kernels_alone(compiler, name, objects, kernels):
    """Every kernel against double precision, and its rows' independence, with this compiler."""
    if compiler == CROSS and not (shutil.which(CROSS) and shutil.which(EMULATOR[0])):
        pytest.skip(f"aarch64 needs {CROSS} and {EMULATOR[0]}")
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    static, emulator = (("-static",), EMULATOR) if compiler == CROSS else ((), ())
    command = (*emulator, compile_driver(objects, compiler, *isa.SETS[name].flags, *static))
    rows = ["40"] if name == "amx" else []
    run(*command, *rows)
    assert same_packing(run(*command, "packing"), kernels)


@pytest.mark.dear
def test_tiles_in_software(objects):
    """The loops for AMX, its instructions replaced: right, row-invariant, exact where x is in bytes.

    On a processor that has them, they give the same bits.
    """
    if "avx512bf16" not in isa.available():
        pytest.skip("tiles in software need AVX512-BF16")
    # Less optimised, which compiles sooner: nobody runs this.
    software = "-O1", *isa.SETS["avx512bf16"].flags, f"-I{DRIVER}", '-DTILES="software_tiles.h"'
    tiles = compile_driver(objects, NATIVE, *software)
    run(tiles, "40")
    others = ["avx512vnni", *(["amx"] if "amx" in isa.available() else [])]
    drivers = tiles, *(compile_driver(objects, NATIVE, *isa.SETS[name].flags) for name in others)
    rounded = [subprocess.run([d, "rounded"], capture_output=True, timeout=60, check=True) for d in drivers]
    assert len({r.stdout for r in rounded}) == 1 and rounded[0].stdout


@pytest.mark.dear
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 processor")
@pytest.mark.parametrize("compiler", dict.fromkeys((NATIVE, "clang++")))
def test_amx_compiles(compiler, tmp_path):
    """The compiler and its assembler take the instructions themselves, sources and sums in their order."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    flags = *build.FLAGS, *isa.SETS["amx"].flags, "-save-temps=obj"
    command = [compiler, *flags, "-c", build.SOURCE / "bf16.cpp", "-o", tmp_path / "bf16.o"]
    run(*command)
    assembly = (tmp_path / "bf16.s").read_text().split("\n")
    found = {" ".join(line.split()) for line in assembly}
    assert {"tdpbf16ps %tmm7, %tmm5, %tmm3", "tdpbssd %tmm6, %tmm4, %tmm0", "tilerelease"} <= found
