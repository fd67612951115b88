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
from kernels.gpu import attention, delta, dense, experts, products, sampling

pytestmark = pytest.mark.slow
ALL_DEVICES, THREE_DEVICES = devices(80, 86, 89, 90, 100, 120), devices(80, 90, 100)
BF16, F16, F32, I32, I64, BOOL = (
    torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.bool
)
ANY = "any i32"
# Argument name -> type. Default: any integer if the name is in capitals, else an int64 tensor.
ARGUMENT_TYPES = {
    "V": "i32", "S": "i32", "eps": "fp32", "kv": BF16, "local": BOOL,
    **dict.fromkeys(("arrived", "order", "tiles"), I32),
    **dict.fromkeys(("logits", "noise", "scores", "chunk_sums", "peak", "temperature", "top_p"), F32),
    **dict.fromkeys(("rates", "state"), F32), "scale": "fp32", "T": "any i32", "RING": "i32",
    **dict.fromkeys(("mixed", "inputs", "projected", "taps", "log_decay", "step_bias"), BF16),
    **dict.fromkeys(("out", "cos", "sin", "partial_sums", "partial_softmax"), F32),
}


def compiled(capability, kernel, types: dict, spilled=0, integers=ANY, **options):
    """Compile a kernel. Assert that shared memory fits, and register spills are at most `spilled` bytes.

    types: types of arguments. integers: type of integer arguments.
    """
    names = [param.name for param in kernel.params]
    kinds = [(ARGUMENT_TYPES | types).get(name, ANY if name.isupper() else I64) for name in names]
    arguments = {name: integers if kind == ANY else kind for name, kind in zip(names, kinds)}
    binary = compile_for(capability, kernel, arguments, **options)
    assert binary.shared <= SHARED[capability] and binary.spilled <= spilled
    return binary


def in_flight(binary) -> set[str]:
    """Return the numbers of unfinished wgmma operations at waits on an H100."""
    assert "wgmma" in binary.ptx
    return set(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)", binary.sass))


# (key/value heads, query heads per key/value head, head size, QK norm). The last rows have other head sizes.
HEADS = {  # Llama-3.1-8B, Qwen3-8B, Vicuna, SmolLM2, Qwen2.5-7B, Qwen3-14B
    "llama": (8, 4, 128, False), "qwen3": (8, 4, 128, True), "vicuna": (32, 1, 128, False),
    "smollm2": (3, 3, 64, False), "qwen2.5": (4, 7, 128, False), "14b": (8, 5, 128, True),
    "80": (32, 1, 80, False), "96": (32, 1, 96, False), "256": (8, 2, 256, False),
}


def attend(
    capability, dtype, heads, rows, cached_nodes=False, window=False, cache_dtype=None, spilled=0, pdl=False
):
    nkv, group, hd, norm = HEADS[heads]
    block_m, keys, warps, stages = attention.tile_config(rows * group, dtype, SHARED[capability], hd)
    types = {
        **dict.fromkeys(("qkv", "q_norm", "k_norm", "out"), dtype),
        **dict.fromkeys(("k", "v"), cache_dtype or dtype), "scale": "fp32", "HEADS": nkv, "GROUP": group,
        "HEAD_DIM": hd, "BLOCK_D": next_power_of_2(hd), "BLOCK_M": block_m, "BLOCK_N": keys, "SPLITS": 4,
        "CACHED_NODES": cached_nodes,
    }
    types |= {} if norm else {"q_norm": None, "k_norm": None}
    types |= {} if window else {"oldest": None}
    options = {"warps": warps, "stages": stages, "pdl": pdl}
    binary = compiled(capability, attention.attend_kernel, types, spilled, **options)
    assert binary.on_tensor_cores or dtype == F32
    return binary


@pytest.mark.parametrize("capability", ALL_DEVICES)
@pytest.mark.parametrize("heads, rows, cached_nodes, window", [
    ("llama", 10, True, False), ("qwen3", 60, False, False), ("llama", 10, True, True), *expensive(
        ("llama", 1, False, False), ("llama", 8, False, False), ("smollm2", 12, False, False),
        ("qwen2.5", 60, False, False), ("qwen2.5", 8, True, False), ("14b", 60, False, False),
        ("80", 60, False, False), ("96", 60, False, False), ("llama", 60, False, True),
    ),
])
def test_attention(capability, heads, rows, cached_nodes, window):
    # These GPUs have less shared memory; Qwen2.5's groups of 7 query heads are padded to 8.
    may_spill = capability in (86, 89, 120) or heads == "qwen2.5"
    binary = attend(capability, BF16, heads, rows, cached_nodes, window, spilled=40 if may_spill else 0)
    assert binary.chained == (capability < 100)  # miscompiled on Blackwell


