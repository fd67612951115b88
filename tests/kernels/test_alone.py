"""The kernels without PyTorch, by the program in `driver/`: other compilers and processors.

aarch64's run in an emulator, AMX' with tiles in software. The program reads operands that are packed here for
the instruction set, and checks that a row's bits depend on no other row and no thread.
"""
import copy
import os
import shutil
import subprocess

import pytest
import torch
from helpers import ROOT
from helpers.kernels import DTYPES, ERROR, Written, close, draws, round_heads, same
from helpers.launching import run

from kernels import build, isa
from kernels.cpu import CpuBackend, Layout
from kernels.packed import FLOAT32, GATES, SAME, PackedLinear
from kernels.quantized import QuantizedLinear
from model import ACTIVATIONS, Linear, ModelArgs, Pass, Transformer, inverse_frequencies

CROSS = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64", "-cpu", "max")
DRIVER = ROOT / "tests/kernels/driver"
NATIVE = os.environ.get("CXX") or "g++"
# With the compiler in use, test_products.py and test_attention.py run this processor's sets.
CASES = [("clang++", name) for name in isa.available()]
# neonbf16 has no instruction that neoni8mm has not, and what it does without it neondot does, too.
CASES += [(CROSS, name) for name in isa.SETS if name.startswith("neon") and name != "neonbf16"]
FORMATS = None, "int8", "int4", "mxfp4", "w8a8", "w4a8"  # as csrc/kernels.h: Weight::Format


class Driver:
    """A compiled driver. backend: a CPU backend whose weights are packed as this one reads them."""

    def __init__(self, folder, compiler: str, *flags: str):
        kernels = [path for path in build.sources() if path.suffix == ".cpp" and path.name != "operators.cpp"]
        cross = compiler == CROSS
        self.command, self.path = [*EMULATOR * cross, folder / "driver"], folder / "records"
        what = *kernels, f"-I{build.SOURCE}", DRIVER / "driver.cpp", *["-static"] * cross
        run(compiler, *build.FLAGS, *flags, *what, "-o", self.command[-1])
        numbers = [int(word) for word in run(*self.command).split()]
        self.backend = copy.copy(CpuBackend.load())
        self.backend.layout, self.blocks = Layout(*numbers[:5]), numbers[5:]

    def answers(self, *records: list) -> bytes:
        """Return what the driver computes of records: numbers, and tensors or None."""
        with open(self.path, "wb") as file:
            for part in (part for record in records for part in record):
                if isinstance(part, int):
                    file.write(part.to_bytes(8, "little", signed=True))
                    continue
                raw = b"" if part is None else part.contiguous().view(torch.uint8).numpy().tobytes()
                file.write(len(raw).to_bytes(8, "little") + raw)
        done = subprocess.run([*self.command, self.path], capture_output=True, timeout=300)
        assert not done.returncode, f"{self.command}: {done.returncode} {done.stderr.decode()[-2000:]}"
        return done.stdout


