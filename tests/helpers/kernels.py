"""Numbers for tests of the kernels, and how close to plain PyTorch they are to be."""
import torch

DTYPES = (torch.float32, torch.bfloat16)
# Of one product, relative to the largest: rounding of the output.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def draws(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=generator).to(dtype)


def close(found, expected, dtype):
    assert (found.double() - expected).abs().max() <= ERROR[dtype] * expected.abs().max()
