"""Weights of the kinds of `kernels.stored` on `kernels.cpu.CpuBackend`, see `kernels.packed`."""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from kernels.packed import empty_in_huge_pages, pack_scale
from kernels.quantized import Quantized, QuantizedEmbedding
from kernels.stored import in_integers


class PackedEmbedding(nn.Module):
    """A `QuantizedEmbedding` that reads rows as stored: of a mapped file, only these take memory."""

    def __init__(self, backend, table: QuantizedEmbedding, dtype: torch.dtype):
        super().__init__()
        self.backend, self.dtype, self.device = backend, dtype, table.device
        stored = in_integers(table)
        codes = stored.codes if stored.kind.unit else None
        # An empty dense table, then the C++ type Table's parts of a stored one.
        empty = torch.empty(0, table.inputs, dtype=dtype)
        self.table = empty, stored.weight, stored.scale, codes, stored.kind.minima

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> their embeddings [..., H]."""
        rows = self.backend.ops.embed(tokens.flatten()[None], *self.table)
        return rows.view(*tokens.shape, -1)


def pack_records(backend, weight: Quantized, gated: bool, blocks: int) -> Tensor:
    """Pack a stored layer's scales -> [blocks, units, 1 or 2, bytes], see csrc/kernels.h: Records."""
    # Some rows, or an expert, at a time: large temporary tensors would leave holes in memory.
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
