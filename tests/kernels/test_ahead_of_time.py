"""The GPU kernels compiled for GPUs that are not here: they fit, spill nothing, and use the tensor cores."""
import re

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from helpers.ahead_of_time import SHARED, compile_for, dear, devices
from triton import next_power_of_2

from kernels.gpu import attention, cache, growing, here, ranking, sampling

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
    capability, dtype, heads, rows, old=False, early=False, float8=False, window=False, given=()
):
    nkv, group, hd, norm = HEADS[heads]
    tall, keys, warps, stages = attention.tiles(rows * group, dtype, SHARED[capability], hd)
    held = torch.uint8 if float8 else dtype
    given = dict(given) or {"T": ANY, "M": ANY}
    given = {
        "qkv": dtype, "cos": F32, "sin": F32, "q_norm": dtype, "k_norm": dtype,
        "k": held, "v": held, "length": I64, "local": BOOL, "oldest": I64, "out": dtype, "parts": F32,
        "marks": F32,
        "arrived": I32, **given, "S": "i32", "eps": "fp32", "scale": "fp32", "HEADS": nkv,
        "GROUP": group, "HEAD": hd, "HALF": next_power_of_2(hd // 2), "VALUES": next_power_of_2(hd),
        "ROWS": tall, "KEYS": keys,
        "NEW": min(keys, 32), "SPLITS": 4, "LEAST": 128, "NORM": norm, "OLD": old, "WINDOWED": window,
        "PRECISION": "ieee" if dtype == F32 else "tf32", "CONVERTS": capability >= 89,
        "APART": capability >= 100 and dtype != F32,
    }
    return compile_for(capability, attention.attend_kernel, given, warps, stages, early)


@pytest.mark.parametrize("capability", EACH)
@pytest.mark.parametrize("heads, rows, old", [
    ("llama", 10, True), ("qwen3", 60, False), *dear(
        ("llama", 1, False), ("llama", 8, False), ("smollm2", 12, False), ("qwen2.5", 60, False),
        ("qwen2.5", 8, True), ("14b", 60, False), ("80", 60, False), ("96", 60, False), ("llama", 512, False),
    ),
])
def test_attention(capability, heads, rows, old):
    made = attend(capability, BF16, heads, rows, old)
    assert made.shared <= SHARED[capability] and made.on_tensor_cores
    assert made.chained == (capability < 100)  # miscompiled on Blackwell
    little = capability == 86 or heads == "qwen2.5"  # seven query heads share keys
    assert made.spilled <= (16 if little else 0)


@pytest.mark.parametrize("capability", EACH)
@pytest.mark.parametrize("rows, old", ((10, True), *dear((60, False))))
def test_attention_with_a_window(capability, rows, old):
    made = attend(capability, BF16, "llama", rows, old, window=True)
    assert made.shared <= SHARED[capability] and made.on_tensor_cores and made.spilled == 0


@pytest.mark.parametrize("capability, rows", [*dear((86, 60)), (90, 1)])
def test_attention_over_float8(capability, rows):
    """By the device's instruction from 8.9 on, bit by bit before. What is too large becomes the largest."""
    made = attend(capability, BF16, "llama", rows, float8=True)
    assert made.shared <= SHARED[capability] and made.on_tensor_cores
    assert made.spilled <= (32 if capability == 86 else 0)
    assert ("e4m3x2" in made.ptx) == ("cvt.rn.satfinite.e4m3x2.f32" in made.ptx) == (capability >= 89)


@pytest.mark.parametrize("capability", EACH)
@pytest.mark.parametrize("rows", (*dear(1), 60))
def test_large_heads_fit(capability, rows):
    made = attend(capability, BF16, "256", rows)
    assert made.shared <= SHARED[capability] and made.on_tensor_cores


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
REQUESTS, ROW = {"temperature": F32, "top_k": I64, "top_p": F32}, {"T": ANY, "V": "i32"}
CHUNKS = {"CHUNK": sampling.SORTED, "CHUNKS": 63}
OTHERS = {
    "rank": (ranking.best_kernel, {
        "logits": F32, "noise": F32, "which": I64, "names": I64, "scores": F32, "ids": I64, "found": I64,
        "sums": F32, "arrived": I32, "V": "i32", "K": ANY, "ROWS": ANY, "NOISE_ROWS": ANY, "BEST": 16,
        "CHUNK": ranking.CHUNK, "CHUNKS": 16, "NOISY": True, "CHOSEN": False, "NAMED": True, "SCORED": True,
    }, 4),
    "draw": (ranking.best_kernel, {
        "logits": F32, "noise": F32, "which": I64, "names": I64, "scores": F32, "ids": I64, "found": I64,
        "sums": F32, "arrived": I32, "V": "i32", "K": ANY, "ROWS": ANY, "NOISE_ROWS": ANY, "BEST": 1,
        "CHUNK": ranking.CHUNK, "CHUNKS": 63, "NOISY": True, "CHOSEN": True, "NAMED": False, "SCORED": False,
    }, 4),
    "extend": (growing.extend_kernel, {
        "scores": F32, "tokens": I64, "old_scores": F32, "old_tokens": I64, "old_parents": I64,
        "beam_scores": F32, "beam_flat": I64, "beam_sees": BOOL, "all_scores": F32, "all_tokens": I64,
        "all_parents": I64, "rows": I64, "next_scores": F32, "next_tokens": I64, "next_flat": I64,
        "next_sees": BOOL, "C": ANY, "K": ANY, "M": ANY, "BEST": 16, "CHILDREN": 128, "SEEN": 128,
    }, 4),
    "prune": (growing.prune_kernel, {
        "scores": F32, "tokens": I64, "parents": I64, "root": I64, "tree_tokens": I64, "tree_parent": I64,
        "depth": I64, "ancestors": BOOL, "tree_scores": F32, "place": I32, "C": ANY, "T": ANY, "LEVELS": ANY,
        "CANDIDATES": 1024, "NODES": 64, "SOME": 16,
    }, 8),
    "accept": (growing.accept_kernel, {
        "tokens": I64, "parent": I64, "depth": I64, "chosen": I64, "path": I64, "count": I64, "T": ANY,
        "W": ANY, "NODES": 64, "WINDOW": 16,
    }, 4),
    "emit": (growing.emit_kernel, {
        "tokens": I64, "count": I64, "text": I64, "length": I64, "done": BOOL, "out": I64, "limit": I64,
        "stop_ids": I64, "appended": I64, "W": ANY, "S": ANY, "STOPS": ANY, "WIDTH": ANY, "WINDOW": 16,
        "SOME": 16,
    }, 1),
    "move": (cache.move_kernel, {
        "kv": BF16, "source": I64, "target": I64, "S": "i32", "W": ANY, "plane_size": ANY, "HEAD": 128,
        "HEADS": 8,
        "WINDOW": 16, "WIDTH": 128,
    }, 4),
    "gumbel": (sampling.gumbel_kernel, {
        "key": I64, "positions": I64, "temperature": F32, "out": F32, "W": ANY, "V": "i32",
        "CHUNK": sampling.CHUNK,
    }, 4),
    "sort": (sampling.sort_kernel, {"logits": F32, **REQUESTS, "order": I32, **ROW, **CHUNKS}, 8),
    "weigh": (sampling.weigh_kernel, {"order": I32, **REQUESTS, "mass": I64, **ROW, **CHUNKS, "WIDE": 64}, 8),
    "bar": (sampling.bar_kernel, {
        "order": I32, "mass": I64, **REQUESTS, "bars": I32, **ROW, **CHUNKS, "WIDE": 64,
    }, 8),
    "cut": (sampling.cut_kernel, {"logits": F32, "bars": I32, "out": F32, "V": "i32", "CHUNK": 2048}, 4),
}


@pytest.mark.parametrize("capability", THREE)
@pytest.mark.parametrize("one", (False, *dear(True)))
@pytest.mark.parametrize("name", OTHERS)
def test_the_others(capability, name, one):
    """one: all integers are 1, for which Triton compiles a kernel of its own."""
    kernel, given, warps = OTHERS[name]
    if one:
        given = {name: 1 if kind == ANY else kind for name, kind in given.items()}
    made = compile_for(capability, kernel, given, warps)
    assert made.shared <= SHARED[capability] and made.spilled == 0


@pytest.mark.dear
def test_attention_of_one_row():
    made = attend(90, BF16, "llama", 1, given={"T": 1, "M": 1})
    assert made.shared <= SHARED[90] and made.on_tensor_cores and made.spilled == 0


def test_blackwell_begins_at_10_0(monkeypatch):
    for capability, blackwell in (((9, 0), False), ((10, 0), True), ((12, 0), True)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, found=capability: found)
        assert here.is_blackwell.__wrapped__(torch.device("cuda")) == blackwell


def test_no_two_groups_of_warps_compute_the_same():
    """One multiplies 64 rows at once on an H100."""
    for rows in (1, 16, 17, 33, 60, 300):
        tall, _, warps, _ = attention.tiles(rows, BF16, SHARED[90], 128)
        assert warps == 4 and tall <= 64, rows
