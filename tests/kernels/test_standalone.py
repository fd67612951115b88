"""The CPU kernels without PyTorch, called by the program in `driver/`: other compilers and processors.

aarch64 runs in an emulator, AMX with software tiles. The program reads operands packed here, and checks that
results are batch-invariant and independent of the number of threads.
"""
import copy
import os
import shutil
import subprocess

import pytest
import torch
from helpers import ROOT
from helpers.kernels import DTYPES, attention_case, check_attention, close, draws, product, random_layer, same
from helpers.launching import run

from kernels import build, isa
from kernels.cpu import CpuBackend, Layout
from kernels.cpu_cache import head_norms
from kernels.packed import FLOAT32, SAME_DTYPE, PackedLinear

CROSS = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64", "-cpu", "max")
DRIVER = ROOT / "tests/kernels/driver"
NATIVE = os.environ.get("CXX") or "g++"
# The default compiler and this processor's sets: test_products.py and test_attention.py.
CASES = [("clang++", name) for name in isa.available()]
CASES += [(CROSS, name) for name in isa.SETS if name.startswith("neon")]
FORMATS = None, "int8", "mxfp4", "w8a8", "w4a8", "w6a8"  # in the order of csrc/kernels.h: Weight::Format
# Kind of `kernels.stored` -> format.
STORED = {"q4-32-row-min": "w4a8", "q4-32-0": "w4a8", "q6-16-256": "w6a8", "q8-32-0-min": "w8a8"}


class Driver:
    """A compiled driver. backend: packs weights in the driver's layout."""

    def __init__(self, folder, compiler: str, *flags: str):
        kernels = [path for path in build.sources() if path.suffix == ".cpp" and path.name != "operators.cpp"]
        cross = compiler == CROSS
        self.command, self.path = [*EMULATOR * cross, folder / "driver"], folder / "records"
        arguments = *kernels, f"-I{build.SOURCE}", DRIVER / "driver.cpp", *["-static"] * cross
        run(compiler, *build.FLAGS, *flags, *arguments, "-o", self.command[-1])
        layout = [int(field) for field in run(*self.command).split()]
        self.backend = copy.copy(CpuBackend.load())
        self.backend.layout, self.blocks = Layout(*layout[:5]), layout[5:]

    def compute(self, *records: list) -> bytes:
        """Return the driver's output for records of integers, tensors and None."""
        with open(self.path, "wb") as file:
            for part in (part for record in records for part in record):
                if isinstance(part, int):
                    file.write(part.to_bytes(8, "little", signed=True))
                    continue
                raw = b"" if part is None else part.contiguous().view(torch.uint8).numpy().tobytes()
                file.write(len(raw).to_bytes(8, "little") + raw)
        result = subprocess.run([*self.command, self.path], capture_output=True, timeout=300)
        assert not result.returncode, f"{self.command}: {result.returncode} {result.stderr.decode()[-2000:]}"
        return result.stdout


def check_products(driver: Driver, rows: int) -> None:
    for dtype in DTYPES:
        for mode in (*FORMATS[:4], *STORED):
            least = 256 if "256" in str(mode) else 96
            odd = 100 if mode in (None, "w8a8") else 2 * least
            for activation, inputs in ((None, least), ("silu", least), (None, odd)):
                layer = random_layer(mode, inputs, 90, dtype)
                x, residual = draws(1)(rows, inputs, dtype=dtype), draws(2)(rows, 90, dtype=dtype)
                x[0, :64], residual = 0, residual[:, : 45 if activation else 90].contiguous()
                expected = product(layer, x, activation)
                packed = PackedLinear(driver.backend, layer, dtype, activation)
                numbers, scale, bias = packed.operands
                groups, records = scale.shape[1] if mode == "mxfp4" else 1, (0, 0, 1)
                if mode in STORED:  # as csrc/kernels.h: Records
                    groups, minima = inputs // layer.kind.group, layer.kind.minima
                    records = 2 if layer.kind.unit else 1, minima, groups // layer.kind.units(inputs)
                sizes = *numbers.shape[:2], groups, numbers[0].nbytes, *records, inputs, packed.columns, rows
                header = 0, int(dtype == torch.bfloat16), FORMATS.index(STORED.get(mode, mode)), *sizes
                whole = [*header, packed.mode, 0, numbers, scale, bias, x, residual]
                unrounded = [*header, SAME_DTYPE, FLOAT32, numbers, scale, bias, x, None]
                raw = bytearray(driver.compute(whole, *([] if activation else [unrounded])))
                found = torch.frombuffer(raw[: residual.nbytes], dtype=dtype).view_as(residual)
                close(found, expected + residual, dtype)
                if not activation:
                    found = torch.frombuffer(raw[residual.nbytes :], dtype=torch.float32).view_as(residual)
                    close(found, expected, torch.float32)
                    if mode in ("w8a8", *STORED):  # integer products: the same bits with all instruction sets
                        same(found, PackedLinear(CpuBackend.load(), layer, dtype).logits(x))


