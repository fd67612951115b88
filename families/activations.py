"""Gated activations other than SwiGLU's, and the soft cap."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the tanh approximation (Gemma)."""
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return (up + 1) * gate * sigmoid(1.702 * gate), with gate <= 7 and up in -7..7 (gpt-oss)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap), x if cap is None (Gemma 2)."""
    return x if cap is None else cap * torch.tanh(x / cap)
