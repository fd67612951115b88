"""Compile Triton kernels ahead of time, without a GPU."""
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Maximum bytes of shared memory of a program, by compute capability: T4, A100, RTX 3060 and 3090, RTX 4090
# and L4, H100 and H200, B200, RTX 5090 (CUDA C++ Programming Guide, technical specifications).
KIB = 1024
SHARED = {
    75: 64 * KIB, 80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB,
}
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8",
    torch.uint8: "*u8", torch.int16: "*i16", torch.bool: "*i1", torch.int32: "*i32", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def expensive(*cases) -> list:
    """Mark test cases that run in `make test-all` only."""
    cases = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.expensive) for case in cases]


def devices(*capabilities: int) -> list:
    """Return compute capabilities as test parameters; all but an H100's are marked expensive."""
    return [capability if capability == 90 else expensive(capability)[0] for capability in capabilities]


class Compiled(NamedTuple):
    """The result of compiling a kernel."""

    shared: int  # bytes of shared memory of a program
    registers: int  # of a thread
    spilled: int  # bytes of a thread's local memory: spilled registers
    ptx: str
    sass: str  # machine code
    chained: bool  # a matmul accumulates onto another's result
    on_tensor_cores: bool  # matmuls run on tensor cores


def compile_for(
    capability: int, kernel: triton.JITFunction, types: dict, warps: int = 4, stages: int = 3,
    pdl: bool = False,
) -> Compiled:
    """Compile `kernel` for a GPU of this compute capability, one of `SHARED`.

    types: for every argument a dtype (a pointer to it), "i32" or "i64" (an integer, a multiple of 16), "any
    i32" (any integer), 1 (this integer, for which Triton specializes), None (no tensor), "fp32", or, for
    compile-time constants, the value. pdl: for programmatic dependent launch.
    """
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        name, type = param.name, pdl if param.name == "PDL" else types[param.name]
        if param.is_constexpr or type is None or type == 1:
            signature[name], constants[name] = "constexpr", type
            continue
        signature[name] = POINTERS[type] if isinstance(type, torch.dtype) else type.removeprefix("any ")
        if isinstance(type, torch.dtype) or type in ("i32", "i64"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    # What kernels ask for the compute capability (`triton.language.target_info`).
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": pdl}
    compiled = triton.compile(source, target=target, options=options)
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        dump = tool, "--dump-resource-usage", "--dump-sass", file
        sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", sass).groups())
    products = re.findall(r"(%\w+) = tt\.dot %\w+, %\w+, (%\w+)", compiled.asm["ttir"])
    chained = not {result for result, _ in products}.isdisjoint(onto for _, onto in products)
    ptx = compiled.asm["ptx"]
    cores = bool(re.search(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", ptx))
    return Compiled(compiled.metadata.shared, registers, stack + local, ptx, sass, chained, cores)
