"""Which instruction set is chosen."""
import pytest
from helpers.refusals import refused

from kernels import isa

ZEN3 = frozenset(("fpu", "sse2", "avx", "avx2", "fma", "f16c", "bmi2"))
ZEN4 = ZEN3 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN4 | {"avx_vnni", "amx_tile", "amx_bf16", "amx_int8"}
ALDER_LAKE = ZEN3 | {"avx_vnni"}
CORTEX_A72 = frozenset(("fp", "asimd", "aes", "crc32"))
NEOVERSE_N1 = CORTEX_A72 | {"asimddp", "asimdhp"}
NEOVERSE_V1 = NEOVERSE_N1 | {"bf16", "i8mm", "sve"}


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(isa.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(isa, "_amx_permitted", lambda: True)


def on(monkeypatch, features, vendor=isa.OTHER) -> None:
    monkeypatch.setattr(isa, "features", lambda: frozenset(features))
    monkeypatch.setattr(isa, "vendor", lambda: vendor)


@pytest.mark.parametrize("features, best", (
    (SAPPHIRE_RAPIDS, "amx"), (ZEN4, "avx512bf16"), (ZEN4 - {"avx512_bf16"}, "avx512vnni"),
    (ZEN4 - {"avx512_vnni", "avx512_bf16"}, "avx512"), (ALDER_LAKE, "avxvnni"),
    (ZEN3, "avx2"), (ZEN3 - {"fma"}, "portable"), ((), "portable"),
    (NEOVERSE_V1, "neoni8mm"), (NEOVERSE_V1 - {"i8mm"}, "neondot"), (NEOVERSE_N1, "neondot"),
    (CORTEX_A72, "neon"),
))
def test_the_best_one_is_chosen(monkeypatch, features, best):
    on(monkeypatch, features)
    assert isa.choose().name == best == isa.available()[0] and isa.available()[-1] == "portable"


def test_another_one_can_be_named(monkeypatch):
    on(monkeypatch, ZEN4)
    assert isa.choose("avx2").name == "avx2"
    monkeypatch.setenv(isa.ISA_VARIABLE, "avx512")
    assert isa.choose().name == "avx512" and isa.choose("portable").name == "portable"


def test_what_cannot_be_chosen(monkeypatch):
    on(monkeypatch, ZEN3)
    with refused("--isa sse9: unknown; choose from amx, avx512bf16, "):
        isa.choose("sse9")
    with refused("--isa avxvnni: this processor has no avx_vnni; choose from avx2, portable"):
        isa.choose("avxvnni")
    monkeypatch.setenv(isa.ISA_VARIABLE, "avx512")
    with refused("EAGLE_ISA avx512: this processor has no avx512bw, avx512dq, avx512f, avx512vl"):
        isa.choose()


def test_tiles_that_linux_refuses(monkeypatch):
    on(monkeypatch, SAPPHIRE_RAPIDS)
    monkeypatch.setattr(isa, "_amx_permitted", lambda: False)
    assert isa.choose().name == isa.available()[0] == "avx512bf16"
    with refused("--isa amx: Linux does not permit AMX (5.16 or later does); choose "):
        isa.choose("amx")
