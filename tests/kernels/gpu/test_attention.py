"""Tree attention in one kernel against its definition: masked attention over the whole cache."""
import pytest
import torch
from helpers.ahead_of_time import dear

from kernels.backend import Sight
from kernels.float8 import Float8Caches, from_bytes, to_bytes
from kernels.gpu import attention
from kernels.gpu.cache import Float8LayerCache, Float8LayerCaches, LayerCache, LayerCaches, move_slots
from kernels.gpu.launch import counters
from model import Block, KVCaches, ModelArgs, Pass, inverse_frequencies, rope_table
from tree import visible_slots

DTYPES = [(torch.float32, 2e-6)]
if torch.cuda.is_available():  # the interpreter multiplies 16-bit numbers in its own way
    DTYPES += [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)]


def case(device, dtype, B, T, nh, nkv, hd, M, lengths, norm=False, window=0, layers=2, slots=200):
    draw = torch.Generator().manual_seed(B * 1000 + T * 10 + M)
    args = ModelArgs(32, nh * hd, 32, layers, nh, nkv, hd, qk_norm=norm, windows=(window,) * layers)
    block = Block(args).to(dtype)
    if norm:
        block.q_norm.weight.data = torch.rand(hd, generator=draw).to(dtype) + 0.5
        block.k_norm.weight.data = torch.rand(hd, generator=draw).to(dtype) + 0.5
    qkv = torch.randn(B, T, (nh + 2 * nkv) * hd, generator=draw).to(device, dtype)
    kv = torch.randn(layers, 2, B, nkv, slots, hd, generator=draw).to(device, dtype)
    length = torch.tensor(lengths, device=device)
    local = torch.rand(B, T, M, generator=draw) < 0.4
    local[:, torch.arange(T), M - T + torch.arange(T)] = True  # a row sees itself
    return args, block.to(device), qkv, kv, length, local.to(device)


def seen_by(length, local, window):
    """What `attention.attend` is told of a window."""
    sight = Sight(None, length, local)
    return (sight.within(window) if window else sight)[1:]


CASES = (  # B, T, nh, nkv, hd, M, lengths, norm, window
    (1, 1, 4, 2, 16, 1, [130], False, 0),
    (2, 5, 4, 2, 16, 5, [3, 150], True, 0),
    (2, 4, 6, 3, 20, 12, [40, 0], False, 0),  # the beam of a draft level: eight rows of M are in the cache
    (2, 4, 6, 3, 20, 12, [40, 0], False, 3), (2, 5, 4, 2, 16, 5, [3, 150], True, 40),
    (1, 40, 4, 2, 16, 40, [100], False, 9),
    *dear(*zip((
        (1, 1, 4, 2, 16, 1, [0], False, 0), (1, 1, 9, 3, 64, 1, [77], False, 0),
        (1, 60, 4, 1, 16, 60, [100], False, 0), (3, 10, 2, 2, 128, 30, [64, 65, 101], True, 0),
        (1, 64, 4, 4, 16, 64, [96], False, 0),
        (1, 3, 7, 1, 80, 3, [70], True, 0), (2, 2, 5, 1, 96, 4, [9, 65], False, 0),
        (1, 2, 2, 1, 256, 2, [40], False, 0),
    ))),
)


