"""e4m3 in registers against PyTorch's: every byte, and numbers between and beyond what bytes hold."""
import pytest
import torch
import triton
import triton.language as tl

from kernels import float8 as defined
from kernels.gpu import float8

WAYS = [False]  # with the device's instruction?
if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    WAYS += [True]


@triton.jit
def kernel(x, out, N: tl.constexpr, READS: tl.constexpr, CONVERTS: tl.constexpr):
    i = tl.arange(0, N)
    convert: tl.constexpr = float8.from_cache if READS else float8.to_cache
    tl.store(out + i, convert(tl.load(x + i), out.dtype.element_ty, CONVERTS))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("converts", WAYS)
def test_every_number(device, dtype, converts):
    """Every byte's own, those half way between two (ties), the next ones to them, the largest, and NaN."""
    x = torch.arange(256, device=device).to(torch.uint8)
    read = torch.empty(256, dtype=dtype, device=device)
    kernel[(1,)](x, read, 256, True, converts)
    torch.testing.assert_close(read, defined.from_bytes(x, dtype), rtol=0, atol=0, equal_nan=True)
    own = defined.from_bytes(torch.arange(127, dtype=torch.uint8), torch.float32)
    half = (own[1:] + own[:-1]) / 2
    near = [torch.nextafter(half, torch.full_like(half, to)) for to in (0, 1e9)]
    odd = torch.tensor([449.0, 464.0, 480.0, 5e4, torch.inf, torch.nan, 2e-45, 1e-38])
    x = torch.cat((own, half, *near, odd))
    x = torch.cat((x, -x, torch.randn(2048 - 2 * len(x), generator=torch.Generator().manual_seed(1)) * 2))
    x = x.to(device, dtype)
    out = torch.empty(2048, dtype=torch.uint8, device=device)
    kernel[(1,)](x, out, 2048, False, converts)
    want = defined.to_bytes(x)
    assert torch.equal(out & 0x7F, want & 0x7F)
    assert torch.equal((out >> 7)[~x.isnan()], (want >> 7)[~x.isnan()])  # NaN has a sign, or none
