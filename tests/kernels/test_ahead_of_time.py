"""Compile the GPU kernels ahead of time, without a GPU: shared memory, register spills, tensor cores.

Results are tested in Triton's interpreter (`gpu/`) and, by `engine.check`, on each GPU.
"""
import re
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from helpers.ahead_of_time import SHARED, compile_for, devices, expensive
from triton import next_power_of_2

from families.hybrid import BLOCK, MAX_LEVELS
from kernels.gpu import attention, delta, dense, experts, products, ranking, sampling

pytestmark = pytest.mark.slow
EACH, THREE = devices(80, 86, 89, 90, 100, 120), devices(80, 90, 100)
BF16, F16, F32, I32, I64, BOOL = (
    torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.bool
)
ANY = "any i32"
KINDS = {  # of arguments, by name; others in capitals are any integers, the rest int64
    "V": "i32", "S": "i32", "eps": "fp32", "kv": BF16, "local": BOOL,
    **dict.fromkeys(("arrived", "order", "tiles"), I32),
    **dict.fromkeys(("logits", "noise", "scores", "chunk_sums", "peak", "temperature", "top_p"), F32),
    **dict.fromkeys(("rates", "state"), F32), "scale": "fp32", "T": "any i32", "RING": "i32",
    **dict.fromkeys(("mixed", "inputs", "projected", "taps", "log_decay", "step_bias"), BF16),
    **dict.fromkeys(("out", "cos", "sin", "partial_sums", "partial_softmax"), F32),
}


def compiled(capability, kernel, given: dict, spilled=0, integers=ANY, **options):
    """Compile a kernel, which must fit the GPU. integers: the type of integer arguments. spilled: bytes
    allowed.
    """
    names = [param.name for param in kernel.params]
    kinds = [(KINDS | given).get(name, ANY if name.isupper() else I64) for name in names]
    arguments = {name: integers if kind == ANY else kind for name, kind in zip(names, kinds)}
    made = compile_for(capability, kernel, arguments, **options)
    assert made.shared <= SHARED[capability] and made.spilled <= spilled
    return made