@pytest.mark.parametrize("capability, rows", [*expensive((86, 60)), (90, 1)])
def test_attention_over_float8(capability, rows):
    """Conversion by hardware from capability 8.9 on, by integer arithmetic before; it saturates."""
    spilled = 32 if capability == 86 else 0
    binary = attend(capability, BF16, "llama", rows, cache_dtype=torch.uint8, spilled=spilled)
    assert ("e4m3x2" in binary.ptx) == ("cvt.rn.satfinite.e4m3x2.f32" in binary.ptx) == (capability >= 89)


@pytest.mark.parametrize("capability", ALL_DEVICES)
def test_attention_in_float32(capability):
    attend(capability, F32, "llama", 60)


def test_programmatic_dependent_launch():
    """The kernel does not access global memory before it has waited for the previous kernel."""
    binary = attend(90, BF16, "llama", 1, pdl=True)
    before, _, after = binary.ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after and "griddepcontrol.wait" not in after
    assert not re.search(r"\b(ld|cp\.async|st)\.global|cp\.async", before)
    assert "griddepcontrol" not in attend(90, BF16, "llama", 1).ptx


@pytest.mark.parametrize("capability", ALL_DEVICES)
@pytest.mark.parametrize("gated, pdl", [(True, True), (False, True), *expensive((False, False))])
def test_dense(capability, gated, pdl):
    """Two blocks fit on one multiprocessor, so that the next kernel can start early; it prefetches weights
    into L2 before it waits.
    """
    pdl = pdl and capability >= 90
    tile, _ = products.tile_config(16, BF16, 16, SHARED[capability])
    options = {"pdl": pdl, "dense": True, "gated": gated}
    binary = multiply(capability, "16 bits", tile, dense.MAX_TOKENS, **options)
    assert binary.on_tensor_cores and (capability != 90 or 2 * binary.shared <= SHARED[90])
    before = binary.ptx.partition("griddepcontrol.wait")[0]
    assert not pdl or ("prefetch.global.L2" in before and not re.search(r"\b(ld|st)\.global", before))


# The kernels around the networks, at the sizes of the paper's tree and a vocabulary of 128k.
SORTED = {"CHUNK": sampling.SORTED_CHUNK, "CHUNKS": 63}
DELTA = {  # Qwen3.5-27B
    "NK": 16, "NV": 48, "DK": 128, "DV": 128, "BLOCK_K": 128, "COLUMNS": delta.COLUMNS, "BLOCK": BLOCK,
    "LEVELS": MAX_LEVELS,
}
OTHERS = {  # name -> (kernel, warps, argument types and constants)
    "top_k": (sampling.top_k_kernel, 4, {
        "CHUNK": sampling.RANKED_CHUNK, "BLOCK_TOP": 16, "CHUNKS": 16,
        "BLOCK_CHUNKS": 16}),
    "sort": (sampling.sort_kernel, 8, SORTED),
    "threshold": (sampling.threshold_kernel, 8, SORTED | {"BLOCK_CHUNKS": 64}),
    "sort experts": (experts.sort_kernel, 4, {
        "S": ANY, "ONE_TILE": True, "BLOCK_M": 16, "CHUNK": experts.SORT_CHUNK}),
    "write tokens": (delta.write_kernel, 4, {"NV": 48, "TAPS": 4, "BLOCK": delta.CHANNELS, "VALUES": "i32"}),
    "advance states": (delta.delta_kernel, 4, DELTA | {"ADVANCE": True}),
    "DeltaNet layers": (delta.delta_kernel, 4, DELTA | {"ADVANCE": False}),
}


@pytest.mark.parametrize("capability", THREE_DEVICES)
@pytest.mark.parametrize("all_ones", (False, *expensive(True)))
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(capability, name, all_ones):
    """all_ones: integer arguments are 1, for which Triton compiles a special variant."""
    kernel, warps, types = OTHERS[name]
    compiled(capability, kernel, types, integers=1 if all_ones else ANY, warps=warps)


REGISTERS = 65536  # of a multiprocessor
WEIGHTS = {  # bits, group, dtype of scales
    "16 bits": (16, 0, BF16), "int8": (8, 0, F32), "q4/32": (4, 32, F32), "q4/64": (4, 64, F32),
    "q4/128": (4, 128, F32), "mxfp4": (4, 32, torch.uint8), "q8/16": (8, 16, F32), "q8/32": (8, 32, F32),
    "f8/128": (8, 128, F32),
}


