"""The Triton kernels, in Triton's interpreter where there is no GPU: exactly the product with the weight they
stand for.
"""
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

from kernels import gpu
from kernels.quantized import QuantizedLinear, round_inputs

INTERPRETED = """
import torch
from kernels import gpu
from kernels.quantized import QuantizedLinear

draw = torch.Generator().manual_seed(0)
worst = 0.0
# The interpreter has no bfloat16 products.
for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
    for M, N, K in ((1, 100, 192), (5, 64, 128), (60, 70, 256), (16, 33, 64)):
        for mode, group in (("int8", 0), ("int4", 32), ("int4", 64)):
            for bias in (None, torch.randn(N, generator=draw).to(dtype)):
                layer = QuantizedLinear.of(torch.randn(N, K, generator=draw), mode, group, bias)
                x, out = torch.randn(M, K, generator=draw).to(dtype), torch.empty(M, N, dtype=dtype)
                given = {"HAS_BIAS": bias is not None, "EXACT": dtype == torch.float32, "COLUMNS": 32}
                given["ROWS"] = max(16, gpu.triton.next_power_of_2(M))
                onto = layer.scale.data if bias is None else bias
                arguments = (x, layer.weight.data, layer.scale.data, onto, out, M, N, K)
                grid = (gpu.triton.cdiv(N, 32),)
                if group:
                    gpu.int4_kernel[grid](*arguments, GROUP=group, **given)
                else:
                    gpu.int8_kernel[grid](*arguments, DEPTH=128, **given)
                want = x.double() @ layer.dequantize(torch.float64).T + (0 if bias is None else bias.double())
                error = float((out.double() - want).abs().max() / want.abs().max())
                assert error < limit, (dtype, M, N, K, mode, group, error)
                worst = max(worst, error)
assert worst > 0
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_cpu_is_not_taken():
    assert not gpu.takes(torch.zeros(1, 4))


@pytest.mark.compile
@pytest.mark.xdist_group("GPU")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "dtype, limit", ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3))
)
@pytest.mark.parametrize(
    "mode, group",
    (("int8", 0), ("w8a8", 0), ("int4", 32), ("int4", 64), ("int4", 128), ("w4a8", 64), ("fp8", 0))
)
@pytest.mark.parametrize("rows", (1, 7, 60, 300))
def test_on_the_gpu(dtype, limit, mode, group, rows):
    """All rows, also those too many for the kernel; compiled and not."""
    torch.manual_seed(0)
    layer = QuantizedLinear.of(torch.randn(208, 256), mode, group, torch.randn(208)).to("cuda")
    layer.bias.data = layer.bias.data.to(dtype)
    x = torch.randn(rows, 256, device="cuda", dtype=dtype)
    read = round_inputs(x, group or 64) if mode in ("w8a8", "w4a8") else x
    want = read.double() @ layer.dequantize(torch.float64).T + layer.bias.double()
    for run in (layer, torch.compile(layer)):
        error = (run(x).double() - want).abs().max() / want.abs().max()
        assert error < (0.08 if mode == "fp8" else limit)
