"""Packed mixtures of experts, and packed weights of `kernels.stored`, for `kernels.cpu.CpuBackend`.

Separate from `kernels.packed`, as most models do not need them.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from kernels.packed import Packed, PackedLinear, PackedMLP, empty_in_huge_pages, pack_scale
from kernels.quantized import Quantized
from kernels.stored import in_integers


class PackedEmbedding(nn.Module):
    """A `QuantizedEmbedding` that is not packed: of a mapped file, only rows that are read take memory."""

    def __init__(self, backend, table: Quantized, dtype: torch.dtype):
        super().__init__()
        self.backend, self.dtype, self.device = backend, dtype, table.device
        stored = in_integers(table)
        codes = stored.codes if stored.kind.unit else None
        # The C++ type Table: an empty dense table, then the fields of a quantized one.
        empty = torch.empty(0, table.inputs, dtype=dtype)
        self.table = empty, stored.weight, stored.scale, codes, stored.kind.minima

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> their embeddings [..., H]."""
        rows = self.backend.ops.embed(tokens.flatten()[None], *self.table)
        return rows.view(*tokens.shape, -1)


class PackedExperts(PackedMLP):
    """`Experts` with the routed experts' weights read once per pass.

    routing: the module whose `route` chooses experts in PyTorch; None: the operator does.
    """

    def __init__(self, backend, experts: nn.Module, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.backend = backend
        self.router = PackedLinear(backend, experts.router, dtype)
        activation = experts.activation
        self.w_gate_up = Packed(backend, experts.w_gate_up, experts.gate_up_bias, dtype, activation)
        experts.w_gate_up = None  # free its memory before packing the next weight
        self.w_down = Packed(backend, experts.w_down, experts.down_bias, dtype)
        self.routing = experts if experts.own_routing else None
        experts.router, experts.w_down = self.router, None
        # See csrc/operators.cpp: mixture_of.
        self.bits = self.router.columns << 24 | experts.top_k << 40 | int(experts.renormalize) << 56

    def forward(self, x: Tensor, residual: Tensor | None, router_input: Tensor | None = None) -> Tensor:
        """See `Experts.forward`."""
        residual = torch.zeros_like(x) if residual is None else residual
        weights = [w for part in (self.router, self.w_gate_up, self.w_down) for w in part.operands]
        router_input = x if router_input is None else router_input
        routed = self.routing.route(router_input.flatten(0, -2)) if self.routing else (None, None)
        return self.backend.ops.experts(x, residual, *weights, self.bits, self.w_gate_up.mode, *routed)


def pack_records(backend, weight: Quantized, gated: bool, blocks: int) -> Tensor:
    """Pack a stored layer's scales -> [blocks, units, 1 or 2, bytes], see csrc/kernels.h: Records."""
    # Convert parts of the rows, or one expert at a time: large temporary tensors would fragment memory.
    step = 1 if weight.weight.dim() == 3 else weight.outputs if gated else 512 * backend.layout.columns
    out, first = None, 0
    for parts in zip(*(x.split(step) for x in weight.scales)):
        part = _records(backend, weight, gated, *parts)
        if out is None:
            out = empty_in_huge_pages((blocks, *part.shape[1:]), torch.uint8)
        out[first : first + len(part)] = part
        first += len(part)
    return out


def _records(backend, weight: Quantized, gated: bool, scale: Tensor, codes: Tensor | None = None) -> Tensor:
    kind, count = weight.kind, 1 + weight.kind.minima

    def packed(x: Tensor) -> list[Tensor]:  # [N, count * n] -> count of [blocks, n, columns]
        return [pack_scale(backend, part.contiguous(), gated) for part in x.chunk(count, -1)]

    scales = torch.stack(packed(scale.float()), 2).view(torch.uint8)  # [blocks, units, count, bytes]
    if codes is None:
        return scales
    units = kind.units(weight.inputs)
    codes = torch.stack([x.unflatten(1, (units, -1)) for x in packed(codes)], 3)
    codes = codes.flatten(2).view(torch.uint8).unflatten(2, (count, -1))
    return torch.cat((scales.flatten(2), codes.flatten(2)), 2).unflatten(2, (count, -1))
