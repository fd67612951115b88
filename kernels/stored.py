"""Group-quantized weights of published files, with 4 to 8 bits per value, at their original precision.

w = scale * q - minimum, with a scale and possibly a minimum per output and group of inputs.
q4: q is 0..15, or -8..7 without minima; two per byte, even inputs in the low bits.
q6: q is -32..31; q + 32 of four inputs in three bytes: two with the low four bits as in q4, one with the high
    two bits of each.
q8: q is -128..127. f8: q is e4m3, stored as bytes.
Scales are float32, or, in K-quants, int8 `codes` times a super-scale of several groups.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantized import (
    INTEGERS,
    Quantized,
    quantize_rowwise,
    rowwise_scales,
    split_rows,
    unpack_pairs,
)

STORED = (*INTEGERS, "f8")
GROUPS = 16, 32, 64, 128
ROW = -1  # `Kind.unit`: one super-scale per row
MIN_ACTIVATION_GROUP = 128  # group size of int8 activations for weights with super-scales


class Kind(NamedTuple):
    """Storage format of a group-quantized weight.

    mode: one of STORED. group: inputs per scale. unit: inputs per super-scale, 256 or ROW; 0: float32 scales
    without codes. minima: asymmetric. ordered: columns are permuted by the layer's `order` (GPTQ's g_idx).
    """

    mode: str
    group: int
    unit: int = 0
    minima: bool = False
    ordered: bool = False

    @classmethod
    def parse(cls, text: str) -> Kind:
        """Parse a kind of config.json, such as q4-32-256-min or q4-32-row. Raises ValueError."""
        mode, group, unit, *flags = text.split("-")
        kind = cls(mode, int(group), ROW if unit == "row" else int(unit), "min" in flags, "order" in flags)
        groups = GROUPS[1:] if mode == "q4" else GROUPS
        known = mode in STORED and kind.group in groups and kind.unit in (0, 256, ROW)
        if not known or str(kind) != text:
            raise ValueError(text)
        return kind

    @property
    def rounded_inputs(self) -> int:
        """Group size of the int8 quantization of activations."""
        return max(MIN_ACTIVATION_GROUP, self.group) if self.unit else self.group

    def __str__(self) -> str:
        unit = "row" if self.unit == ROW else self.unit
        return f"{self.mode}-{self.group}-{unit}{'-min' * self.minima}{'-order' * self.ordered}"

    def units(self, inputs: int) -> int:
        """Return the number of float32 scales per row."""
        return 1 if self.unit == ROW else inputs // (self.unit or self.group)

    def sizes(self, inputs: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return name -> (columns, dtype) of the tensors that store a weight [..., inputs].

        In `scale` and `codes`, minima follow all scales.
        """
        count, bits = 1 + self.minima, int(self.mode[1:])
        sizes = {"weight": (inputs * bits // 8, torch.int8 if bits == 8 else torch.uint8),
                 "scale": (count * self.units(inputs), torch.float32)}
        return sizes | ({"codes": (count * inputs // self.group, torch.int8)} if self.unit else {})

    def joined(self, other: Kind) -> Kind:
        """Return the kind that holds weights of both exactly, which have one order, and e4m3 both or none."""
        if self == other:
            return self
        unit = self.unit if self.unit == other.unit else 0
        group = math.gcd(self.group, other.group)
        # q4 is -8..7 without minima, 0..15 with them: q6 has both ranges.
        mode = max(self.mode, other.mode, "q4" if self.minima == other.minima else "q6")
        mode = self.mode if "f8" in (self.mode, other.mode) else mode
        return Kind(mode, group, unit, self.minima or other.minima, self.ordered)

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Fit super-scales and codes to weight [..., K], for `round`. Only for an `int4_kind`."""
        scales = torch.cat(fit_groups(weight.float().unflatten(-1, (-1, self.group))), -1).transpose(-1, -2)
        units = scales.abs().amax(-1, keepdim=True) / 127
        return units.flatten(-2), quantize_scales(scales, units).flatten(-2)

    def round(self, weight: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
        """Quantize weight [..., K] to nearest and pack it. Only for an `int4_kind`."""
        scales = expand_scales(self, scale, codes)[..., None]
        step = torch.where(scales[..., 0, :, :] == 0, 1, scales[..., 0, :, :])
        q = weight.float().unflatten(-1, (-1, self.group)) + scales[..., 1, :, :]
        return pack_pairs(q.div_(step).round_().clamp_(0, 15).to(torch.uint8).flatten(-2))

    def dequantize(self, weight: Tensor, scale: Tensor, codes: Tensor | None = None) -> Tensor:
        """Dequantize a stored weight to float32 [..., K]."""
        return numbers(self, values(self, weight), scale, codes)


ROUNDED = Kind("q8", 32)  # int8 in groups, for types that no kind holds exactly, and f8 on CPUs


def pack_pairs(q: Tensor) -> Tensor:
    """Pack q [..., K] in 0..15 to [..., K/2] uint8, even inputs in the low four bits."""
    pairs = q.contiguous().view(torch.int16)  # little-endian: odd inputs are in the high byte
    return (pairs | pairs >> 4).to(torch.uint8)


def pack_sixes(q: Tensor) -> Tensor:
    """Pack q [..., K] in 0..63 to [..., 3 K/4] uint8."""
    four = q.contiguous().view(torch.int32)
    low, high = four & 0x0F0F0F0F, four >> 4 & 0x03030303
    low, high = low | low >> 4, high | high >> 6
    return torch.stack((low, low >> 16, high | high >> 12), -1).to(torch.uint8).flatten(-2)


def unpack_sixes(packed: Tensor) -> Tensor:
    """Invert `pack_sixes`, to uint8."""
    *low, high = packed.unflatten(-1, (-1, 3)).unbind(-1)
    q = torch.stack([part for both in low for part in (both & 15, both >> 4)], -1)
    return (q | torch.stack([high << 4 - at if at < 4 else high >> at - 4 for at in (0, 2, 4, 6)], -1) & 48
            ).flatten(-2)


def values(kind: Kind, weight: Tensor) -> Tensor:
    """Return q [..., K] of a stored weight, int8 or e4m3."""
    if kind.mode in ("q8", "f8"):
        return weight if kind.mode == "q8" else weight.view(torch.float8_e4m3fn)
    if kind.mode == "q6":
        return unpack_sixes(weight).view(torch.int8) - 32
    q = unpack_pairs(weight).view(torch.int8)
    return q if kind.minima else q - 8


def pack_values(kind: Kind, q: Tensor) -> Tensor:
    """Invert `values`. q: int8, uint8 (if not negative) or e4m3."""
    if kind.mode in ("q8", "f8"):
        return q.view(torch.int8)
    if kind.mode == "q6":
        return pack_sixes(q + 32)
    return pack_pairs(q if kind.minima else q + 8)


def expand_scales(kind: Kind, scale: Tensor, codes: Tensor | None = None) -> Tensor:
    """Return float32 scales per group, and minima if the kind has them: [..., 1 or 2, groups]."""
    scales = scale.unflatten(-1, (1 + kind.minima, -1))
    if codes is None:
        return scales
    return (codes.float().unflatten(-1, (*scales.shape[-2:], -1)) * scales[..., None]).flatten(-2)


def numbers(kind: Kind, q: Tensor, scale: Tensor, codes: Tensor | None) -> Tensor:
    """Dequantize unpacked values q [..., K] to float32 [..., K]."""
    scales = expand_scales(kind, scale, codes)
    weight = q.float().unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., 0, :, None])
    return (weight.sub_(scales[..., 1, :, None]) if kind.minima else weight).flatten(-2)


def int4_kind(group: int) -> Kind:
    """Return the kind of int4 and w4a8: asymmetric q4 groups with one super-scale per row."""
    return Kind("q4", group, ROW, minima=True)


def fit_groups(parts: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Fit the scale and minimum [..., 1] of q in 0..15 to groups of weights [..., group] float32.

    q is computed by min-max rounding; scale and minimum are the least-squares fit to it.
    importance [..., group]: weights of the squared errors; None: equal.
    """
    low, high = parts.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / 15
    q = ((parts - low) / torch.where(scale == 0, 1, scale)).round_()
    weighted = q if importance is None else q * importance
    count = parts.shape[-1] if importance is None else importance.sum(-1, keepdim=True)
    values = parts if importance is None else parts * importance
    sum_q, sum_parts = weighted.sum(-1, keepdim=True), values.sum(-1, keepdim=True)
    variance = count * (weighted * q).sum(-1, keepdim=True) - sum_q.square()
    fitted = (count * (weighted * parts).sum(-1, keepdim=True) - sum_q * sum_parts) / variance
    scale = torch.where(variance > 0, fitted, scale)
    return scale, torch.where(scale == 0, -low, (scale * sum_q - sum_parts) / count)


def quantize_scales(scales: Tensor, units: Tensor) -> Tensor:
    """Quantize scales and minima [..., 2, groups] to int8 codes of their super-scales `units` [..., 2, 1]."""
    return (scales / torch.where(units == 0, 1, units)).round_().clamp_(-127, 127).to(torch.int8)


def regroup(kind: Kind, to: Kind, scale: Tensor, codes: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Convert scales and codes from `kind` to kind `to`, a result of `kind.joined`."""

    def spread(x: Tensor, times: int) -> Tensor:
        """Repeat each of n groups `times` times and flatten; minima are 0 if only `to` has them."""
        x = x.repeat_interleave(times, -1)
        return (F.pad(x, (0, 0, 0, 1)) if to.minima > kind.minima else x).flatten(-2)

    if not to.unit:
        return spread(expand_scales(kind, scale, codes), kind.group // to.group), None
    count = 1 + kind.minima, -1
    return spread(scale.unflatten(-1, count), 1), spread(codes.unflatten(-1, count), kind.group // to.group)


def round_groups(weight: Tensor, group: int = ROUNDED.group) -> tuple[Tensor, Tensor]:
    """Return q and scales [..., K/group] of weight [..., K] in int8 in groups of inputs."""
    groups = weight.unflatten(-1, (-1, group))
    scale = rowwise_scales(groups, "int8")
    return quantize_rowwise(groups, scale, "int8").flatten(-2), scale[..., 0]


def in_integers(weight: Quantized) -> Quantized:
    """Return an f8 weight rounded to `ROUNDED`, as kernels multiply integers; other weights unchanged."""
    if not weight.kind or weight.mode != "f8":
        return weight
    kind = ROUNDED._replace(group=min(ROUNDED.group, weight.group))
    rounded = Quantized((*weight.weight.shape[:-1], weight.inputs), kind)
    tensors = weight.weight, weight.scale, rounded.weight, rounded.scale
    for stored, scale, out_q, out_scale in split_rows(*tensors):
        q, group_scale = round_groups(weight.numbers(stored, scale), kind.group)
        out_q.copy_(q)
        out_scale.copy_(group_scale)
    return rounded
