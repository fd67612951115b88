"""The GPU kernels compiled for GPUs that are not here: they fit, spill nothing, and use the tensor cores."""
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from helpers.ahead_of_time import SHARED, compile_for, dear, devices
from triton import next_power_of_2

from kernels.gpu import attention, cache, growing, ranking, sampling

pytestmark = pytest.mark.slow
EACH, THREE = devices(80, 86, 90, 100), devices(80, 90, 100)
BF16, F32, I32, I64, BOOL = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool
ANY = "any i32"
# Key/value heads, query heads that share one, head size, whether they are normed.
HEADS = {  # Llama-3.1-8B, Qwen3-8B, Vicuna, SmolLM2, Qwen2.5-7B, Qwen3-14B; sizes that are no power of two
    "llama": (8, 4, 128, False), "qwen3": (8, 4, 128, True), "vicuna": (32, 1, 128, False),
    "smollm2": (3, 3, 64, False), "qwen2.5": (4, 7, 128, False), "14b": (8, 5, 128, True),
    "80": (32, 1, 80, False), "96": (32, 1, 96, False), "256": (8, 2, 256, False),
}


def attend(
    capability, dtype, heads, rows, old=False, early=False, float8=False, window=False
):
    nkv, group, hd, norm = HEADS[heads]
    tall, keys, warps, stages = attention.tiles(rows * group, dtype, SHARED[capability], hd)
    held = torch.uint8 if float8 else dtype
    given = {
        "qkv": dtype, "cos": F32, "sin": F32, "q_norm": dtype, "k_norm": dtype,
        "k": held, "v": held, "length": I64, "local": BOOL, "oldest": I64, "out": dtype, "parts": F32,
        "marks": F32,
        "arrived": I32, "T": ANY, "M": ANY, "S": "i32", "eps": "fp32", "scale": "fp32", "HEADS": nkv,
        "GROUP": group, "HEAD": hd, "HALF": next_power_of_2(hd // 2), "VALUES": next_power_of_2(hd),
        "ROWS": tall, "KEYS": keys,
        "NEW": min(keys, 32), "SPLITS": 4, "LEAST": 128, "NORM": norm, "OLD": old, "WINDOWED": window,
        "PRECISION": "ieee" if dtype == F32 else "tf32", "CONVERTS": capability >= 89,
        "APART": capability >= 100 and dtype != F32,
    }
    return compile_for(capability, attention.attend_kernel, given, warps, stages, early)


@pytest.mark.parametrize("capability", EACH)
@pytest.mark.parametrize("heads, rows, old, window", [
    ("llama", 10, True, False), ("qwen3", 60, False, False), ("llama", 10, True, True), *dear(
        ("llama", 1, False, False), ("llama", 8, False, False), ("smollm2", 12, False, False),
        ("qwen2.5", 60, False, False), ("qwen2.5", 8, True, False), ("14b", 60, False, False),
        ("80", 60, False, False), ("96", 60, False, False), ("llama", 60, False, True),
    ),
])
def test_attention(capability, heads, rows, old, window):
    made = attend(capability, BF16, heads, rows, old, window=window)
    assert made.shared <= SHARED[capability] and made.on_tensor_cores
    assert made.chained == (capability < 100)  # miscompiled on Blackwell
    little = capability == 86 or heads == "qwen2.5"  # seven query heads share keys
    assert made.spilled <= (16 if little else 0)


@pytest.mark.parametrize("capability, rows", [*dear((86, 60)), (90, 1)])
def test_attention_over_float8(capability, rows):
    """By the device's instruction from 8.9 on, bit by bit before. What is too large becomes the largest."""
    made = attend(capability, BF16, "llama", rows, float8=True)
    assert made.shared <= SHARED[capability] and made.on_tensor_cores
    assert made.spilled <= (32 if capability == 86 else 0)
    assert ("e4m3x2" in made.ptx) == ("cvt.rn.satfinite.e4m3x2.f32" in made.ptx) == (capability >= 89)


@pytest.mark.parametrize("capability", EACH)
def test_attention_in_float32(capability):
    made = attend(capability, F32, "llama", 60)
    assert made.shared <= SHARED[capability] and made.spilled == 0


def test_programmatic_launch():
    """The kernel waits for the one before it; it reads nothing before."""
    made = attend(90, BF16, "llama", 1, early=True)
    assert made.spilled == 0 and made.ptx.count("griddepcontrol.wait") == 1
    before, _, after = made.ptx.partition("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after
    assert not re.search(r"\b(ld|cp\.async|st)\.global|cp\.async", before)
    assert "griddepcontrol" not in attend(90, BF16, "llama", 1).ptx


# The kernels around the networks, at the sizes of the paper's tree and a vocabulary of 128k.
KINDS = {  # of arguments, by name; others in capitals are any integers, the rest int64
    "V": "i32", "plane_size": ANY, "kv": BF16,
    **dict.fromkeys(("arrived", "place", "order", "bars"), I32),
    **dict.fromkeys(("beam_sees", "next_sees", "ancestors", "done"), BOOL),
    **dict.fromkeys(("logits", "noise", "sums", "temperature", "top_p", "out"), F32),
    **dict.fromkeys((f"{of}scores" for of in ("", "old_", "beam_", "all_", "next_", "tree_")), F32),
}
BEST, CHUNKS = {"CHUNK": ranking.CHUNK, "NOISY": True}, {"CHUNK": sampling.SORTED, "CHUNKS": 63}
OTHERS = {  # the kernel, its warps, constants and arguments of other kinds
    "rank": (ranking.best_kernel, 4, BEST | {
        "BEST": 16, "CHUNKS": 16, "CHOSEN": False, "NAMED": True, "SCORED": True}),
    "draw": (ranking.best_kernel, 4, BEST | {
        "BEST": 1, "CHUNKS": 63, "CHOSEN": True, "NAMED": False, "SCORED": False}),
    "extend": (growing.extend_kernel, 4, {"BEST": 16, "CHILDREN": 128, "SEEN": 128}),
    "prune": (growing.prune_kernel, 8, {"CANDIDATES": 1024, "NODES": 64, "SOME": 16}),
    "accept": (growing.accept_kernel, 4, {"NODES": 64, "WINDOW": 16}),
    "emit": (growing.emit_kernel, 1, {"out": I64, "WINDOW": 16, "SOME": 16}),
    "move": (cache.move_kernel, 4, {"S": "i32", "HEAD": 128, "HEADS": 8, "WINDOW": 16, "WIDTH": 128}),
    "gumbel": (sampling.gumbel_kernel, 4, {"CHUNK": sampling.CHUNK}),
    "sort": (sampling.sort_kernel, 8, CHUNKS), "weigh": (sampling.weigh_kernel, 8, CHUNKS | {"WIDE": 64}),
    "bar": (sampling.bar_kernel, 8, CHUNKS | {"WIDE": 64}), "cut": (sampling.cut_kernel, 4, {"CHUNK": 2048}),
}


def arguments(kernel, given: dict, integers=ANY) -> dict:
    """Its arguments for `compile_for`. integers: what any integer is."""
    names = [param.name for param in kernel.params if param.name != "EARLY"]
    kinds = [(KINDS | given).get(name, ANY if name.isupper() else I64) for name in names]
    return {name: integers if kind == ANY else kind for name, kind in zip(names, kinds)}


@pytest.mark.parametrize("capability", THREE)
@pytest.mark.parametrize("one", (False, *dear(True)))
@pytest.mark.parametrize("name", OTHERS)
def test_the_others(capability, name, one):
    """one: all integers are 1, for which Triton compiles a kernel of its own."""
    kernel, warps, given = OTHERS[name]
    made = compile_for(capability, kernel, arguments(kernel, given, 1 if one else ANY), warps)
    assert made.shared <= SHARED[capability] and made.spilled == 0
