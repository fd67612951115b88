"""What is known of GPUs before torch is there: never that there is none where there may be one."""
import ctypes
import importlib.metadata
import sys

import pytest
import torch
from helpers.refusals import refused

from common import gpus
from common.gpus import check_gpu, why_no_gpu


@pytest.fixture
def machine(monkeypatch):
    """Sets PyTorch's version, the libraries that load, whether AMD's driver is there, and the system."""
    def be(build="9.1.0", libraries=(), amd=False, system="linux"):
        def load(name):
            if name not in libraries:
                raise OSError(name)

        def version(package):
            if build is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return build

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(gpus, "AMD", type("", (), {"exists": lambda: amd}))
        monkeypatch.setattr(sys, "platform", system)
        why_no_gpu.cache_clear()

    yield be
    monkeypatch.undo()
    why_no_gpu.cache_clear()


@pytest.mark.parametrize("how, why", [
    ({}, "there is no driver of a GPU (libcuda.so.1)"), ({"libraries": ["libcuda.so.1"]}, None),
    ({"libraries": ["nvcuda.dll"]}, None), ({"amd": True}, None), ({"build": None}, None),
    ({"build": "9.1.0+cpu", "libraries": ["libcuda.so.1"]}, "PyTorch 9.1.0+cpu is built without CUDA"),
    ({"build": "9.1.0+cu130", "libraries": ["libcuda.so.1"]}, None),
    ({"system": "darwin"}, "PyTorch 9.1.0 is built without CUDA"),
])
def test_why_there_is_no_gpu(machine, how, why):
    machine(**how)
    assert why_no_gpu() == why
    if why is None:
        check_gpu("cuda", "auto")
        return
    for asked in (("cuda:1", None), ("cuda", 4)):
        with refused(f"--device {asked[0]}: needs a GPU, and {why}; leave it out"):
            check_gpu(*asked)
    with refused(f"--offload auto: needs a GPU, and {why}; leave it out"):
        check_gpu(None, "auto")


def test_whoever_asks_for_no_gpu_needs_none(machine):
    machine()
    for device in (None, "cpu"):
        check_gpu(device)


def test_what_is_said_of_this_machine():
    assert why_no_gpu() is None or not torch.cuda.is_available()
