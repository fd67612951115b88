"""Kernels of mixtures compiled for GPUs that are not here: they fit, spill nothing, use the tensor cores."""
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from helpers.ahead_of_time import SHARED, compile_for, dear, devices, overwritten_registers, unguarded_writes

from kernels.gpu import experts

pytestmark = pytest.mark.slow
BF16, F16, F32, I32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
WEIGHTS = {  # bits, group, dtype of scales
    "16 bits": (16, 0, BF16), "int8": (8, 0, F32), "int4/32": (4, 32, BF16), "int4/64": (4, 64, BF16),
    "int4/128": (4, 128, BF16), "mxfp4": (4, 32, torch.uint8),
}


def compiled(capability, kind, rows, dtype=BF16, even=True, sharing="any i32"):
    bits, group, scale = WEIGHTS[kind]
    tile = experts.tile_of(rows, dtype)
    given = {
        "x": dtype, "weight": dtype if bits == 16 else torch.int16, "scale": scale, "bias": dtype,
        "order": I32, "tiles": I32, "out": dtype, "N": "i32", "K": "i32", "STRIDE": "i32", "SHARING": sharing,
        "BITS": bits, "GROUP": group, "BIASED": True, "EVEN": even,
        "PRECISION": "ieee" if dtype == F32 else "tf32", **tile.kwargs,
    }
    return compile_for(capability, experts.grouped_kernel, given, tile.num_warps, tile.num_stages)


@pytest.mark.parametrize("capability", (90, *dear(80, 86, 100)))
@pytest.mark.parametrize("kind, rows", [
    ("mxfp4", 60), *dear(*((kind, rows) for kind in WEIGHTS for rows in (1, 17, 60, 128))),
])
def test_experts(capability, kind, rows):
    """gpt-oss has 2880 inputs, which the tile of few rows does not divide."""
    made = compiled(capability, kind, rows, even=kind != "mxfp4" or rows > 1)
    assert made.shared <= SHARED[capability] and made.on_tensor_cores
    assert made.spilled <= (8 if capability == 86 else 0)
    if capability == 90:
        assert "wgmma" in made.ptx
        assert not overwritten_registers(made.sass) and not unguarded_writes(made.ptx)
        if kind != "16 bits":  # a product ends before its inputs are overwritten: none is in flight then
            assert set(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", made.sass)) == {"0x0"}


@pytest.mark.parametrize("capability", devices(80, 90, 100))
@pytest.mark.parametrize("few", (True, *dear(False)))
def test_arranging(capability, few):
    given = {"chosen": I64, "order": I32, "tiles": I32, "S": "any i32", "FEW": few, "ROWS": 16}
    made = compile_for(capability, experts.arrange_kernel, given | {"CHUNK": experts.CHUNK})
    assert made.spilled == 0
