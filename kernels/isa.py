"""The instruction sets that the kernels are compiled for, and which of them this processor has."""
from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import InputError

VARIABLE = "EAGLE_ISA"  # of the environment: the instruction set to use instead of the best one


@dataclass(frozen=True)
class InstructionSet:
    """One way to compile the kernels. `needs`: features of a processor by their names in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]  # of the compiler
    needs: tuple[str, ...]


def _x86(name: str, *more: str, base: InstructionSet | None = None) -> InstructionSet:
    """`base` and features more. A compiler's flags are named as /proc/cpuinfo names features, without _."""
    flags, needs = (base.flags, base.needs) if base else (("-march=haswell",), ())
    switches = tuple("-m" + feature.replace("_", "") for feature in more)
    return InstructionSet(name, flags + switches, needs + more)


def _arm(name: str, march: str, *more: str) -> InstructionSet:
    """aarch64 with vectors, which all have, and features more."""
    return InstructionSet(name, (f"-march={march}",), ("asimd", *more))


_AVX2 = _x86("avx2", "avx2", "fma")
_AVX512 = _x86("avx512", "avx512f", "avx512bw", "avx512vl", "avx512dq", base=_AVX2)
_AVX512VNNI = _x86("avx512vnni", "avx512_vnni", base=_AVX512)
_AVX512BF16 = _x86("avx512bf16", "avx512_bf16", base=_AVX512VNNI)
SETS = {  # best first
    isa.name: isa
    for isa in (
        _AVX512BF16, _AVX512VNNI, _AVX512, _x86("avxvnni", "avx_vnni", base=_AVX2), _AVX2,
        _arm("neoni8mm", "armv8.2-a+dotprod+bf16+i8mm", "asimddp", "bf16", "i8mm"),
        _arm("neonbf16", "armv8.2-a+dotprod+bf16", "asimddp", "bf16"),
        _arm("neondot", "armv8.2-a+dotprod", "asimddp"), _arm("neon", "armv8-a"),
        InstructionSet("portable", ("-DPORTABLE",), ()),
    )
}


# What macOS calls the features of aarch64.
SYSCTL = {"neon": "asimd", "arm.FEAT_DotProd": "asimddp", "arm.FEAT_BF16": "bf16", "arm.FEAT_I8MM": "i8mm"}


@cache
def _cpuinfo(*names: str) -> str:
    """The first line of /proc/cpuinfo with one of these names, without it; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


@cache
def _sysctl() -> frozenset[str]:
    """What macOS' sysctl says that this processor has."""
    try:
        command = ["/usr/sbin/sysctl", "hw.optional"]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return frozenset()
    return frozenset(line[len("hw.optional.") : -len(": 1")] for line in lines if line.endswith(": 1"))


def features() -> frozenset[str]:
    """What this processor has, by Linux' names (/proc/cpuinfo); empty where the system does not say."""
    if sys.platform == "darwin":
        return frozenset(SYSCTL[name] for name in SYSCTL.keys() & _sysctl())
    return frozenset(_cpuinfo("flags", "Features").split())


def processor_name() -> str:
    """The processor's model name, or at least its family's."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def available() -> list[str]:
    """The instruction sets that this processor has, best first."""
    return [isa.name for isa in SETS.values() if features().issuperset(isa.needs)]


def choose(name: str | None = None) -> InstructionSet:
    """The instruction set of this name; without one that of EAGLE_ISA; without that the best one.

    Raises InputError if it is unknown or this processor has not got it.
    """
    where = "--isa" if name else VARIABLE
    name = name or os.environ.get(VARIABLE)
    if not name:
        return SETS[available()[0]]
    if name not in SETS:
        raise InputError(f"{where} {name}: unknown; choose from {', '.join(SETS)}")
    if missing := set(SETS[name].needs) - features():
        raise InputError(
            f"{where} {name}: this processor has no {', '.join(sorted(missing))}; choose from "
            f"{', '.join(available())}"
        )
    return SETS[name]
