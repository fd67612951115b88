"""Attention over an unquantized and an int8 cache, against PyTorch in float64.

It is batch-invariant, also across block boundaries of slots.
"""
import ctypes
import platform

import pytest
import torch
from helpers.kernels import DTYPES, attention_case, check_attention, close, draws, same

from kernels.cpu_cache import head_norms
from kernels.kv_dtypes import Int8Caches
from model import ModelArgs

pytestmark = pytest.mark.kernels


def attend(isa, qkv, cos, sin, k, v, slots, visible, norms=(None, None, 0.0), window=0, sinks=None):
    return isa.ops.attend(qkv, cos, sin, *norms, k, v, slots, visible, window, sinks, 0.0)


def in_dtype(isa, k, v):
    """Return unquantized caches with k, v [B, S, nkv, hd]."""
    return k.clone(), v.clone()


def in_int8(isa, k, v):
    """Return int8 caches with k, v [B, S, nkv, hd]."""
    B, S, nkv, hd = k.shape
    cache = Int8Caches.allocate(ModelArgs(8, nkv * hd, 8, 1, nkv, nkv, hd), B, S, k.dtype, "cpu", isa)[0]
    qkv = torch.cat((k, k, v), 2).flatten(2)
    slots = torch.arange(S).expand(B, -1)
    no_rotation = torch.ones(B, S, hd // 2)
    visible = torch.eye(S).bool().expand(B, -1, -1)
    attend(isa, qkv, no_rotation, 0 * no_rotation, cache.k, cache.v, slots, visible)
    return cache.k, cache.v


@pytest.mark.parametrize("stored", (in_dtype, in_int8))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", (
    (1, 1, 4, 4, 32, 5), (1, 16, 9, 3, 64, 129, True), (3, 5, 8, 1, 128, 33, True), (1, 2, 2, 2, 6, 9, True),
    (1, 5, 3, 1, 100, 17), (2, 4, 6, 3, 64, 430), (2, 5, 8, 2, 64, 140, True),
    # Sliding windows: within a block, across blocks, larger than a block, of one slot.
    (1, 16, 9, 3, 64, 129, True, 7), (2, 4, 6, 3, 64, 430, False, 100), (1, 40, 4, 2, 32, 700, False, 150),
    (1, 3, 8, 1, 20, 300, False, 1), (1, 3, 6, 3, 20, 430, True, 150),
))
def test_attend(each_isa, dtype, shape, stored):
    case = block, qkv, k, v, shared = attention_case(dtype, *shape)
    norms = (x.float() if isinstance(x, torch.Tensor) else x for x in head_norms(block))
    options = [*norms], block.window, block.sinks
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        caches = stored(each_isa, k, v)
        inputs = qkv, *shared.cos_sin(), *caches, shared.slots, shared.visible, *options
        results.append(attend(each_isa, *inputs))
    torch.set_num_threads(1)
    same(*results)
    int8_products = each_isa.layout.bytes_per_word == 4
    check_attention(case, results[0], None if stored is in_int8 else caches, int8_products)


PATHS = [[0]]  # path of nodes from the root to each node of a tree
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


@pytest.mark.parametrize("stored", (in_dtype, in_int8))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("committed, window", ((127, 0), (300, 0), (300, 5), (390, 130)))
# Groups that end between rows, and within one; heads that are whole words, and not.
@pytest.mark.parametrize("heads, kv_heads, hd", ((6, 2, 32), (8, 1, 20), (3, 3, 6)))
def test_tree_pass_equals_token_by_token(each_isa, dtype, stored, committed, window, heads, kv_heads, hd):
    """A pass over a tree whose slots cross a block boundary has the same bits as decoding each path token by
    token, on 1, 2, 3 and 5 threads.
    """
    qkv, cos, sin, k, v, slots, visible = tree_case(dtype, committed, heads, kv_heads, hd)
    n, results = visible.shape[-1], []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        caches = stored(each_isa, k, v)
        results.append(attend(each_isa, qkv, cos, sin, *caches, slots, visible, window=window))
    torch.set_num_threads(1)
    same(results[1:], results[:1] * (len(results) - 1))
    for path in PATHS:
        keys, values = stored(each_isa, k, v)
        for depth, node in enumerate(path):
            visible_slots = torch.zeros(1, 1, n, dtype=torch.bool)
            visible_slots[:, :, : committed + depth + 1] = True
            row = slice(node, node + 1)
            slot = torch.tensor([[committed + depth]])
            angles = cos[:, row], sin[:, row]
            single = attend(each_isa, qkv[:, row], *angles, keys, values, slot, visible_slots, window=window)
        same(single[0, 0], results[0][0, path[-1]])


def test_large_scores(each_isa):
    """Ratios of softmax weights exceed the range of float32, across blocks."""
    draw, n = draws(5), 400
    qkv = draw(1, 2, 3 * 16) * 30
    k, v = draw(1, n, 1, 16) * 30, draw(1, n, 1, 16)
    visible = torch.ones(1, 2, n, dtype=torch.bool)
    visible[0, 1, 10:] = False
    zero = torch.zeros(1, 2, 8)
    slots = torch.tensor([[8, 9]])
    result = attend(each_isa, qkv, zero.cos(), zero, k, v, slots, visible)
    q = qkv[:, :, :16].double()
    scores = (q @ k[:, :, 0].double().transpose(1, 2) / 4).masked_fill(~visible, float("-inf"))
    assert scores.max() > 1000
    close(result, scores.softmax(-1) @ v[:, :, 0].double(), torch.float32)


@pytest.mark.parametrize("hd", (6, 20, 64))
def test_moved_int8_slots_equal_requantized_ones(each_isa, hd):
    """Moving slots of an int8 cache equals quantizing the moved keys and values."""
    k, v = draws(1)(2, 150, 3, hd), draws(2)(2, 150, 3, hd)
    source, target = torch.tensor([[3, 9, 140], [7, 128, 0]]), torch.tensor([[9, 130, 2], [128, 7, 5]])
    moved = in_int8(each_isa, k, v)
    each_isa.ops.move(each_isa.ops.cache_table(moved[:1], moved[1:]), hd, source, target)
    rows = torch.arange(2)[:, None]
    for x in (k, v):
        x[rows, target] = x[rows, source]
    assert all(map(torch.equal, moved, in_int8(each_isa, k, v)))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads a flag of x86")
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_subnormal_arithmetic(each_isa, dtype):
    """Arithmetic on subnormal floats is about a hundred times slower on Intel processors. The flag DE of
    MXCSR shows whether there was any.
    """
    qkv, cos, sin, k, v, slots, visible = tree_case(dtype)
    fenv, math = (ctypes.c_uint32 * 8)(), ctypes.CDLL("libm.so.6")
    subnormals = [torch.full((size,), 1e-40) for size in range(64, 40_000, 64)]
    assert subnormals[0].mul(2).any() and (math.fegetenv(fenv), fenv[7] & 2)[1], "the flag does not work"
    del subnormals
    fenv[7] &= ~2
    math.fesetenv(fenv)
    attend(each_isa, qkv, cos, sin, k, v, slots, visible)
    math.fegetenv(fenv)
    assert not fenv[7] & 2
