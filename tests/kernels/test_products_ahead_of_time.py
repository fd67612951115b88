"""Products with quantised weights compiled for GPUs that are not here: they fit, spill nothing, use the
tensor cores, and their assembler does what it says.
"""
import re
import struct
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from helpers.ahead_of_time import (
    SHARED,
    compile_for,
    dear,
    devices,
    overwritten_registers,
    unguarded_writes,
)

from kernels.gpu import products
from kernels.quantized import e2m1

BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
ROWS = (1, 17, 60, 130)  # one for each tile of rows
REGISTERS = 65536  # of a multiprocessor
# Bits and group of a weight.
WEIGHTS = {"int8": (8, 0)} | {f"int4/{group}": (4, group) for group in (32, 64, 128)}


@cache
def compiled(capability, dtype, kind, rows, choice, even=True, count="any i32"):
    bits, group = WEIGHTS[kind]
    tile = products.tile_rows(rows, dtype, bits)
    chosen = products.tiles(tile, dtype, bits)[choice]
    given = {
        "x": dtype, "weight": torch.int16, "scale": BF16 if group else F32,
        "bias": dtype, "onto": dtype, "out": dtype, "parts": F32, "arrived": I32, "M": count, "N": "i32",
        "K": "i32", "BITS": bits, "GROUP": group, "BIASED": False, "ADDED": True, "EVEN": even,
        "PRECISION": "ieee" if dtype == F32 else "tf32", "ROWS": tile, **chosen.kwargs,
    }
    made = compile_for(capability, products.product_kernel, given, chosen.num_warps, chosen.num_stages)
    return made, chosen


def choices():
    """(compute capability, kind of weights, rows, number of the tile) of products in bfloat16.

    On an H200 all that are tried, of int4 in groups of 64; elsewhere, and in other groups, the first.
    """
    found = {}
    for capability in (80, 90, 100):
        for kind, (bits, _) in WEIGHTS.items():
            for rows in ROWS:
                tile = products.tile_rows(rows, BF16, bits)
                whole = capability == 90 and kind in ("int8", "int4/64")
                for choice in range(len(products.tiles(tile, BF16, bits)) if whole else 1):
                    found.setdefault((capability, kind, tile, choice), (capability, kind, rows, choice))
    usual = (90, "int8", 60, 0), (90, "int4/64", 1, 0)
    return [case if case in usual else dear(case)[0] for case in found.values()]


@pytest.mark.slow
@pytest.mark.parametrize("capability, kind, rows, choice", choices())
def test_bfloat16(capability, kind, rows, choice):
    made, chosen = compiled(capability, BF16, kind, rows, choice)
    assert made.shared <= SHARED[capability] and made.spilled == 0 and made.on_tensor_cores
    assert not made.chained
    if capability == 90:
        assert "wgmma" in made.ptx
        resident, threads = chosen.kwargs["RESIDENT"], 32 * chosen.num_warps
        assert resident * (made.shared + 1024) <= SHARED[90] + 1024
        assert resident * threads * -(-made.registers // 8) * 8 <= REGISTERS
        # A product ends before its inputs are overwritten: none is in flight then.
        assert set(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", made.sass)) == {"0x0"}
        assert not overwritten_registers(made.sass) and not unguarded_writes(made.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("capability", devices(80, 90, 100))
@pytest.mark.parametrize("dtype, even", [(BF16, False), (F16, True), (F32, True), (F32, False)])
@pytest.mark.parametrize("kind", ("int8", "int4/64"))
def test_other_dtypes_and_sizes(capability, dtype, even, kind):
    """What is tried first; inputs that no tile divides."""
    made, _ = compiled(capability, dtype, kind, 60, 0, even)
    assert made.shared <= SHARED[capability] and made.spilled == 0
    assert made.on_tensor_cores == (dtype != F32)


def bfloat16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def float16(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def run(text: str, word: int, outputs: int) -> list[float]:
    """What assembler makes of a word: the low and the high 16-bit number of each result."""
    at = {f"${outputs}": word}

    def value(name: str) -> int:
        return at[name] if name in at else int(name, 0)

    for instruction, arguments in re.findall(r"^\s+(\w[\w.]*) (.*);", text, re.MULTILINE):
        if instruction == ".reg":
            continue
        to, *names = arguments.split(", ")
        given = [value(name) for name in names]
        if instruction == "mov.b32":
            at[to] = given[0]
        elif instruction == "shr.u32":
            at[to] = given[0] >> given[1]
        elif instruction == "shl.b32":
            at[to] = given[0] << given[1] & 0xFFFFFFFF
        elif instruction == "lop3.b32":
            assert given[3] == 0xEA  # the table of (a & b) | c
            at[to] = given[0] & given[1] | given[2]
        elif instruction in ("fma.rn.bf16x2", "fma.rn.f16x2"):
            number = bfloat16 if "bf16" in instruction else float16
            a, b, c = ([number(word >> shift & 0xFFFF) for shift in (0, 16)] for word in given)
            at[to] = [x * y + z for x, y, z in zip(a, b, c)]
        else:
            raise AssertionError(f"{instruction} is not known here")
    return [at[f"${i}"] for i in range(outputs)]


def test_assembler():
    """For every stored value, beside many others: a register holds the same part of two words."""
    for low in range(-128, 128):
        for high in range(-128, 128, 5):
            word = sum((n & 255) << 8 * i for i, n in enumerate((low, high, high, low)))
            for text in (products.BYTES_TO_BF16, products.BYTES_TO_FP16):
                assert run(text.value, word, 2) == [[low, high], [high, low]]
    for low in range(-8, 8):
        for high in range(-8, 8):
            word = sum((n + 8) << 4 * i for i, n in enumerate((low, high, 1, 2, high, low, 3, 4)))
            found = run(products.NIBBLES_TO_BF16.value, word, 4)
            assert found == [[low, high], [high, low], [1, 3], [2, 4]]
            found = run(products.NIBBLES_TO_FP16.value, word, 4)
            assert found == [[low, high], [high, low], [1, 3], [2, 4]]
    values = e2m1(torch.arange(16)).tolist()
    for text in (products.E2M1_TO_BF16, products.E2M1_TO_FP16):
        for low in range(16):
            for high in range(16):
                word = sum(n << 4 * i for i, n in enumerate((low, high, 1, 2, high, low, 3, 4)))
                found, want = run(text.value, word, 4), [[low, high], [high, low], [1, 3], [2, 4]]
                assert found == [[values[n] for n in pair] for pair in want]