def in_flight(made) -> set[str]:
    """Return the numbers of unfinished wgmma operations at waits on an H100."""
    assert "wgmma" in made.ptx
    return set(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", made.sass))


# Key/value heads, query heads that share one, head size, whether they are normed.
HEADS = {  # Llama-3.1-8B, Qwen3-8B, Vicuna, SmolLM2, Qwen2.5-7B, Qwen3-14B; sizes that are no power of two
    "llama": (8, 4, 128, False), "qwen3": (8, 4, 128, True), "vicuna": (32, 1, 128, False),
    "smollm2": (3, 3, 64, False), "qwen2.5": (4, 7, 128, False), "14b": (8, 5, 128, True),
    "80": (32, 1, 80, False), "96": (32, 1, 96, False), "256": (8, 2, 256, False),
}


def attend(capability, dtype, heads, rows, old=False, window=False, held=None, spilled=0, pdl=False):
    nkv, group, hd, norm = HEADS[heads]
    tall, keys, warps, stages = attention.tile_config(rows * group, dtype, SHARED[capability], hd)
    given = {
        **dict.fromkeys(("qkv", "q_norm", "k_norm", "out"), dtype),
        **dict.fromkeys(("k", "v"), held or dtype), "scale": "fp32", "HEADS": nkv,
        "GROUP": group, "HEAD_DIM": hd, "BLOCK_HALF": next_power_of_2(hd // 2),
        "BLOCK_D": next_power_of_2(hd), "BLOCK_M": tall, "BLOCK_N": keys, "BLOCK_NEW": min(keys, 32),
        "SPLITS": 4, "MIN_SPLIT": 128, "CACHED_NODES": old, "PRECISION": "ieee" if dtype == F32 else "tf32",
        "E4M3": capability >= 89, "SEPARATE_DOTS": capability >= 100 and dtype != F32,
    }
    given |= {} if norm else {"q_norm": None, "k_norm": None}
    given |= {} if window else {"oldest": None}
    options = {"warps": warps, "stages": stages, "pdl": pdl}
    made = compiled(capability, attention.attend_kernel, given, spilled, **options)
    assert made.on_tensor_cores or dtype == F32
    return made


@pytest.mark.parametrize("capability", EACH)
@pytest.mark.parametrize("heads, rows, old, window", [
    ("llama", 10, True, False), ("qwen3", 60, False, False), ("llama", 10, True, True), *expensive(
        ("llama", 1, False, False), ("llama", 8, False, False), ("smollm2", 12, False, False),
        ("qwen2.5", 60, False, False), ("qwen2.5", 8, True, False), ("14b", 60, False, False),
        ("80", 60, False, False), ("96", 60, False, False), ("llama", 60, False, True),
    ),
])
def test_attention(capability, heads, rows, old, window):
    little = capability in (86, 89, 120) or heads == "qwen2.5"  # seven query heads share keys
    made = attend(capability, BF16, heads, rows, old, window, spilled=32 if little else 0)
    assert made.chained == (capability < 100)  # miscompiled on Blackwell


@pytest.mark.parametrize("capability, rows", [*expensive((86, 60)), (90, 1)])
def test_attention_over_float8(capability, rows):
    """With the hardware conversion from 8.9 on, in integer arithmetic before. Overflow saturates."""
    spilled = 32 if capability == 86 else 0
    made = attend(capability, BF16, "llama", rows, held=torch.uint8, spilled=spilled)
    assert ("e4m3x2" in made.ptx) == ("cvt.rn.satfinite.e4m3x2.f32" in made.ptx) == (capability >= 89)


@pytest.mark.parametrize("capability", EACH)
def test_attention_in_float32(capability):
    attend(capability, F32, "llama", 60)


def test_programmatic_launch():
    """The kernel waits for its predecessor and reads nothing before that."""
    made = attend(90, BF16, "llama", 1, pdl=True)
    before, _, after = made.ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after and "griddepcontrol.wait" not in after
    assert not re.search(r"\b(ld|cp\.async|st)\.global|cp\.async", before)
    assert "griddepcontrol" not in attend(90, BF16, "llama", 1).ptx


@pytest.mark.parametrize("capability", EACH)
@pytest.mark.parametrize("gated, pdl", [(True, True), (False, True), *expensive((False, False))])
def test_dense(capability, gated, pdl):
    """Two copies fit on one multiprocessor, so that the next can start early; it prefetches weights into L2
    before the wait.
    """
    pdl = pdl and capability >= 90
    tensors = "x", "weight", "bias", "residual", "out", "norm", "weighted"
    given = dict.fromkeys(tensors, BF16) | dict.fromkeys(("squares", "next_squares"), F32) | {
        "BITS": 16, "FLOATS": False, "GROUP": 0, "EVEN_K": True, "GATED": gated, "PRECISION": "tf32",
        "PREFETCHED": dense.PREFETCHED, "BLOCK_M": dense.MAX_TOKENS, "BLOCK_N": dense.BLOCK_N,
        "BLOCK_K": dense.BLOCK_K, **dict.fromkeys("MNK", "i32"),
        **dict.fromkeys(("scale", "totals", "shifts")),
    }
    if gated:
        given |= dict.fromkeys(("bias", "residual", "norm"))
    options = {"warps": dense.TILE["num_warps"], "stages": dense.TILE["num_stages"], "pdl": pdl}
    made = compiled(capability, products.product_kernel, given, **options)
    assert made.on_tensor_cores and (capability != 90 or 2 * made.shared <= SHARED[90])
    before = made.ptx.partition("griddepcontrol.wait")[0]
    assert not pdl or ("prefetch.global.L2" in before and not re.search(r"\b(ld|st)\.global", before))


# The kernels around the networks, at the sizes of the paper's tree and a vocabulary of 128k.
SORTED = {"CHUNK": sampling.MAX_CHUNK, "CHUNKS": 63}
DELTA = {  # Qwen3.5-27B
    "NK": 16, "NV": 48, "DK": 128, "DV": 128, "BLOCK_K": 128, "COLUMNS": delta.COLUMNS, "BLOCK": BLOCK,
    "LEVELS": MAX_LEVELS,
}
OTHERS = {  # the kernel, its warps, constants and arguments of other kinds
    "top_k": (ranking.top_k_kernel, 4, {
        "CHUNK": ranking.MAX_CHUNK, "BLOCK_TOP": 16, "CHUNKS": 16,
        "BLOCK_CHUNKS": 16}),
    "sort": (sampling.sort_kernel, 8, SORTED),
    "threshold": (sampling.threshold_kernel, 8, SORTED | {"BLOCK_CHUNKS": 64}),
    "sort experts": (experts.sort_kernel, 4, {
        "S": ANY, "ONE_TILE": True, "BLOCK_M": 16, "CHUNK": experts.SORT_CHUNK}),
    "write tokens": (delta.write_kernel, 4, {"NV": 48, "TAPS": 4, "BLOCK": delta.CHANNELS, "VALUES": "i32"}),
    "advance states": (delta.advance_kernel, 4, DELTA), "DeltaNet layers": (delta.delta_kernel, 4, DELTA),
}


@pytest.mark.parametrize("capability", THREE)
@pytest.mark.parametrize("one", (False, *expensive(True)))
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(capability, name, one):
    """one: all integers are 1, for which Triton specializes."""
    kernel, warps, given = OTHERS[name]
    compiled(capability, kernel, given, integers=1 if one else ANY, warps=warps)


REGISTERS = 65536  # of a multiprocessor
WEIGHTS = {  # bits, group, dtype of scales
    "16 bits": (16, 0, BF16), "int8": (8, 0, F32), "q4/32": (4, 32, F32), "q4/64": (4, 64, F32),
    "q4/128": (4, 128, F32), "mxfp4": (4, 32, torch.uint8), "q8/16": (8, 16, F32), "q8/32": (8, 32, F32),
    "f8/128": (8, 128, F32),
}


UNUSED = dict.fromkeys(("bias", "squares", "norm", "weighted", "next_squares"))  # with quantized weights
UNUSED |= {"GATED": False, "PREFETCHED": 0}


def multiply(capability, kernel, kind, tile, rows, dtype=BF16, even=True, spilled=0):
    """Compile a matmul kernel for weights of a kind, with a tile of this many rows."""
    bits, group, scale = WEIGHTS[kind]
    given = {
        **dict.fromkeys(("x", "bias", "residual", "out"), dtype), "scale": scale,
        **dict.fromkeys(("N", "K", "STRIDE"), "i32"),
        "weight": dtype if bits == 16 else torch.int16, "BITS": bits, "GROUP": group, "EVEN_K": even,
        "FLOATS": kind in ("f8/128", "mxfp4"),
        "PRECISION": "ieee" if dtype == F32 else "tf32", "BLOCK_M": rows, **tile.kwargs,
    }
    minima = F32 if kind.startswith("q") else None
    given |= {"totals": minima, "shifts": minima} | ({} if kernel is experts.grouped_kernel else UNUSED)
    made = compiled(capability, kernel, given, spilled, warps=tile.num_warps, stages=tile.num_stages)
    assert made.on_tensor_cores == (dtype != F32)
    return made


def choices():
    """Return (compute capability, kind of weights, rows of a tile) of bfloat16 matmuls."""
    for capability in (80, 86, 89, 90, 100, 120):
        for kind in ("int8", "q4/32", "q4/64", "q4/128", "q8/16", "q8/32", "f8/128"):
            bits, group, _ = WEIGHTS[kind]
            for rows in sorted({products.block_m(rows, BF16, bits, group) for rows in (1, 17, 60, 130)}):
                case = capability, kind, rows
                yield case if case in QUICK else expensive(case)[0]


QUICK = (86, "int8", 128), (90, "int8", 64), (90, "q4/64", 16), (90, "q8/16", 16)


@pytest.mark.parametrize("capability, kind, rows", choices())
def test_products(capability, kind, rows):
    tile, resident = products.tile_config(rows, BF16, WEIGHTS[kind][0], SHARED[capability])
    little = capability in (86, 89, 120) and kind != "int8"
    spilled = 24 if little else 8 if capability == 80 and kind == "q4/32" else 0
    made = multiply(capability, products.product_kernel, kind, tile, rows, spilled=spilled)
    assert not made.chained
    if capability == 90:
        threads = 32 * tile.num_warps
        assert resident * (made.shared + 1024) <= SHARED[90] + 1024
        assert resident * threads * -(-made.registers // 8) * 8 <= REGISTERS
        assert in_flight(made) == {"0x0"}  # a product ends before its inputs are overwritten


@pytest.mark.parametrize("shared", sorted({*SHARED.values()} - {SHARED[75]}))
@pytest.mark.parametrize("bits, rows", [(bits, rows) for bits in (4, 8) for rows in (16, 32, 64, 128)])
def test_every_tile_fits(shared, bits, rows):
    """By an upper bound for all versions of Triton: a launch that does not fit would raise."""
    tile, _ = products.tile_config(rows, BF16, bits, shared)
    held = tile.kwargs["BLOCK_K"] * (2 * rows + tile.kwargs["BLOCK_N"] * bits // 8)
    assert tile.num_stages > 1 and tile.num_stages * held <= shared


@pytest.mark.parametrize("capability", THREE)
@pytest.mark.parametrize("dtype, even", [(BF16, False), (F16, True), (F32, True), (F32, False)])
@pytest.mark.parametrize("kind", ("int8", "q4/64"))
def test_products_of_other_dtypes_and_sizes(capability, dtype, even, kind):
    """Also input sizes that no tile divides."""
    bits, group, _ = WEIGHTS[kind]
    rows = products.block_m(60, dtype, bits, group)
    tile, _ = products.tile_config(rows, dtype, bits, SHARED[capability])
    multiply(capability, products.product_kernel, kind, tile, rows, dtype, even)


@pytest.mark.parametrize("capability", (90, *expensive(80, 86, 89, 100, 120)))
@pytest.mark.parametrize("kind, rows", [
    ("mxfp4", 60), ("q4/32", experts.STORED_BLOCK_M),
    *expensive(*product(("16 bits", "int8", "mxfp4"), (1, 17, 60, 128))),
    *expensive(*product(("q8/16", "f8/128"), (1, experts.STORED_BLOCK_M))),
])
def test_experts(capability, kind, rows):
    """gpt-oss has 2880 inputs, which the tile for few rows does not divide."""
    tile, even = experts.tile_config(rows, BF16), kind != "mxfp4" or rows > 1
    options = {"even": even, "spilled": 8 if capability == 86 else 0}
    made = multiply(capability, experts.grouped_kernel, kind, tile, tile.kwargs["BLOCK_M"], **options)
    assert capability != 90 or kind == "16 bits" or in_flight(made) == {"0x0"}