def check_attention_cases(driver: Driver) -> None:
    for dtype in DTYPES:
        for in_int8, shape in (
            (False, (2, 7, 6, 2, 64, 70)), (False, (1, 9, 6, 2, 64, 300, True, 130)),
            (False, (1, 17, 9, 3, 64, 129, True)), (True, (1, 5, 3, 1, 64, 140)),
            (True, (1, 12, 8, 2, 64, 300)), (True, (1, 33, 8, 1, 64, 260, False, 100)),
        ):
            attend(driver, in_int8, attention_case(dtype, *shape))


def attend(driver: Driver, in_int8: bool, case) -> None:
    block, qkv, k, v, shared = case
    B, S, kv_heads, hd = k.shape

    def record(heads, window, cos, sin, slots, visible, qkv, *others) -> list:
        sizes = B, qkv.shape[1], heads, kv_heads, hd, visible.shape[-1], window, int(in_int8)
        operands = cos, sin, slots, visible, qkv, *others
        return [1, int(qkv.dtype == torch.bfloat16), *sizes, *strides, *operands]

    norms = [x if x is None else x.float() for x in (*head_norms(block)[:2], block.sinks)]
    rows = block.num_heads, block.window, *shared.cos_sin(), shared.slots, shared.visible, qkv, *norms
    if in_int8:  # a first pass fills the cache
        sizes = [-(-S // driver.blocks[0]) * size for size in driver.blocks[1:]]
        strides = 0, driver.blocks[1], sizes[0], 0, driver.blocks[2], sizes[1]
        no_rotation = torch.ones(S, hd // 2)
        caches = [torch.zeros(kv_heads * size, dtype=torch.uint8) for size in sizes]
        alone = no_rotation, 0 * no_rotation, torch.arange(S), torch.eye(S).bool(), torch.cat((k, k, v), 2)
        records = record(kv_heads, 0, *alone, *[None] * 3, *caches), record(*rows, None, None)
    else:
        strides, caches = k.stride()[:3] * 2, [k, v]
        records = [record(*rows, k, v)]
    found = driver.compute(*records)
    end = len(found) - sum(x.nbytes for x in caches)
    found, kept = torch.frombuffer(bytearray(found[:end]), dtype=k.dtype), bytearray(found[end:])
    found = found[-B * qkv.shape[1] * block.num_heads * hd :].view(*qkv.shape[:2], -1)
    kept = None if in_int8 else torch.frombuffer(kept, dtype=k.dtype).view(2, *k.shape)
    check_attention(case, found, kept, driver.backend.layout.bytes_per_word == 4)


@pytest.mark.expensive
@pytest.mark.parametrize("compiler, name", CASES, ids=map("-".join, CASES))
def test_kernels_without_pytorch(compiler, name, tmp_path):
    """Matmuls and attention equal float64."""
    if not shutil.which(compiler) or (compiler == CROSS and not shutil.which(EMULATOR[0])):
        pytest.skip(f"{compiler} is not installed, or no {EMULATOR[0]}")
    driver = Driver(tmp_path, compiler, *isa.SETS[name].flags)
    check_products(driver, 13)
    check_attention_cases(driver)


@pytest.mark.expensive
def test_tiles_in_software(tmp_path):
    """The AMX loops with emulated instructions are correct, batch-invariant, and exact for int8 inputs."""
    if "avx512bf16" not in isa.available():
        pytest.skip("software tiles need AVX512-BF16")
    # -O1 compiles faster.
    flags = "-O1", *isa.SETS["avx512bf16"].flags, f"-I{DRIVER}", '-DTILES="software_tiles.h"'
    driver = Driver(tmp_path, NATIVE, *flags)
    check_products(driver, 40)
    check_attention_cases(driver)
