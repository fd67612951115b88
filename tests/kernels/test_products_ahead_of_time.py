"""Products with quantised weights compiled for GPUs that are not here: they fit, spill nothing, use the
tensor cores. What their assembler gives is checked on a GPU: see test_check.py.
"""
import re
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
