"""Instruction sets and numbers for tests of the kernels, and how close to plain PyTorch results are."""
import pytest
import torch

from kernels import isa
from model import KVCache

# `make test` runs the best instruction set and AVX2, which most processors without AVX-512 have.
USUAL = {isa.available()[0], "avx2"}
EACH = [pytest.param(name, marks=[pytest.mark.dear] * (name not in USUAL)) for name in isa.available()]
DTYPES = (torch.float32, torch.bfloat16)
# Of one product, relative to the largest: rounding of the output.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def draws(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(dtype)


def close(found, expected, dtype):
    error, limit = (found.double() - expected).abs().max(), ERROR[dtype] * expected.abs().max()
    assert error <= limit, f"the largest error is {error:.3g}, allowed is {limit:.3g} in {dtype}"


def same(found, expected):
    """Compare tensors, or collections of them, bit for bit; print the first difference."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Written(KVCache):
    """A cache of k, v [B, S, nkv, hd] to write to, as the functions `keep` rounds them."""

    def __init__(self, k, v, keep=lambda x: x):
        torch.nn.Module.__init__(self)
        self.k, self.v, self.keep = keep(k), keep(v), keep

    def write(self, k, v, slots):
        rows = torch.arange(len(slots))[:, None]
        self.k[rows, slots], self.v[rows, slots] = self.keep(k), self.keep(v)

    def live(self, count, dtype):
        return self.k[:, :count].transpose(1, 2), self.v[:, :count].transpose(1, 2)


def round_heads(x):
    """Each head of x [..., hd] in steps of its largest / 127."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step
