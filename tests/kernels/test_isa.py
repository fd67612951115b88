"""Selection of the instruction set."""
import pytest
from helpers import refused

from kernels import isa

ZEN3 = frozenset(("fpu", "sse2", "avx", "avx2", "fma", "f16c", "bmi2"))
ZEN4 = ZEN3 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN4 | {"avx_vnni", "amx_tile", "amx_bf16", "amx_int8"}
ALDER_LAKE = ZEN3 | {"avx_vnni"}
CORTEX_A72 = frozenset(("fp", "asimd", "aes", "crc32"))
NEOVERSE_N1 = CORTEX_A72 | {"asimddp", "asimdhp"}
NEOVERSE_V1 = NEOVERSE_N1 | {"bf16", "i8mm", "sve"}


@pytest.fixture
def processor(monkeypatch):
    """Return a function that simulates a processor with these features, and EAGLE_ISA set to this value."""
    def simulate(features, variable="", amx_permitted=True) -> None:
        monkeypatch.setattr(isa, "features", lambda: frozenset(features))
        monkeypatch.setattr(isa, "vendor", lambda: isa.OTHER)
        monkeypatch.setattr(isa, "_amx_permitted", lambda: amx_permitted)
        monkeypatch.setenv(isa.ISA_VARIABLE, variable)

    return simulate


@pytest.mark.parametrize("features, best", (
    (SAPPHIRE_RAPIDS, "amx"), (ZEN4, "avx512bf16"), (ZEN4 - {"avx512_bf16"}, "avx512vnni"),
    (ZEN4 - {"avx512_vnni", "avx512_bf16"}, "avx512"), (ALDER_LAKE, "avxvnni"),
    (ZEN3, "avx2"), (ZEN3 - {"fma"}, "portable"), ((), "portable"),
    (NEOVERSE_V1, "neoni8mm"), (NEOVERSE_V1 - {"i8mm"}, "neondot"), (NEOVERSE_N1, "neondot"),
    (CORTEX_A72, "neon"),
))
def test_best_isa_is_chosen(processor, features, best):
    processor(features)
    assert isa.choose().name == best == isa.available()[0] and isa.available()[-1] == "portable"


def test_isa_can_be_overridden(processor):
    """By flag or environment variable, if the processor supports it and, for AMX, Linux permits it."""
    processor(ZEN4, "avx512")
    assert [isa.choose(name).name for name in (None, "portable")] == ["avx512", "portable"]
    processor(SAPPHIRE_RAPIDS, amx_permitted=False)
    assert isa.choose().name == isa.available()[0] == "avx512bf16"
    for features, name, variable, message in (
        (ZEN3, "sse9", "", "--isa sse9: unknown; choose from amx, avx512bf16, "),
        (ZEN3, "avxvnni", "", "--isa avxvnni: this processor has no avx_vnni; choose from avx2, portable"),
        (ZEN3, None, "avx512", "EAGLE_ISA avx512: this processor has no avx512bw, avx512dq, avx512f, avx512"),
        (SAPPHIRE_RAPIDS, "amx", "", "--isa amx: this Linux kernel does not permit AMX (needs 5.16 or"),
    ):
        processor(features, variable, amx_permitted=False)
        with refused(message):
            isa.choose(name)
