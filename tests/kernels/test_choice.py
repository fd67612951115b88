"""The choice of kernels for a GPU that is not here: a line says what it cannot do."""
import pytest
import torch

from engine.runtime import Runtime
from engine.step import TORCH
from kernels import choose, quantized
from kernels.gpu import device as gpu_device
from tree import TreeShape

GPU = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability, multiply): pretend that there is one; `multiply` stands in for `torch._scaled_mm`."""
    def pretend(capability, multiply):
        monkeypatch.setattr(quantized, "FP8_DEVICES", set())
        monkeypatch.setattr(gpu_device, "HAS_TRITON", True)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch, "_scaled_mm", multiply)
        for name in ("zeros", "ones"):
            make = getattr(torch, name)
            monkeypatch.setattr(torch, name, lambda *size, device, make=make: make(*size))

    return pretend


def unsupported(*args, **options):
    raise RuntimeError("NOT_SUPPORTED\nmore")


@pytest.mark.parametrize("capability, multiply, has_fp8, said", (
    ((8, 9), lambda *a, **o: None, True, []),
    ((8, 9), unsupported, False, ["fp8 runs without tensor cores, which is slower (NOT_SUPPORTED)"]),
    ((8, 6), unsupported, False, []),
    ((7, 5), unsupported, False, [
        "this GPU runs PyTorch's kernels: ours need compute capability 8.0 and Triton"]),
))
def test_what_a_gpu_can_do(gpu, capability, multiply, has_fp8, said):
    lines = []
    gpu(capability, multiply)
    chosen = choose.choose_backend(GPU, kernels=capability < (8, 0), log=lines.append)
    assert chosen is TORCH and lines == said and (GPU in quantized.FP8_DEVICES) == has_fp8
    assert gpu_device.runs_kernels(GPU) == (capability >= (8, 0))


@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_cublas_sums_in_float32(dtype):
    flag = f"allow_{dtype}_reduced_precision_reduction"
    setattr(torch.backends.cuda.matmul, flag, True)
    Runtime(device="cpu", compile=False).prepare()
    assert not getattr(torch.backends.cuda.matmul, flag)


def test_trees_on_gpus():
    """A small GPU is compute-bound at about 70 tokens in bf16: with the paper's tree drafting can lose."""
    trees = [TORCH.default_tree(torch.device("cuda"), False, batch) for batch in (1, 12, 16, 24, 64)]
    assert trees == [TreeShape(*s) for s in ((16, 4, 5), (16, 4, 5), (12, 3, 4), (8, 2, 4), (4, 2, 2))]
