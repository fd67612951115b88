"""Instruction sets that the kernels are compiled for, and their detection."""
from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import InputError

ISA_VARIABLE = "EAGLE_ISA"  # environment variable: instruction set to use instead of the best one


@dataclass(frozen=True)
class InstructionSet:
    """flags: compiler flags. needs: processor features, named as in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: tuple[str, ...]


def _x86(name: str, *more: str, base: InstructionSet | None = None) -> InstructionSet:
    """Return `base` with more features. Compiler flags are derived from the names in /proc/cpuinfo."""
    flags, needs = (base.flags, base.needs) if base else (("-march=haswell",), ())
    switches = tuple("-m" + feature.replace("amx_", "amx-").replace("_", "") for feature in more)
    return InstructionSet(name, flags + switches, needs + more)


def _arm(name: str, march: str, *more: str) -> InstructionSet:
    """Return aarch64 with NEON and more features."""
    return InstructionSet(name, (f"-march={march}",), ("asimd", *more))


_AVX2 = _x86("avx2", "avx2", "fma")
_AVX512 = _x86("avx512", "avx512f", "avx512bw", "avx512vl", "avx512dq", base=_AVX2)
_AVX512VNNI = _x86("avx512vnni", "avx512_vnni", base=_AVX512)
_AVX512BF16 = _x86("avx512bf16", "avx512_bf16", base=_AVX512VNNI)
_AMX = _x86("amx", "amx_tile", "amx_bf16", "amx_int8", base=_AVX512BF16)
SETS = {  # best first
    isa.name: isa
    for isa in (
        _AMX, _AVX512BF16, _AVX512VNNI, _AVX512, _x86("avxvnni", "avx_vnni", base=_AVX2), _AVX2,
        _arm("neoni8mm", "armv8.2-a+dotprod+bf16+i8mm", "asimddp", "bf16", "i8mm"),
        _arm("neondot", "armv8.2-a+dotprod", "asimddp"), _arm("neon", "armv8-a"),
        InstructionSet("portable", ("-DPORTABLE",), ()),
    )
}


# Vendors of x86 processors by /proc/cpuinfo; prefetching in the kernels depends on them.
AMD, INTEL, OTHER = "AMD", "INTEL", "OTHER"
VENDORS = {"AuthenticAMD": AMD, "GenuineIntel": INTEL}


@cache
def cpuinfo(*names: str) -> str:
    """Return the first value with one of these names in /proc/cpuinfo; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def features() -> frozenset[str]:
    """Return this processor's features as in /proc/cpuinfo; empty if unknown."""
    return frozenset(cpuinfo("flags", "Features").split())


def vendor() -> str:
    """Return the processor's vendor: AMD, INTEL or OTHER (in the C++ source VENDOR_AMD etc.)."""
    return VENDORS.get(cpuinfo("vendor_id"), OTHER)


@cache
def _amx_permitted() -> bool:
    """Request AMX from Linux for this process, and return whether it is granted."""
    arch_prctl, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA
    return not ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)


def _missing(isa: InstructionSet) -> str:
    """Return the reason why an instruction set cannot be used here; "" if it can."""
    if missing := set(isa.needs) - features():
        return f"this processor has no {', '.join(sorted(missing))}"
    if "amx_tile" in isa.needs and not _amx_permitted():
        return "this Linux kernel does not permit AMX (needs 5.16 or later)"
    return ""


def available() -> list[str]:
    """Return the instruction sets that can be used here, best first."""
    names = [isa.name for isa in SETS.values() if not _missing(isa)]
    if vendor() == INTEL and _AVX512BF16.name in names:
        # Swap it with AVX-512 VNNI: on Intel, VDPBF16PS takes 2.2 cycles, two float32 FMAs take one.
        i = names.index(_AVX512BF16.name)
        names[i : i + 2] = names[i + 1], names[i]
    return names


def choose(name: str | None = None) -> InstructionSet:
    """Return the instruction set of this name (default: EAGLE_ISA, else the best one).

    Raises InputError if it is unknown or cannot be used here.
    """
    source = "--isa" if name else ISA_VARIABLE
    name = name or os.environ.get(ISA_VARIABLE)
    if not name:
        return SETS[available()[0]]
    if name not in SETS:
        raise InputError(f"{source} {name}: unknown; choose from {', '.join(SETS)}")
    if reason := _missing(SETS[name]):
        raise InputError(f"{source} {name}: {reason}; choose from {', '.join(available())}")
    return SETS[name]
