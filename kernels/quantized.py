"""Quantized weights: their arithmetic, and the linear layers that hold them.

Weights are w = scale * q, symmetric. Here they are rounded to the nearest q; `kernels.gptq` does better.

int8   one scale per output, q in -127..127
w8a8   int8 weights; a layer's inputs are rounded to int8 too, with one scale per 64 inputs of a token
fp8    e4m3, one scale per output; inputs are rounded to fp8 too, with one scale per token
mxfp4  only experts of published files: e2m1, two values per byte; one scale per 32 inputs, a power of two
       (e8m0: a byte, the exponent + 127)
q4, q6, q8  formats of published quantized files, and of int4 and w4a8, see `kernels.stored`; inputs are
       rounded to int8 in groups
f8     e4m3 weights of published files, see `kernels.stored`; inputs are not rounded
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.schema import InvalidValue
from extensions import load

if TYPE_CHECKING:
    from kernels.stored import Kind

EMBED = "embed"  # name of the embedding module; quantized only if the source checkpoint quantizes it
MXFP4, MXFP4_GROUP = "mxfp4", 32  # experts only; read from checkpoints, we never quantize to it
INTEGERS = ("q4", "q6", "q8")  # integer modes of `kernels.stored`
INT8_ACTIVATION_MODES = ("w8a8", *INTEGERS)
W8A8_GROUP = 64  # inputs of a token that share a dynamic scale
FP8_MAX = 448.0  # the largest finite e4m3 value
CHUNK_VALUES = 1 << 19  # weights quantized per call: few calls, and intermediates fit in the CPU cache


def rowwise_scales(weight: Tensor, mode: str) -> Tensor:
    """Return the int8 or fp8 scale of each row of weight [..., N, K]: [..., N, 1] float32."""
    return weight.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / (FP8_MAX if mode == "fp8" else 127)


def quantize_rowwise(weight: Tensor, scale: Tensor, mode: str) -> Tensor:
    """Quantize weight [..., N, K] to nearest: q [..., N, K], int8 or float8_e4m3fn."""
    units = weight.float() / scale
    return units.to(torch.float8_e4m3fn) if mode == "fp8" else units.round_().to(torch.int8)


def split_rows(weight: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors [..., N, columns] into views of the same rows, about CHUNK_VALUES weights each."""
    rows = max(1, CHUNK_VALUES // weight.shape[-1])
    return [*zip(*(x.flatten(0, -2).split(rows) for x in (weight, *others)))]


def unpack_pairs(packed: Tensor) -> Tensor:
    """Invert `kernels.stored.pack_pairs`: [..., K/2] -> [..., K] uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def e2m1(codes: Tensor) -> Tensor:
    """Convert e2m1 codes 0..15 to float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives."""
    code = (codes & 7).float()
    twice = torch.where(code < 4, code, torch.where(code < 6, 2 * code - 4, 4 * code - 16))
    return torch.where(codes > 7, -twice, twice) / 2


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize an int8, fp8 or MXFP4 weight: [..., N, K] in `dtype`. MXFP4 scales are uint8."""
    if scale.dtype == torch.uint8:
        values = e2m1(unpack_pairs(weight)).unflatten(-1, (-1, MXFP4_GROUP))
        return torch.ldexp(values, scale.int()[..., None] - 127).flatten(-2).to(dtype)
    return (weight.float() * scale).to(dtype)


def round_inputs(x: Tensor, group: int = W8A8_GROUP) -> Tensor:
    """Fake-quantize x [..., K] to int8 with one dynamic scale per `group` inputs; keep the dtype."""
    K = x.shape[-1]
    groups = F.pad(x.float(), (0, -K % group)).unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    q = (groups * torch.where(scale > 1e-30, scale.reciprocal(), 0)).round()
    return (q * scale).flatten(-2)[..., :K].to(x.dtype)


class Quantized(nn.Module):
    """Base class of modules with a quantized weight [..., N, K] and its scales.

    mode: one of `kernels.scheme.MODES`, MXFP4, or a `Kind`. group: group size, 0 for one scale per row.
    restore: convert (weight, scale) from the backend's memory layout to the stored one; None if they are the
    same. Raises InvalidValue if the group does not divide K.
    """

    restore: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __init__(self, shape: tuple[int, ...], mode: str | Kind):
        super().__init__()
        *_, self.outputs, inputs = shape
        self.inputs, self.kind = inputs, None if isinstance(mode, str) else mode
        self.mode, self.group = mode[:2] if self.kind else (mode, MXFP4_GROUP if mode == MXFP4 else 0)
        if self.group and inputs % max(self.group, self.kind.unit if self.kind else 0):
            raise InvalidValue("group", self.group, f"a divisor of {inputs} inputs")
        if self.kind:
            sizes = self.kind.sizes(inputs)
        elif mode == MXFP4:
            sizes = {"weight": (inputs // 2, torch.uint8), "scale": (inputs // self.group, torch.uint8)}
        else:
            dtype = torch.float8_e4m3fn if mode == "fp8" else torch.int8
            sizes = {"weight": (inputs, dtype), "scale": (1, torch.float32)}
        for name, (size, dtype) in sizes.items():
            tensor = torch.empty(*shape[:-1], size, dtype=dtype)
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))
        if self.kind and self.kind.ordered:
            self.order = nn.Parameter(torch.empty(inputs, dtype=torch.int32), requires_grad=False)

    def round_inputs(self, x: Tensor) -> Tensor:
        """Fake-quantize the activations x [..., K] if this mode quantizes them to int8."""
        group = self.kind.rounded_inputs if self.kind else W8A8_GROUP
        if self.kind and self.kind.ordered:
            return round_inputs(x[..., self.order], group)[..., self.order.argsort()]
        return round_inputs(x, group) if self.mode in INT8_ACTIVATION_MODES else x

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """(scale,), or (scale, codes) for a `Kind` with super-scales."""
        return (self.scale, self.codes) if self.kind and self.kind.unit else (self.scale,)

    def fit(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the `scales` of a weight [..., N, K], for `round`."""
        fitted = [self.kind.fit(rows) if self.kind else (rowwise_scales(rows, self.mode),)
                  for rows, in split_rows(weight)]
        return tuple(torch.cat(parts).unflatten(0, weight.shape[:-1]) for parts in zip(*fitted))

    def round(self, weight: Tensor, *scales: Tensor) -> Tensor:
        """Quantize a weight [..., N, K] with these scales, packed like `self.weight`."""
        stored = torch.empty_like(self.weight, device=weight.device)
        for rows, out, *row_scales in split_rows(weight, stored, *scales):
            out.copy_(self.kind.round(rows, *row_scales) if self.kind
                      else quantize_rowwise(rows, *row_scales, self.mode))
        return stored

    def numbers(self, weight: Tensor, *scales: Tensor) -> Tensor:
        """Dequantize rows of a weight in this module's format: float32 [..., K]."""
        if self.kind:
            return self.kind.dequantize(weight, *scales)
        return dequantize(weight, *scales, torch.float32)

    def dequantize(self, dtype: torch.dtype, index: Tensor | None = None) -> Tensor:
        """Dequantize the weight, or only the rows or experts `index` [...] of its first dimension."""
        weight, scale = self.weight, self.scale
        if self.kind:
            if self.restore is not None:
                weight, _ = self.restore(self, weight, scale, index)
            elif index is not None:
                weight = weight[index]
            scales = (x if index is None else x[index] for x in self.scales)
            values = self.numbers(weight, *scales).to(dtype)
            return values[..., self.order.argsort()] if self.kind.ordered else values
        if index is not None:  # PyTorch cannot index fp8 tensors: index their bytes
            weight, scale = weight.view(torch.uint8)[index].view(weight.dtype), scale[index]
        if self.restore is not None:
            weight, scale = self.restore(self, weight, scale)
        return dequantize(weight, scale, dtype)


class QuantizedLinear(Quantized):
    """A quantized linear layer [K] -> [N]. This is the reference: it dequantizes the weight at every call.

    `kernels.packed` replaces it on CPUs; on GPUs, `kernels.gpu.products` has kernels for integers and f8, and
    fp8 uses tensor cores if supported. On a GPU, w8a8 runs as int8 on rounded inputs.
    fused: computes `product` in one kernel.
    """

    fused: Callable | None = None

    def __init__(self, inputs: int, outputs: int, bias: bool, mode: str | Kind):
        super().__init__((outputs, inputs), mode)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.fp8_product = load("kernels.gpu.device:fp8_product") if mode == "fp8" else None

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None, mode: str | Kind) -> QuantizedLinear:
        """Quantize a weight [N, K] to nearest. mode: int8, w8a8, fp8 or a `int4_kind` kind."""
        layer = cls(weight.shape[1], weight.shape[0], False, mode)
        for parameter, fitted in zip(layer.scales, layer.fit(weight)):
            parameter.data = fitted
        layer.weight.data = layer.round(weight, *layer.scales)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return layer

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return x [..., K] @ W^T + bias, rounded to x's dtype, plus residual: [..., N]."""
        return (self.fused or QuantizedLinear.product)(self, x, residual, False)

    def logits(self, x: Tensor) -> Tensor:
        """Return `forward` in float32, for an lm_head. Kernels do not round to x's dtype first."""
        return (self.fused or QuantizedLinear.product)(self, x, None, True)

    def product(self, x: Tensor, residual: Tensor | None, float32: bool) -> Tensor:
        """Compute `forward`, or `logits` if float32, in PyTorch."""
        x = self.round_inputs(x)
        if self.mode == "fp8":
            y = self.fp8_product(self, x, float32)
        else:
            y = F.linear(x, self.dequantize(x.dtype), self.bias)
        y = y.float() if float32 else y
        return y if residual is None else residual + y


def linear_names(module: nn.Module) -> list[str]:
    """Return the names of all linear layers except MoE routers, which are never quantized."""
    return [name for name, child in module.named_modules()
            if isinstance(child, nn.Linear) and not name.endswith("router")]


def owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has the layer of this name as an attribute, and the attribute's name."""
    parent, _, attribute = name.rpartition(".")
    return module.get_submodule(parent), attribute


def quantize_layers(module: nn.Module, mode_of: Callable[[str], str | Kind | None]) -> None:
    """Quantize the linear layers of a loaded module in place. Unties a tied lm_head if it is quantized.

    mode_of: layer name -> mode, None to keep the layer. Skips experts and layers that are already
    quantized. Raises ValueError if a group does not divide a layer's inputs.
    """
    names = linear_names(module)
    if module.lm_head is None and (mode := mode_of("lm_head")):
        module.lm_head = QuantizedLinear.from_weight(module.embed.weight.detach(), None, mode)
    for name in filter(mode_of, names):
        layer = module.get_submodule(name)
        bias = None if layer.bias is None else layer.bias.detach()
        quantized = QuantizedLinear.from_weight(layer.weight.detach(), bias, mode_of(name))
        setattr(*owner(module, name), quantized)


def quantize_at_load(model: nn.Module, mode: str) -> None:
    """Quantize a bf16 or fp16 model in place, including its lm_head unless it is shared with the target."""
    keep = () if getattr(model.args, "own_lm_head", True) else ("lm_head",)
    quantize_layers(model, lambda name: None if name in keep else mode)
