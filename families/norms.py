"""RMSNorm whose weights are stored minus 1 (Gemma 3, Qwen3-Next, Qwen3.5)."""
from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import RMSNorm


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
