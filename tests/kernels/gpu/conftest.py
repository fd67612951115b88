"""GPU kernels, run on a GPU or, by `test_triton_interpreter.py`, in Triton's interpreter."""
import pytest
import torch

from kernels.gpu import device as gpu_device

if not gpu_device.HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]
torch.backends.cuda.enable_cudnn_sdp(False)  # racecheck finds hazards in its kernel (cuDNN of torch 2.11)


@pytest.fixture(autouse=True)
def decoding():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """The device that kernels run on."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def backend(device):
    from kernels.gpu.backend import CudaBackend

    return CudaBackend()
