"""RMSNorm whose weights are stored minus 1 (Gemma 2 and 3, Qwen3.5); batch-invariant functions."""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import RMSNorm

VECTOR_WIDTH = 32  # maximum number of elements of a vector in PyTorch's CPU kernels


class ZeroCenteredNorm(RMSNorm):
    """RMSNorm that scales by 1 + weight, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.zeros(size))

    @property
    def scale(self) -> Tensor:
        return 1 + self.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.scale, self.eps).to(x.dtype)


def invariant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function to x with the same rounding of every element.

    On CPUs PyTorch rounds elements that do not fill a vector differently, so rows are padded.
    """
    if x.is_cuda:
        return function(x)
    return function(F.pad(x, (0, -x.shape[-1] % VECTOR_WIDTH)))[..., : x.shape[-1]]


def ordered_sum(x: Tensor) -> Tensor:
    """Sum the last dimension in an order that, on CPUs, does not depend on the other dimensions."""
    if x.is_cuda:
        return x.sum(-1)
    while (n := x.shape[-1]) > 1:
        x = F.pad(x, (0, n % 2))
        one, other = x.chunk(2, dim=-1)
        x = one + other
    return x[..., 0]
