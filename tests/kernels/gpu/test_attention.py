"""Tree attention in one kernel against its definition: masked attention over the whole cache."""
from functools import partial

import pytest
import torch
from helpers.ahead_of_time import expensive
from helpers.guards import LIMITS, check, close, owned

from engine.step import Step
from kernels.gpu import attention
from kernels.gpu.cache import Float8LayerCache, LayerCache, LayerCaches
from kernels.gpu.device import gpu_of
from kernels.gpu.launch import arrival_counters
from kernels.kv_dtypes import from_bytes, to_bytes
from model import Block, KVCaches, ModelArgs, PassInputs

DTYPES = [torch.float32]
if torch.cuda.is_available():  # the interpreter multiplies 16-bit numbers in its own way
    DTYPES += [torch.bfloat16, torch.float16]


CASES = (  # B, T, nh, nkv, hd, M, lengths, norm, window
    (1, 1, 4, 2, 16, 1, [130], False, 0),
    (2, 5, 4, 2, 16, 5, [3, 150], True, 0),
    (2, 4, 6, 3, 20, 12, [40, 0], False, 0),  # the beam of a draft level: eight rows of M are in the cache
    (2, 4, 6, 3, 20, 12, [40, 0], False, 3), (2, 5, 4, 2, 16, 5, [3, 150], True, 40),
    (1, 40, 4, 2, 16, 40, [100], False, 9),
    *expensive(*zip((
        (1, 1, 4, 2, 16, 1, [0], False, 0), (1, 1, 9, 3, 64, 1, [77], False, 0),
        (1, 60, 4, 1, 16, 60, [100], False, 0), (3, 10, 2, 2, 128, 30, [64, 65, 101], True, 0),
        (1, 64, 4, 4, 16, 64, [96], False, 0),
        (1, 3, 7, 1, 80, 3, [70], True, 0), (2, 2, 5, 1, 96, 4, [9, 65], False, 0),
        (1, 2, 2, 1, 256, 2, [40], False, 0),
    ))),
)


@pytest.fixture
def made(device, monkeypatch):
    """made(dtype, sizes, float8): return run(step) of this case; all arrival counters must be zero
    afterwards.
    """
    gpu = gpu_of(torch.device(device))._replace(multiprocessors=16)  # so that keys are split
    monkeypatch.setattr(attention, "gpu_of", lambda device: gpu)
    yield partial(case, device)
    assert not arrival_counters(torch.empty(0, device=device).device, 1).any()


def case(device, dtype, sizes, float8=False):
    """Attention of T rows over some of M slots, for the lengths [B]. Later slots hold NaN, which the kernel
    must not read; the reference, which multiplies them by 0, gets zeros. run(step) returns the output, and
    the keys and values of the live slots.
    """
    B, T, nh, nkv, hd, M, lengths, norm, window = sizes
    draw, slots = torch.Generator().manual_seed(B * 1000 + T * 10 + M), max(lengths) + M + 64
    args = ModelArgs(32, nh * hd, 32, 2, nh, nkv, hd, qk_norm=norm, windows=(window,) * 2)
    block = Block(args).requires_grad_(False).to(device, dtype)
    for one in (block.q_norm, block.k_norm) if norm else ():
        one.weight.copy_(torch.randn(hd, generator=draw).abs() + 0.5)
    qkv = torch.randn(B, T, (nh + 2 * nkv) * hd, generator=draw).to(device, dtype)
    cached = torch.randn(2, 2, B, nkv, slots, hd, generator=draw).to(device, dtype)
    local = (torch.randn(B, T, M, generator=draw) > -0.7).to(device)
    local[:, torch.arange(T), M - T + torch.arange(T)] = True  # a row sees itself
    length, at = torch.tensor(lengths, device=device), torch.arange(slots, device=device)
    own = length[:, None] + M - T + torch.arange(T, device=device)
    hidden = (at >= length[:, None] + M)[:, None, :, None]

    def run(step):
        kv = cached.masked_fill(hidden, 0.0 if type(step) is Step else float("nan"))
        kv = owned(to_bytes(kv) if float8 else kv)
        visible = step.mask(at, length, local)
        shared = PassInputs(args, args.inverse_frequencies().to(device), own + 3, own, visible)
        out = (Float8LayerCache if float8 else LayerCache)(kv, 1).attend(block, qkv, shared)
        held = from_bytes(kv, torch.float32) if float8 else kv
        return out, [held[:, :, b, :, : n + M] for b, n in enumerate(lengths)]

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", CASES)
def test_attention(made, backend, dtype, sizes):
    """Deterministic, and equal to the reference."""
    run = made(dtype, sizes)
    check(lambda: run(backend.step), lambda: run(Step()), LIMITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [CASES[i] for i in (0, 2, 3, 9)])
def test_attention_over_float8(made, backend, dtype, sizes):
    """Keys and values are rounded as in the reference, or, close to a tie, to the neighbouring value."""
    run = made(dtype, sizes, True)
    (found, held), (wanted, kept) = run(backend.step), run(Step())
    other = torch.cat([(a != b).float().flatten() for a, b in zip(held, kept)])
    assert other.mean() < 1e-3
    close(held, kept, 0.13)
    close(found, wanted, 0.1 if other.any() else LIMITS[dtype])
    if dtype == torch.float32:  # its own keys are rounded, too
        assert (found - made(dtype, sizes)(Step())[0]).abs().max() > 1e-4


@pytest.mark.parametrize("float8, hd", ((False, 16), (True, 20)))
def test_move(device, float8, hd):
    """Source and destination rows overlap."""
    kv = torch.randn(2, 2, 2, 2, 90, hd, generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.tensor([[5], [64]], device=device) + torch.arange(9, device=device)
    source = target + torch.tensor([0, 1, 0, 3, 2, 5, 1, 0, 4], device=device)

    def run(move):
        moved = owned(to_bytes(kv) if float8 else kv)
        move(LayerCaches.from_tensor(moved), source, target)
        return moved

    check(lambda: run(LayerCaches.move), lambda: run(KVCaches.move))
