"""Top-k with log-probabilities, and top-k and top-p thresholds, against PyTorch."""
import pytest
import torch
import triton
import triton.language as tl
from helpers.guards import check

from engine.step import Step
from kernels import kv_dtypes as defined
from kernels.gpu import attention, sampling

V = 200


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(sampling, "RANKED_CHUNK", 64)
    monkeypatch.setattr(sampling, "SORTED_CHUNK", 128)


def random(device, *shape, seed=0):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("rows, noise_rows, named", ((1, None, False), (4, 1, True), (3, 3, False)))
def test_rank(device, backend, rows, noise_rows, named):
    names = torch.randperm(V, generator=torch.Generator().manual_seed(1)).to(device) if named else None
    noise = None if noise_rows is None else random(device, 2, noise_rows, V, seed=1)
    given = random(device, 2, rows, V), noise, 4, names
    check(lambda: backend.step.rank(*given), lambda: Step().rank(*given), 1e-5)


def test_ties(device, backend):
    """Of equal logits the first wins."""
    logits = torch.zeros(1, 1, V, device=device)
    logits[0, 0, [3, 150, 70]] = 1.0
    logits[0, 0, 9] = -0.0
    assert backend.step.rank(logits, None, 6)[1].tolist() == [[[3, 70, 150, 0, 1, 2]]]


def test_restrict(device, backend):
    top_k = torch.tensor([0, 0, 1, 50, V // 2], device=device)
    top_p = torch.tensor([0.9, 1e-6, 1.0, 0.95, 0.999], device=device)
    temperature, logits = torch.tensor([0.7, 1.3, 1.0, 0.8, 0.0], device=device), random(device, 5, 1, V)
    logits[:2, :, :7] = logits[:2].amax(-1, keepdim=True)
    logits[2:4, :, :9], logits[2:4, :, 4:6], logits[3, :, 50:] = 0.0, -0.0, float("-inf")
    given = logits, temperature, top_k, top_p
    check(lambda: backend.step.restrict(*given), lambda: Step().restrict(*given))


# -- e4m3 in registers against PyTorch's ---------------------------------------------------------------------


@triton.jit
def kernel(x, out, N: tl.constexpr, READS: tl.constexpr):
    i = tl.arange(0, N)
    convert: tl.constexpr = attention.from_cache if READS else attention.to_cache
    tl.store(out + i, convert(tl.load(x + i), out.dtype.element_ty))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_every_number(device, dtype):
    """All 256 bytes; midpoints between neighbours (ties) and the floats next to them; the largest values and
    NaN.
    """
    x = torch.arange(256, device=device).to(torch.uint8)
    read = torch.empty(256, dtype=dtype, device=device)
    kernel[(1,)](x, read, 256, True)
    torch.testing.assert_close(read, defined.from_bytes(x, dtype), rtol=0, atol=0, equal_nan=True)
    own = defined.from_bytes(torch.arange(127, dtype=torch.uint8), torch.float32)
    half = (own[1:] + own[:-1]) / 2
    near = [torch.nextafter(half, torch.full_like(half, to)) for to in (0, 1e9)]
    odd = torch.tensor([449.0, 464.0, 480.0, 5e4, torch.inf, torch.nan, 2e-45, 1e-38])
    x = torch.cat((own, half, *near, odd))
    x = torch.cat((x, -x, torch.randn(2048 - 2 * len(x), generator=torch.Generator().manual_seed(1)) * 2))
    x = x.to(device, dtype)
    out = torch.empty(2048, dtype=torch.uint8, device=device)
    kernel[(1,)](x, out, 2048, False)
    want = defined.to_bytes(x)
    assert torch.equal(out & 0x7F, want & 0x7F)
    assert torch.equal((out >> 7)[~x.isnan()], (want >> 7)[~x.isnan()])  # NaN has a sign, or none
