"""Mixtures of experts on `kernels.cpu.CpuBackend`, see `kernels.packed`."""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from kernels.packed import Packed, PackedLinear, PackedMLP


class PackedExperts(PackedMLP):
    """`Experts` with the routed experts' weights read once per pass.

    routing: the mixture, if it routes in PyTorch.
    """

    def __init__(self, backend, experts: nn.Module, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.backend = backend
        self.router = PackedLinear(backend, experts.router, dtype)
        activation = experts.activation
        self.w_gate_up = Packed(backend, experts.w_gate_up, experts.gate_up_bias, dtype, activation)
        experts.w_gate_up = None  # frees its memory before the next is packed
        self.w_down = Packed(backend, experts.w_down, experts.down_bias, dtype)
        self.routing = experts if experts.own_routing else None
        experts.router, experts.w_down = self.router, None
        # See csrc/operators.cpp: mixture_of.
        self.bits = self.router.columns << 24 | experts.used << 40 | int(experts.renormalize) << 56

    def forward(self, x: Tensor, residual: Tensor | None, router_input: Tensor | None = None) -> Tensor:
        """As `Experts.forward`."""
        residual = torch.zeros_like(x) if residual is None else residual
        weights = [w for part in (self.router, self.w_gate_up, self.w_down) for w in part.operands]
        router_input = x if router_input is None else router_input
        routed = self.routing.route(router_input.flatten(0, -2)) if self.routing else (None, None)
        return self.backend.ops.experts(x, residual, *weights, self.bits, self.w_gate_up.mode, *routed)
