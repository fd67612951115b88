"""Choose the backend of a device."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.step import TORCH_BACKEND, Backend
from kernels.build import NoKernels
from kernels.cpu import CpuBackend


def choose_backend(
    device: torch.device | str, kernels: bool = True, isa: str | None = None,
    log: Callable[[str], None] = lambda line: None, required: bool = False,
) -> Backend:
    """Return the backend for a device.

    kernels: use our kernels if the device supports them. isa: instruction set of the CPU kernels
    (`kernels.isa.SETS`); None: the best. required: an option needs the CPU kernels. If compiling fails, log
    the reason and return the PyTorch backend, or raise NoKernels (an InputError) with `required` or `isa`.
    Raises InputError if the processor lacks the instruction set.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _choose_cuda(device, kernels, log)
    try:
        return CpuBackend.load(isa, log) if kernels and device.type == "cpu" else TORCH_BACKEND
    except NoKernels as e:
        if required or isa is not None:
            raise
        log(f"{e}. Using PyTorch without our kernels, which is slower")
    return TORCH_BACKEND


def _choose_cuda(device: torch.device, kernels: bool, log: Callable[[str], None]) -> Backend:
    from kernels.gpu.device import detect_fp8, runs_kernels

    detect_fp8(device, log)
    if kernels and runs_kernels(device):
        from kernels.gpu.backend import CudaBackend  # imports Triton, which takes time

        return CudaBackend()
    if kernels:
        log("using PyTorch's kernels: ours need compute capability 8.0 and Triton")
    return TORCH_BACKEND


def on_backend(target, ranks):
    """Choose the backend of an `engine.target.Target`, prepare its model, set the cache class of `--kv`."""
    runtime, model = target.runtime, target.model
    kernels, on_cpu = runtime.compile and runtime.kernels, model.embed.device.type == "cpu"
    if kernels or (not on_cpu and "quantization" in target.config):  # on a GPU this also detects fp8 support
        arguments = runtime.device_name, kernels, runtime.isa, target.log, runtime.kv == "int8"
        target = replace(target, backend=choose_backend(*arguments))
    target.prepare_models(model)
    if not model.runs_on_backend and (runtime.on_cpu_kernels or (ranks is not None and on_cpu)):
        # Layers without kernels run in eager PyTorch.
        target = replace(target, runtime=replace(runtime, compile=False))
    if runtime.kv != "auto":  # auto: keep the class that `prepare` has set
        from kernels.kv_dtypes import caches_of

        model.Caches = caches_of(target)
    return target
