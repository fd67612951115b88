"""Weight-only quantisation: the arithmetic, and the linear layer that holds its result.

int8: one scale per output row, w = scale * q, q in -127..127. int4: one scale per output row and group of inputs,
q in -8..7. Symmetric, nearest rounding; activations stay what they are. Files hold int8 as it is, int4 two to a byte.
"""
from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

MODES = ("int8", "int4")
GROUPS = (32, 64, 128)


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [N, K] -> (q [N, K] int8, scale [N, 1] float32)."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round().to(torch.int8), scale


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Weight [N, K] -> (q [N, K] int8 in -8..7, scale [N, K/group] bfloat16).

    Of several scales for a group, the one with the least squared error: to reach its extreme exactly serves few weights.
    """
    parts = weight.float().unflatten(1, (-1, group))  # [N, K/group, group]
    extreme = parts.gather(2, parts.abs().argmax(2, keepdim=True))
    best, least = None, None
    for steps in (-8.0, -7.4, -6.8, 7.0, 6.4, 5.8):  # a negative scale gives the extreme the longer side, -8
        scale = (extreme / steps).to(torch.bfloat16)
        safe = torch.where(scale == 0, 1, scale).float()
        error = ((parts / safe).round().clamp(-8, 7) * scale.float() - parts).square().sum(2, keepdim=True)
        best = scale if best is None else torch.where(error < least, scale, best)
        least = error if least is None else torch.minimum(error, least)
    safe = torch.where(best == 0, 1, best).float()
    return (parts / safe).round().clamp(-8, 7).to(torch.int8).flatten(1), best[..., 0]


def pack_nibbles(q: Tensor) -> Tensor:
    """q [N, K] in -8..7 -> [N, K/2] uint8, even inputs in the low four bits."""
    low, high = (q + 8).to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`, int8."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1).to(torch.int8) - 8


class QuantizedLinear(nn.Module):
    """A linear layer [K] -> [N] whose weight is int8 (`group` 0) or int4 in groups of `group` inputs.

    This is the reference: it makes the weight whole again for every call. `packed.py` has the fast one for a CPU.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False, group: int = 0):
        super().__init__()
        if group and inputs % group:
            raise ValueError(f"int4 in groups of {group} does not divide {inputs} inputs")
        self.inputs, self.group = inputs, group
        values = torch.empty(outputs, inputs // 2, dtype=torch.uint8) if group else torch.empty(outputs, inputs, dtype=torch.int8)
        scales = torch.empty(outputs, inputs // group, dtype=torch.bfloat16) if group else torch.empty(outputs, 1)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def values(self) -> Tensor:
        """q [N, K] int8."""
        return unpack_nibbles(self.weight) if self.group else self.weight

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] that the quantised one stands for."""
        parts = self.values().float().unflatten(1, (self.scale.shape[1], -1))
        return (parts * self.scale.float()[..., None]).flatten(1).to(dtype)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.whole(x.dtype), self.bias)
        return y if onto is None else onto + y

    def logits(self, x: Tensor) -> Tensor:
        """The same in float32."""
        return self(x).float()


def quantized_names(module: nn.Module, lm_head: bool) -> list[str]:
    """The linear layers of a model that quantisation replaces: all but a mixture's router, the lm_head if asked for."""
    return [
        name for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and not name.endswith("router") and (lm_head or name != "lm_head")
    ]


def replace_linears(module: nn.Module, mode: str, group: int, lm_head: bool) -> None:
    """Put an empty `QuantizedLinear` where `quantized_names` says. Raises ValueError if a group does not divide a layer."""
    for name in quantized_names(module, lm_head):
        linear = module.get_submodule(name)
        parent, _, attribute = name.rpartition(".")
        quantized = QuantizedLinear(linear.in_features, linear.out_features, linear.bias is not None, group if mode == "int4" else 0)
        setattr(module.get_submodule(parent), attribute, quantized)
