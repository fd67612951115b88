"""Attention over an unquantized and an 8-bit cache, against PyTorch in float64.

A row's result never depends on the other rows, nor on where its slots lie.
"""
import ctypes
import platform

import pytest
import torch
from helpers.kernels import DTYPES, attention_case, check_attention, close, draws, same

from kernels.kv_dtypes import Int8Caches
from model import ModelArgs

pytestmark = pytest.mark.kernels


def attend(isa, qkv, cos, sin, k, v, slots, visible, norms=(None, None, 0.0), window=0, sinks=None):
    return isa.ops.attend(qkv, cos, sin, *norms, k, v, slots, visible, window, sinks, 0.0)


def in_dtype(isa, k, v):
    """Return unquantized caches that hold k, v [B, S, nkv, hd]."""
    return k.clone(), v.clone()


def in_bytes(isa, k, v):
    """Return 8-bit caches that hold k, v [B, S, nkv, hd]."""
    B, S, nkv, hd = k.shape
    cache = Int8Caches.allocate(ModelArgs(8, nkv * hd, 8, 1, nkv, nkv, hd), B, S, k.dtype, "cpu", isa)[0]
    qkv = torch.cat((k, k, v), 2).flatten(2)
    slots = torch.arange(S).expand(B, -1)
    straight = torch.ones(B, S, hd // 2)
    attend(isa, qkv, straight, 0 * straight, cache.k, cache.v, slots, torch.eye(S).bool().expand(B, -1, -1))
    return cache.k, cache.v


@pytest.mark.parametrize("stored", (in_dtype, in_bytes))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", (
    (1, 1, 4, 4, 32, 5), (1, 16, 9, 3, 64, 129, True), (3, 5, 8, 1, 128, 33, True), (1, 2, 2, 2, 6, 9, True),
    (1, 5, 3, 1, 100, 17), (2, 4, 6, 3, 64, 430), (2, 5, 8, 2, 64, 140, True),
    # With windows: in one block, from block to block, beyond whole blocks, and of one slot.
    (1, 16, 9, 3, 64, 129, True, 7), (2, 4, 6, 3, 64, 430, False, 100), (1, 40, 4, 2, 32, 700, False, 150),
    (1, 3, 8, 1, 20, 300, False, 1), (1, 3, 6, 3, 20, 430, True, 150),
))
def test_attend(each_isa, dtype, shape, stored):
    case = block, qkv, k, v, shared = attention_case(dtype, *shape)
    norms = (x.float() if isinstance(x, torch.Tensor) else x for x in block.head_norms)
    more = [*norms], block.window, block.sinks
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        caches = stored(each_isa, k, v)
        given = qkv, *shared.cos_sin(), *caches, shared.slots, shared.visible, *more
        found.append(attend(each_isa, *given))
    torch.set_num_threads(1)
    same(*found)
    coarse = each_isa.layout.bytes_per_word == 4
    check_attention(case, found[0], None if stored is in_bytes else caches, coarse)


PATHS = [[0]]  # to each node of a tree
for _parent in (0, 0, 1, 1, 2, 3, 5, 6, 8, 9, 10):
    PATHS.append([*PATHS[_parent], len(PATHS)])