def multiply(
    capability, kind, tile, rows, dtype=BF16, even=True, spilled=0, experts=False, dense=False, gated=False,
    pdl=False,
):
    """Compile the matmul kernel for weights of a kind, with a tile of this many rows. experts: grouped."""
    bits, group, scale = WEIGHTS[kind]
    types = {
        **dict.fromkeys(("x", "bias", "residual", "out", "norm", "weighted"), dtype), "scale": scale,
        **dict.fromkeys(("N", "K", "STRIDE"), "i32"), **dict.fromkeys(("squares", "next_squares"), F32),
        "weight": dtype if bits == 16 else torch.int16, "BITS": bits, "GROUP": group, "EVEN_K": even,
        "FLOATS": kind in ("f8/128", "mxfp4"), "GATED": gated, "BLOCK_M": rows, **tile.kwargs,
        **dict.fromkeys(("totals", "shifts"), F32 if kind.startswith("q") else None),
    }
    unused = [*(() if experts else ("order", "tiles")), *(("scale",) if bits == 16 else ())]
    unused += ["bias", "residual", "norm"] if gated else ["residual"] if experts else []
    unused += [] if dense else ["squares", "norm"] if experts else ["bias", "squares", "norm"]
    unused += ["weighted", "next_squares"] if "norm" in unused else []
    options = {"warps": tile.num_warps, "stages": tile.num_stages, "pdl": pdl}
    kernel = products.product_kernel
    binary = compiled(capability, kernel, types | dict.fromkeys(unused), spilled, **options)
    assert binary.on_tensor_cores == (dtype != F32 or kind.startswith("q"))  # minima are summed on them
    return binary


def product_cases():
    """Return (compute capability, kind of weights, rows of a tile) of bfloat16 matmuls."""
    for capability in (80, 86, 89, 90, 100, 120):
        for kind in ("int8", "q4/32", "q4/64", "q4/128", "q8/16", "q8/32", "f8/128"):
            bits, group, _ = WEIGHTS[kind]
            for rows in sorted({products.block_m(rows, BF16, bits, group) for rows in (1, 17, 60, 130)}):
                case = capability, kind, rows
                yield case if case in QUICK else expensive(case)[0]


QUICK = (86, "int8", 128), (90, "int8", 64), (90, "q4/64", 16), (90, "q8/16", 16)


@pytest.mark.parametrize("capability, kind, rows", product_cases())
def test_products(capability, kind, rows):
    tile, resident = products.tile_config(rows, BF16, WEIGHTS[kind][0], SHARED[capability])
    may_spill = capability in (86, 89, 120) and kind != "int8"
    spilled = 24 if may_spill else 8 if capability == 80 and kind == "q4/32" else 0
    binary = multiply(capability, kind, tile, rows, spilled=spilled)
    assert not binary.chained
    if capability == 90:
        threads = 32 * tile.num_warps
        assert resident * (binary.shared + 1024) <= SHARED[90] + 1024
        assert resident * threads * -(-binary.registers // 8) * 8 <= REGISTERS
        assert in_flight(binary) == {"0x0"}  # wgmma has finished before its inputs are overwritten


@pytest.mark.parametrize("shared", sorted({*SHARED.values()} - {SHARED[75]}))
@pytest.mark.parametrize("bits, rows", [(bits, rows) for bits in (4, 8) for rows in (16, 32, 64, 128)])
def test_tiles_fit_in_shared_memory(shared, bits, rows):
    """By an upper bound for all versions of Triton."""
    tile, _ = products.tile_config(rows, BF16, bits, shared)
    stage_bytes = tile.kwargs["BLOCK_K"] * (2 * rows + tile.kwargs["BLOCK_N"] * bits // 8)
    assert tile.num_stages > 1 and tile.num_stages * stage_bytes <= shared


@pytest.mark.parametrize("capability", THREE_DEVICES)
@pytest.mark.parametrize("dtype, even", [(BF16, False), (F16, True), (F32, True), (F32, False)])
@pytest.mark.parametrize("kind", ("int8", "q4/64"))
def test_products_of_other_dtypes_and_sizes(capability, dtype, even, kind):
    """`even` False: the number of inputs is not a multiple of the tile."""
    bits, group, _ = WEIGHTS[kind]
    rows = products.block_m(60, dtype, bits, group)
    tile, _ = products.tile_config(rows, dtype, bits, SHARED[capability])
    multiply(capability, kind, tile, rows, dtype, even)


@pytest.mark.parametrize("capability", (90, *expensive(80, 86, 89, 100, 120)))
@pytest.mark.parametrize("kind, rows", [
    ("mxfp4", 60), ("q4/32", experts.STORED_BLOCK_M),
    *expensive(*product(("16 bits", "int8", "mxfp4"), (1, 17, 60, 128))),
    *expensive(*product(("q8/16", "f8/128"), (1, experts.STORED_BLOCK_M))),
])
def test_experts(capability, kind, rows):
    """gpt-oss has 2880 inputs, which the tile for few rows does not divide."""
    block = experts.block_m(rows, BF16, stored=kind.startswith(("q", "f")))
    tile, _ = products.tile_config(block, BF16, WEIGHTS[kind][0], SHARED[capability], grouped=True)
    options = {"even": kind != "mxfp4" or rows > 1, "spilled": 8 if capability == 86 else 0}
    binary = multiply(capability, kind, tile, block, experts=True, **options)
    assert capability != 90 or kind == "16 bits" or in_flight(binary) == {"0x0"}