def weights(mode: str | None, gated: bool, dtype: torch.dtype, inputs: int):
    """Return a random layer of this format, for rows of these inputs, and its weight in float64."""
    draw = draws(inputs + gated)
    if mode is None:
        layer = Linear(inputs, 90).requires_grad_(False).to(dtype)
        layer.weight.data, layer.bias.data = draw(90, inputs, dtype=dtype), draw(90, dtype=dtype)
        return layer, layer.weight.double()
    if mode == "mxfp4":
        layer = QuantizedLinear(inputs, 90, True, mode, 32)
        layer.weight.data = draw(90, inputs // 2).mul(99).to(torch.int8).view(torch.uint8)
        layer.scale.data, layer.bias.data = draw(90, inputs // 32).mul(3).add(125).to(torch.uint8), draw(90)
    else:
        layer = QuantizedLinear.of(draw(90, inputs), mode, 32 if "4" in mode else 0, draw(90))
    return layer, layer.dequantize(torch.float64)


def check_products(driver: Driver, rows: int) -> None:
    for dtype in DTYPES:
        for mode in FORMATS:
            for gated, inputs in ((False, 96), (True, 96), (False, 100 if mode in (None, "w8a8") else 192)):
                layer, weight = weights(mode, gated, dtype, inputs)
                x = draws(1)(rows, inputs, dtype=dtype)
                x[0, :64] = 0
                onto = draws(2)(rows, 45 if gated else 90, dtype=dtype)
                read = layer.rounded(x.float()) if mode else x
                expected = read.double() @ weight.T + layer.bias.double()
                expected = ACTIVATIONS["silu"](*expected.chunk(2, -1)) if gated else expected
                packed = PackedLinear(driver.backend, layer, dtype, "silu" if gated else None)
                numbers, scale, bias = packed.operands
                groups = scale.shape[1] if mode in ("int4", "w4a8", "mxfp4") else 1
                sizes = *numbers.shape[:2], groups, numbers[0].nbytes, inputs, packed.columns, rows
                about = 0, int(dtype == torch.bfloat16), FORMATS.index(mode), *sizes
                whole = [*about, GATES["silu"] if gated else SAME, 0, numbers, scale, bias, x, onto]
                exact = [*about, SAME, FLOAT32, numbers, scale, bias, x, None]
                raw = driver.answers(whole, *([] if gated else [exact]))
                found = torch.frombuffer(bytearray(raw[: onto.nbytes]), dtype=dtype).view_as(onto)
                close(found, expected + onto, dtype)
                if not gated:
                    found = torch.frombuffer(bytearray(raw[onto.nbytes :]), dtype=torch.float32).view_as(onto)
                    close(found, expected, torch.float32)
                    if mode in ("w8a8", "w4a8"):  # sums are exact: the same bits on every instruction set
                        same(found, PackedLinear(CpuBackend.load(), layer, dtype).logits(x))


def check_attention(driver: Driver) -> None:
    for dtype in DTYPES:
        for case in (
            (2, 7, 6, 2, 64, 70, 0, False, False), (1, 9, 6, 2, 64, 300, 130, True, False),
            (1, 17, 9, 3, 64, 129, 0, True, False), (1, 5, 3, 1, 64, 140, 0, False, True),
            (1, 12, 8, 2, 64, 300, 0, False, True), (1, 33, 8, 1, 64, 260, 100, False, True),
        ):
            attention_case(driver, dtype, *case)


def attention_case(driver, dtype, B, T, heads, kv_heads, hd, n, window, more, in_bytes) -> None:
    """Compare attention with its definition. more: it has norms and sinks."""
    draw = draws(n)
    options = {"qk_norm": more, "sinks": more, "windows": (window,), "norm_eps": 1e-5}
    args = ModelArgs(8, 8, 8, 1, heads, kv_heads, hd, **options)
    block = Transformer(args).layers[0].to(dtype)
    for p in block.parameters():
        p.data = draw(*p.shape, dtype=p.dtype)
    qkv = draw(B, T, (heads + 2 * kv_heads) * hd, dtype=dtype)
    k, v = draw(B, n, kv_heads, hd, dtype=dtype), draw(B, n, kv_heads, hd, dtype=dtype)
    slots = torch.arange(n - T, n).expand(B, -1)
    visible = (torch.arange(n) <= slots[..., None]) & (draw(B, T, n) > -0.5)
    visible.scatter_(2, slots[..., None], True)
    shared = Pass(args, inverse_frequencies(args), slots, slots, visible)
    norms = [x.float() if x is not None else None for x in (*block.head_norms[:2], block.sinks)]

    def record(rows, heads, window, qkv, angles, slots, visible, norms, k, v) -> list:
        about = 1, int(dtype == torch.bfloat16), *rows, heads, kv_heads, hd, n, window, int(in_bytes)
        return [*about, *strides, *angles, slots, visible, qkv, *norms, k, v]

    rows, begin = (qkv, shared.angles(), slots, visible, norms), 0
    if in_bytes:  # a first pass fills the cache
        sizes = [-(-n // driver.blocks[0]) * size for size in driver.blocks[1:]]
        strides = 0, driver.blocks[1], sizes[0], 0, driver.blocks[2], sizes[1]
        straight = torch.ones(n, hd // 2), torch.zeros(n, hd // 2)
        caches = [torch.zeros(kv_heads * size, dtype=torch.uint8) for size in sizes]
        stored = torch.cat((k, k, v), 2)
        alone = stored, straight, torch.arange(n), torch.eye(n).bool(), (None,) * 3
        records = [record((1, n), kv_heads, 0, *alone, *caches)]
        records.append(record((1, T), heads, window, *rows, None, None))
        begin = n * kv_heads * hd * dtype.itemsize + sum(x.nbytes for x in caches)
    else:
        strides = (n * kv_heads * hd, kv_heads * hd, hd) * 2
        records = [record((B, T), heads, window, *rows, k, v)]
    raw = bytearray(driver.answers(*records)[begin:])
    size = B * T * heads * hd
    found = torch.frombuffer(raw, dtype=dtype)[:size].view(B, T, -1)
    theirs = Written(k.double(), v.double(), round_heads if in_bytes else lambda x: x)
    expected = theirs.attend(block.double(), qkv.double(), shared)
    coarse = 0.05 if driver.backend.layout.bytes_per_word == 4 else 0.012
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= (coarse if in_bytes else 2 * ERROR[dtype]), f"{dtype}, {n} slots: off by {error:.3g}"
    if not in_bytes:
        kept = torch.frombuffer(raw, dtype=dtype)[size:].view(2, B, n, kv_heads, hd)
        close(kept[0], theirs.k, dtype)
        same(kept[1].double(), theirs.v)


@pytest.mark.dear
@pytest.mark.parametrize("compiler, name", CASES, ids=map("-".join, CASES))
def test_kernels_alone(compiler, name, tmp_path):
    """Products and attention against float64."""
    if not shutil.which(compiler) or (compiler == CROSS and not shutil.which(EMULATOR[0])):
        pytest.skip(f"{compiler} is not installed, or no {EMULATOR[0]}")
    driver = Driver(tmp_path, compiler, *isa.SETS[name].flags)
    check_products(driver, 13)
    check_attention(driver)


@pytest.mark.dear
def test_tiles_in_software(tmp_path):
    """The loops for AMX, its instructions replaced: right, row-invariant, exact where x is in bytes."""
    if "avx512bf16" not in isa.available():
        pytest.skip("tiles in software need AVX512-BF16")
    # Less optimised, which compiles sooner: nobody runs this.
    flags = "-O1", *isa.SETS["avx512bf16"].flags, f"-I{DRIVER}", '-DTILES="software_tiles.h"'
    driver = Driver(tmp_path, NATIVE, *flags)
    check_products(driver, 40)
    check_attention(driver)
