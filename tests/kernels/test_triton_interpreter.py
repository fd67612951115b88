"""Run the tests of the GPU kernels in Triton's interpreter, without a GPU."""
import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the tests run there")
@pytest.mark.parametrize("marker", ("not expensive", pytest.param("expensive", marks=pytest.mark.expensive)))
def test_triton_interpreter(marker):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-q",
         "--import-mode=importlib", "-m", marker, str(ROOT / "tests/kernels/gpu")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