@pytest.fixture
def attend(device, monkeypatch):
    """attend(dtype, sizes, kind, hold): the kernel's result, the definition's over caches of this kind, the
    caches that each has written, and the definition over other caches. hold: numbers to what is stored.
    """
    monkeypatch.setattr(attention, "programs_at_once", lambda device: 16)  # so that keys are split

    def both(dtype, sizes, kind, hold=lambda kv: kv):
        args, block, qkv, kv, length, local = case(device, dtype, *sizes)
        sees = seen_by(length, local, sizes[-1])
        T, M, kv = qkv.shape[1], local.shape[2], hold(kv)
        own, slots = length[:, None] + M - T + torch.arange(T, device=device), torch.arange(kv.shape[4])
        inverse = inverse_frequencies(args).to(device)
        shared = Pass(args, inverse, own + 3, own, visible_slots(slots.to(device), length, local))
        norms = (block.q_norm.weight, block.k_norm.weight) if args.qk_norm else (None, None)
        angles, mine = rope_table(args, inverse, own + 3), kv.clone()
        found, again = (
            attention.attend(qkv, *angles, *norms, args.norm_eps, mine, 1, *sees) for _ in range(2)
        )
        assert torch.equal(found, again)
        want = kind(kv, 1).attend(block, qkv, shared)
        assert torch.equal(mine[0], kv[0])  # another layer's
        return found, want, mine, kv, lambda other: LayerCache(other, 1).attend(block, qkv, shared)

    return both


@pytest.mark.parametrize("dtype, limit", DTYPES)
@pytest.mark.parametrize("sizes", CASES)
def test_attention(attend, dtype, limit, sizes):
    found, want, mine, kv, _ = attend(dtype, sizes, LayerCache)
    torch.testing.assert_close(found, want, rtol=limit, atol=limit)
    torch.testing.assert_close(mine, kv, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype, limit", DTYPES)
@pytest.mark.parametrize("sizes", [CASES[i] for i in (0, 2, 3, 9)])
def test_attention_over_float8(attend, dtype, limit, sizes):
    """Numbers that are rounded like those of the definition, or to the next one, if they were nearly so."""
    found, want, mine, kv, defined = attend(dtype, sizes, Float8LayerCache, to_bytes)
    steps = (mine.int() - kv.int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 1e-3
    near = limit if torch.equal(mine, kv) else 0.1
    torch.testing.assert_close(found, want, rtol=near, atol=near)
    exact = defined(from_bytes(kv, dtype))
    assert (found - exact).abs().max() > 10 * limit or dtype != torch.float32  # its own keys are rounded


def test_counters_are_zeros_again(device):
    """After passes whose keys are split among programs."""
    args, _, qkv, kv, length, local = case(device, torch.float32, 1, 1, 4, 2, 16, 1, [190])
    cos, sin = rope_table(args, inverse_frequencies(args).to(device), length[:, None])
    attention.attend(qkv, cos, sin, None, None, 0.0, kv, 0, length, local)
    used = counters(qkv.device, 1)
    assert not used.any()


def test_move_in_a_cache_of_gigabytes(device):
    """Offsets do not fit 32 bits: planes of 2^30 numbers, of which little is touched."""
    kv = torch.empty(2, 2, 1, 1, 2**23, 128, dtype=torch.int8, device=device)
    planes = kv.view(4, 2**23, 128)
    for plane in range(4):
        planes[plane, 5], planes[plane, 6] = plane + 1, 0
    move_slots(kv, torch.tensor([[5]], device=device), torch.tensor([[6]], device=device))
    assert planes[:, 6, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("W", (1, 3, 9))
@pytest.mark.parametrize("ours, defined", [(LayerCaches, KVCaches), (Float8LayerCaches, Float8Caches)])
def test_move(device, W, ours, defined):
    draw = torch.Generator().manual_seed(W)
    args = ModelArgs(32, 64, 32, 3, 4, 2, 20)
    caches = ours.of(args, 2, 40, torch.float32, device, None)
    caches[0].kv.copy_(torch.randint(0, 100, caches[0].kv.shape, generator=draw))
    single = defined.of(args, 2, 40, torch.float32, device, None)
    for ours, theirs in zip(single, caches):
        ours.k.copy_(theirs.k)
        ours.v.copy_(theirs.v)
    target = torch.tensor([[5], [20]], device=device) + torch.arange(W, device=device)
    source = target + torch.randint(0, 6, (2, W), generator=draw).to(device)  # overlaps what is written
    caches.move(source, target)
    single.move(source, target)
    for ours, theirs in zip(single, caches):
        assert torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v)
