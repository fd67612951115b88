"""Triton kernels compiled for GPUs that are not there."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# By compute capability, the most bytes of shared memory that a program may have: A100, RTX 3090 (as later
# ones of its kind), H100 and H200, B200 (CUDA C++ Programming Guide, table of technical specifications).
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8",
    torch.uint8: "*u8", torch.int16: "*i16", torch.bool: "*i1", torch.int32: "*i32", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def dear(*cases) -> list:
    """Cases of a test that run in `make test-all` alone."""
    cases = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.dear) for case in cases]


def devices(*capabilities: int) -> list:
    """Compute capabilities; all but an H100's are dear."""
    return [capability if capability == 90 else dear(capability)[0] for capability in capabilities]


class Compiled(NamedTuple):
    """What a kernel became."""

    shared: int  # bytes of shared memory of a program
    registers: int  # of a thread
    spilled: int  # bytes of a thread's local memory: registers that did not suffice
    ptx: str
    sass: str  # machine code
    chained: bool  # a product adds to what another one has summed

    @property
    def on_tensor_cores(self) -> bool:
        """Whether products run on the tensor cores."""
        return bool(re.search(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", self.ptx))


def compile_for(
    capability: int, kernel: triton.JITFunction, given: dict, warps: int = 4, stages: int = 3,
    early: bool = False,
) -> Compiled:
    """Compile `kernel` for a GPU of this compute capability, one of `SHARED`.

    given: for every argument a dtype (a pointer to it), "i32" or "i64" (an integer, a multiple of 16), "any
    i32" (any integer), 1 (this integer, for which Triton compiles a kernel of its own), "fp32", or, for the
    compile-time constants, the value. early: for programmatic launch.
    """
    given = {**given, "EARLY": early}
    signature, constants, attributes = {}, {}, {}
    for i, (name, kind) in enumerate(given.items()):
        constant = kernel.params[i].is_constexpr or kind == 1
        assert kernel.params[i].name == name, (kernel.params[i].name, name)
        if constant:
            signature[name], constants[name] = "constexpr", kind
            continue
        signature[name] = POINTERS[kind] if isinstance(kind, torch.dtype) else kind.removeprefix("any ")
        if isinstance(kind, torch.dtype) or kind in ("i32", "i64"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": early}
    made = triton.compile(source, target=target, options=options)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        used, sass = (_dump(option, file) for option in ("--dump-resource-usage", "--dump-sass"))
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", used).groups())
    products = re.findall(r"(%\w+) = tt\.dot %\w+, %\w+, (%\w+)", made.asm["ttir"])
    chained = not {result for result, _ in products}.isdisjoint(onto for _, onto in products)
    return Compiled(made.metadata.shared, registers, stack + local, made.asm["ptx"], sass, chained)


def _dump(option: str, file: Path) -> str:
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


def overwritten_registers(sass: str) -> list[str]:
    """Return the instructions in loops that write a register which a `wgmma` in flight still reads.

    Triton 3.6 and 3.7 made such code where several were in flight (triton-lang/triton#9433).
    """
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/", sass)
    places, found = {int(address, 16): i for i, (address, _) in enumerate(code)}, []
    for end, (_, text) in enumerate(code):
        jump = re.search(r"BRA (?:`\(.*\) )?(0x[0-9a-f]+)", text)
        start = places.get(int(jump[1], 16), end) if jump else end
        in_flight: list[set[str]] = []  # the registers that each reads
        for _, text in code[start:end] * 2:  # twice: some are in flight when a turn begins
            if product := re.search(r"HGMMA\S* R\d+, (R\d+|gdesc)", text):
                in_flight.append(_registers(product[1], 4) if product[1][0] == "R" else set())
            elif waits := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", text):
                in_flight = in_flight[max(len(in_flight) - int(waits[1], 16), 0) :]
            elif into := re.match(r"(?:@!?U?P\d+ )?([A-Z][\w.]*) (R\d+)", text):
                stores = into[1].startswith(("ST", "LDGSTS", "RED", "BAR"))
                wide, widest = r"\.64|WIDE", r"\.128|LDSM.*\.4"
                width = 4 if re.search(widest, into[1]) else 2 if re.search(wide, into[1]) else 1
                written = _registers(into[2], width)
                if not stores and any(read & written for read in in_flight):
                    found.append(text)
    return found


def _registers(first: str, count: int) -> set[str]:
    return {f"R{int(first[1:]) + i}" for i in range(count)}


def unguarded_writes(ptx: str) -> list[str]:
    """Return the writes of shared memory that follow a `wgmma` without a barrier, also in a loop's next turn.
    """
    code, found = [line.strip() for line in ptx.splitlines()], []
    places, parts = {line: i for i, line in enumerate(code)}, [code]
    for end, line in enumerate(code):
        if jump := re.search(r"bra(?:\.uni)?\s+([$\w]+);", line):
            parts.append(code[places.get(f"{jump[1]}:", end) : end] * 2)
    for part in parts:
        reads = False
        for line in part:
            if "wgmma.mma_async" in line:
                reads = True
            elif re.search(r"bar(rier)?(\.cta)?\.sync", line):
                reads = False
            elif reads and re.search(r"cp\.async\.c[ag]|st\.shared|stmatrix", line):
                found.append(line)
    return found