def tree_case(dtype, committed=127, heads=6, kv_heads=2, hd=32):
    """Return the arguments of `attend` for the nodes of PATHS; node i is at slot committed + i."""
    T, n, draw = len(PATHS), committed + 40, draws(committed)
    qkv = draw(1, T, (heads + 2 * kv_heads) * hd, dtype=dtype)
    cos, sin = draw(1, T, hd // 2).cos(), draw(1, T, hd // 2).sin()
    k, v = draw(1, n, kv_heads, hd, dtype=dtype), draw(1, n, kv_heads, hd, dtype=dtype)
    visible = (torch.arange(n) < committed).repeat(1, T, 1)
    for node, path in enumerate(PATHS):
        visible[0, node, [committed + i for i in path]] = True
    return qkv, cos, sin, k, v, torch.arange(committed, committed + T)[None], visible


@pytest.mark.parametrize("stored", (in_dtype, in_bytes))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("committed, window", ((127, 0), (300, 0), (300, 5), (390, 130)))
# Groups that end between rows, and within one; heads that are whole words, and not.
@pytest.mark.parametrize("heads, kv_heads, hd", ((6, 2, 32), (8, 1, 20), (3, 3, 6)))
def test_a_path_across_blocks_of_slots(each_isa, dtype, stored, committed, window, heads, kv_heads, hd):
    """A tree whose nodes lie on both sides of a block boundary of the summation, against each of its paths
    row by row, as in plain decoding: the same bits on 1, 2, 3 and 5 threads.
    """
    qkv, cos, sin, k, v, own, visible = tree_case(dtype, committed, heads, kv_heads, hd)
    n, found = visible.shape[-1], []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        found.append(attend(each_isa, qkv, cos, sin, *stored(each_isa, k, v), own, visible, window=window))
    torch.set_num_threads(1)
    same(found[1:], found[:1] * (len(found) - 1))
    for path in PATHS:
        keys, values = stored(each_isa, k, v)
        for depth, node in enumerate(path):
            seen = torch.zeros(1, 1, n, dtype=torch.bool)
            seen[:, :, : committed + depth + 1] = True
            row = slice(node, node + 1)
            slot = torch.tensor([[committed + depth]])
            angles = cos[:, row], sin[:, row]
            alone = attend(each_isa, qkv[:, row], *angles, keys, values, slot, seen, window=window)
        same(alone[0, 0], found[0][0, path[-1]])


def test_scores_of_any_size(each_isa):
    """Softmax weights whose ratios exceed float range, over several blocks."""
    draw, n = draws(5), 400
    qkv = draw(1, 2, 3 * 16) * 30
    k, v = draw(1, n, 1, 16) * 30, draw(1, n, 1, 16)
    visible = torch.ones(1, 2, n, dtype=torch.bool)
    visible[0, 1, 10:] = False
    zero = torch.zeros(1, 2, 8)
    slots = torch.tensor([[8, 9]])
    found = attend(each_isa, qkv, zero.cos(), zero, k, v, slots, visible)
    q = qkv[:, :, :16].double()
    scores = (q @ k[:, :, 0].double().transpose(1, 2) / 4).masked_fill(~visible, float("-inf"))
    assert scores.max() > 1000
    close(found, scores.softmax(-1) @ v[:, :, 0].double(), torch.float32)


@pytest.mark.parametrize("hd", (6, 20, 64))
def test_moving_slots_in_bytes(each_isa, hd):
    """Moving slots of an 8-bit cache equals quantizing the moved keys and values."""
    k, v = draws(1)(2, 150, 3, hd), draws(2)(2, 150, 3, hd)
    source, target = torch.tensor([[3, 9, 140], [7, 128, 0]]), torch.tensor([[9, 130, 2], [128, 7, 5]])
    moved = in_bytes(each_isa, k, v)
    each_isa.ops.move(each_isa.ops.cache_table(moved[:1], moved[1:]), hd, source, target)
    rows = torch.arange(2)[:, None]
    for x in (k, v):
        x[rows, target] = x[rows, source]
    assert all(map(torch.equal, moved, in_bytes(each_isa, k, v)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads a flag of x86")
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_subnormal_arithmetic(each_isa, dtype):
    """Arithmetic on subnormal floats is about a hundred times slower on Intel processors. A CPU flag shows
    whether any were used.
    """
    qkv, cos, sin, k, v, own, visible = tree_case(dtype)
    found, math = (ctypes.c_uint32 * 8)(), ctypes.CDLL("libm.so.6")
    old = [torch.full((size,), 1e-40) for size in range(64, 40_000, 64)]
    assert old[0].mul(2).any() and (math.fegetenv(found), found[7] & 2)[1], "the flag is not there"
    del old
    found[7] &= ~2
    math.fesetenv(found)
    attend(each_isa, qkv, cos, sin, k, v, own, visible)
    math.fegetenv(found)
    assert not found[7] & 2
