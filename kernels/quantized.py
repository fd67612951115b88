"""Quantised weights: the arithmetic, and the linear layer that holds its result.

Weights w = scale * q are symmetric; here they are rounded to the nearest q (`kernels.gptq` does better).

int8   one scale per output row, q in -127..127
int4   one scale per output row and group of inputs, q in -8..7; files hold two values in a byte
w8a8   the weights of int8; the inputs of a layer are rounded to int8 too, every 64 of a row by their largest
w4a8   the weights of int4; the inputs are rounded to int8 too, those that share a scale by their largest
fp8    e4m3, one scale per output row; the inputs are rounded to fp8 too, each row by its largest
mxfp4  of experts whose files have it: e2m1, stored as int4, and for each 32 inputs a power of two (e8m0: a
       byte, 127 more than the exponent)
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.errors import first_line
from common.schema import Flag, Wrong, schema_of

MODES = ("int8", "w8a8", "int4", "w4a8", "fp8")
FOUR_BITS = ("int4", "w4a8")
MXFP4, MXFP4_GROUP = "mxfp4", 32  # of experts only, as files have it; nothing is rounded to it here
# The mode of what is sensitive beside them: heads and the lm_head.
BESIDE = {"int4": "int8", "w4a8": "w8a8", MXFP4: "w8a8"}
GROUPS = (32, 64, 128)

INPUTS = 64  # of a layer that share a scale in w8a8
FP8_MOST = 448.0  # the largest e4m3
# int4: the steps that a group's extreme may be. It gets the longer side, -8, beyond which it is cut.
EXTREME_STEPS = (-8.6, -8.0, -7.4, -6.8, -6.2)
CHUNK = 1 << 16  # numbers rounded together: with their results they stay in a core's cache


@dataclass(frozen=True)
class Scheme:
    """The quantisation of a module's layers, as `quantization` in a config.json describes it.

    mode: None if only experts are quantised. group: in int4 and w4a8, inputs that share a scale. lm_head: its
    mode; None: not quantised. experts: the mode of stacks of experts, if it is another.
    """

    mode: Literal[MODES] | None
    group: Literal[(0, *GROUPS)]
    lm_head: Literal[MODES] | Flag | None
    experts: Literal[MXFP4] | None = None

    @classmethod
    def read(cls, quantization: dict) -> Scheme:
        """Read a config.json's entry. Raises Wrong, a ValueError, if it is another.

        Older folders say of the lm_head true, for the mode of the layers, or false.
        """
        schema_of(cls).check(quantization, "quantization")
        mode, group, lm_head, experts = (quantization.get(f.name) for f in fields(cls))
        if isinstance(lm_head, bool):
            lm_head = mode if lm_head else None
        if mode is None and (lm_head or not experts):
            raise Wrong("quantization.mode", mode, f"one of {', '.join(MODES)}")
        if bool({mode, lm_head} & {*FOUR_BITS}) != bool(group):
            groups, names = (" or ".join(map(str, words)) for words in (GROUPS, FOUR_BITS))
            wanted = "0" if group else groups
            raise Wrong("quantization.group", group, f"{wanted}: {names} has groups of inputs, others none")
        return cls(mode, group, lm_head, experts)

    def written(self) -> dict:
        """Return the entry of a config.json."""
        return {name: value for name, value in asdict(self).items() if value is not None or name != "experts"}

    def of(self, name: str, stack: bool = False) -> tuple[str | None, int]:
        """(mode, group) of a layer that is quantised. stack: it is one of experts."""
        if stack and self.experts:
            return self.experts, MXFP4_GROUP
        mode = self.lm_head if name == "lm_head" else self.mode
        return mode, self.group if mode in FOUR_BITS else 0


def scales(weight: Tensor, mode: str, group: int = 0) -> Tensor:
    """Weight [..., N, K] -> its scales: [..., N, 1] float32, or for 4 bits [..., N, K/group] bfloat16."""
    weight = weight.float()
    if mode not in FOUR_BITS:
        return weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (FP8_MOST if mode == "fp8" else 127)
    return int4_scales(weight.unflatten(-1, (-1, group)))[..., 0]


def int4_scales(parts: Tensor, importance: Tensor | None = None) -> Tensor:
    """Groups [..., group] float32 -> the scale of each [..., 1], bfloat16, that has the least squared error.

    importance [..., group]: the factor of each squared error; None: 1.
    """
    best, least, q = torch.zeros_like(parts[..., :1]), math.inf, torch.empty_like(parts)
    root = None if importance is None else importance.sqrt()

    def rounded(scale: Tensor) -> Tensor:
        torch.mul(parts, torch.where(scale == 0, 1, scale).reciprocal(), out=q)
        return q.round_().clamp_(-8, 7)

    def consider(scale: Tensor) -> None:
        nonlocal best, least
        scale = scale.bfloat16().float()
        error = rounded(scale).mul_(scale).sub_(parts)
        error = torch.linalg.vector_norm(error if root is None else error.mul_(root), dim=-1, keepdim=True)
        best, least = torch.where(error < least, scale, best), error.clamp(max=least)

    # A scale that reaches the group's extreme exactly serves few weights, so others are tried.
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    for steps in EXTREME_STEPS:
        consider(extreme / steps)
    for _ in range(2):  # the scale that fits the values best, then the values that fit this scale
        rounded(best)
        square = (q.square() if root is None else (q * root).square_()).sum(-1, keepdim=True)
        product = q.mul_(parts) if importance is None else q.mul_(parts).mul_(importance)
        consider(product.sum(-1, keepdim=True) / square.clamp_(min=1e-30))
    return best.bfloat16()


def values(weight: Tensor, scale: Tensor, mode: str) -> Tensor:
    """Weight [..., N, K] in units of its scales: int8 (for 4 bits in -8..7) or float8_e4m3fn."""
    parts = weight.float().unflatten(-1, (scale.shape[-1], -1))
    units = (parts / torch.where(scale == 0, 1, scale).float()[..., None]).flatten(-2)
    if mode == "fp8":
        return units.to(torch.float8_e4m3fn)
    return (units.round_().clamp_(-8, 7) if mode in FOUR_BITS else units.round_()).to(torch.int8)


def chunks(weight: Tensor, rows: int | None = None) -> tuple[Tensor, ...]:
    """Return views of a weight [..., N, K], of so many rows each (default: `CHUNK` numbers)."""
    return weight.flatten(0, -2).split(rows or max(1, CHUNK // weight.shape[-1]))


def to_stored(weight: Tensor, scale: Tensor, mode: str) -> Tensor:
    """`values` as files and layers hold them: those of 4 bits are two in a byte."""
    q = values(weight, scale, mode)
    return pack_nibbles(q) if mode in FOUR_BITS else q


def quantize(weight: Tensor, mode: str, group: int = 0) -> tuple[Tensor, Tensor]:
    """Weight [..., N, K] -> it as files and layers hold it, and its scales."""
    done = []
    for rows in chunks(weight):
        scale = scales(rows, mode, group)
        done.append((to_stored(rows, scale, mode), scale))
    stored, scale = zip(*done)
    # Concatenation has no kernel for fp8, so its bytes are concatenated.
    stored, scale = torch.cat([x.view(torch.uint8) for x in stored]).view(stored[0].dtype), torch.cat(scale)
    return stored.unflatten(0, weight.shape[:-1]), scale.unflatten(0, weight.shape[:-1])


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [..., N, K] that a stored one with its scales stands for."""
    if scale.dtype == torch.uint8:
        values = e2m1(unpack_nibbles(weight) + 8).unflatten(-1, (-1, MXFP4_GROUP))
        return torch.ldexp(values, scale.int()[..., None] - 127).flatten(-2).to(dtype)
    q = unpack_nibbles(weight) if weight.dtype == torch.uint8 else weight
    return (q.float().unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]).flatten(-2).to(dtype)


def e2m1(codes: Tensor) -> Tensor:
    """Codes 0..15 -> what they stand for in e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negative."""
    size = (codes & 7).float()
    twice = torch.where(size < 4, size, torch.where(size < 6, 2 * size - 4, 4 * size - 16))
    return torch.where(codes > 7, -twice, twice) / 2


def pack_nibbles(q: Tensor) -> Tensor:
    """q [..., K] in -8..7 -> [..., K/2] uint8, even inputs in the low four bits."""
    pairs = (q + 8).view(torch.int16)  # the second in the high byte
    return (pairs | pairs >> 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`, int8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int8) - 8


def round_inputs(x: Tensor, group: int = INPUTS) -> Tensor:
    """x [..., K] as the products of w8a8, or with the weight's group of w4a8, read it. The dtype stays.

    Every `group` inputs are rounded to steps of their largest / 127.
    """
    K = x.shape[-1]
    parts = F.pad(x.float(), (0, -K % group)).unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    q = (parts * torch.where(scale > 1e-30, scale.reciprocal(), 0)).round()
    return (q * scale).flatten(-2)[..., :K].to(x.dtype)


FP8_DEVICES: set[torch.device] = set()  # whose tensor cores multiply fp8, see `find_fp8`


def find_fp8(device: torch.device, log: Callable[[str], None]) -> None:
    """Try the products of fp8 on a GPU with tensor cores for it. If one raises, log why it does without."""
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) < (8, 9):
        return
    try:
        q = torch.zeros(16, 16, device=device).to(torch.float8_e4m3fn)
        one, rows = torch.ones((), device=device), torch.ones(16, 1, device=device)
        for scales, dtype in (((rows, rows.t()), torch.bfloat16), ((one, one), torch.float32)):
            torch._scaled_mm(q, q.t(), *scales, out_dtype=dtype, use_fast_accum=True)
        FP8_DEVICES.add(device)
    except RuntimeError as e:
        log(f"fp8 runs without tensor cores, which is slower ({first_line(e)})")


class Quantized(nn.Module):
    """A weight [..., N, K] of one mode and its scales. Raises ValueError if the group does not divide K."""

    def __init__(self, shape: tuple[int, ...], mode: str, group: int):
        super().__init__()
        (*_, self.outputs, self.inputs), self.mode, self.group = shape, mode, group
        if group and self.inputs % group:
            raise Wrong("group", group, f"what divides {self.inputs} inputs")
        if group:
            sizes = self.inputs // 2, self.inputs // group
            dtypes = torch.uint8, torch.uint8 if mode == MXFP4 else torch.bfloat16
        else:
            sizes = self.inputs, 1
            dtypes = torch.float8_e4m3fn if mode == "fp8" else torch.int8, torch.float32
        self.weight, self.scale = (
            nn.Parameter(torch.empty(*shape[:-1], size, dtype=dtype), requires_grad=False)
            for size, dtype in zip(sizes, dtypes)
        )

    def rounded(self, x: Tensor) -> Tensor:
        """Return x as this weight is multiplied by it."""
        return round_inputs(x, self.group or INPUTS) if self.mode in ("w8a8", "w4a8") else x


class QuantizedLinear(Quantized):
    """A linear layer [K] -> [N] whose weight is int8 (w8a8 too), int4 (w4a8 too) in groups of `group` inputs,
    or fp8.

    On a GPU, int8 and int4 run on our kernel (`kernels.gpu`), for any number of rows, and fp8 on the tensor
    cores of one that multiplies it; elsewhere this is the reference, which dequantises the weight at every
    call. `kernels.packed` is the fast form for a CPU. w8a8 and w4a8 are made for a CPU: on a GPU they are
    int8 and int4 after the rounding of x.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False, mode: str = "int8", group: int = 0):
        super().__init__((outputs, inputs), mode, group)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @classmethod
    def of(cls, weight: Tensor, mode: str, group: int = 0, bias: Tensor | None = None) -> QuantizedLinear:
        """A weight [N, K] quantised."""
        layer = cls(weight.shape[1], weight.shape[0], False, mode, group)
        layer.weight.data, layer.scale.data = quantize(weight, mode, group)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return layer

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] that the quantised one stands for."""
        return dequantize(self.weight, self.scale, dtype)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype, added to `onto` [..., N] after rounding."""
        return self._product(x, onto, wide=False)

    def logits(self, x: Tensor) -> Tensor:
        """Return the same in float32, for an lm_head: on a GPU without rounding to x's dtype in between."""
        return self._product(x, None, wide=True)

    def _product(self, x: Tensor, onto: Tensor | None, wide: bool) -> Tensor:
        x = self.rounded(x)
        y = self._fp8(x, wide) if self.mode == "fp8" else F.linear(x, self.dequantize(x.dtype), self.bias)
        y = y.float() if wide else y
        return y if onto is None else onto + y

    def _fp8(self, x: Tensor, wide: bool) -> Tensor:
        rows = x.flatten(0, -2)
        scale = scales(rows, "fp8")
        q = values(rows, scale, "fp8")
        on_tensor_cores = x.device in FP8_DEVICES and all(n % 16 == 0 for n in self.weight.shape)
        multiply = partial(torch._scaled_mm, q, self.weight.t(), use_fast_accum=True)
        if on_tensor_cores and x.dtype == torch.bfloat16 and not wide:
            y = multiply(scale, self.scale.t(), out_dtype=torch.bfloat16)
        elif on_tensor_cores:  # scales of rows give bfloat16 only, one of 1 gives float32
            one = torch.ones((), device=x.device)
            y = multiply(one, one, out_dtype=torch.float32) * scale * self.scale.t()
        else:
            y = q.float() @ self.weight.float().t() * scale * self.scale.t()
        y = y if self.bias is None else y + self.bias
        return y.to(torch.float32 if wide else x.dtype).view(*x.shape[:-1], -1)


class QuantizedStack(Quantized):
    """The matrices of all E experts of a mixture [E, N, K], quantised; in fp8 only the weights are."""

    def forward(self, chosen: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The matrices of the experts `chosen` [...] -> [..., N, K], or of all [E, N, K].

        Only those are read.
        """
        if chosen is None:
            return dequantize(self.weight, self.scale, dtype)
        # Indexing has no kernel for fp8, so its bytes are indexed.
        weight = self.weight.view(torch.uint8)[chosen].view(self.weight.dtype)
        return dequantize(weight, self.scale[chosen], dtype)


def linear_names(module: nn.Module, lm_head: bool) -> list[str]:
    """Return the linear layers that quantisation replaces: the lm_head on demand, no router of experts."""
    return [
        name for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and not name.endswith("router")
        and (lm_head or name.partition(".")[0] != "lm_head")
    ]


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, attribute = name.rpartition(".")
    return module.get_submodule(parent), attribute


def replace_all(module: nn.Module, scheme: Scheme) -> None:
    """Put empty quantised layers in place of linear layers and of stacks of experts.

    Raises ValueError if a group does not divide a layer's inputs.
    """
    linear = linear_names(module, scheme.lm_head is not None) if scheme.mode else []
    for name in linear + [name for name, p in module.named_parameters() if p.ndim == 3]:
        owner, attribute = _place(module, name)
        old = getattr(owner, attribute)
        try:
            if isinstance(old, nn.Parameter):
                new: nn.Module = QuantizedStack(tuple(old.shape), *scheme.of(name, stack=True))
            else:
                bias = old.bias is not None
                new = QuantizedLinear(old.in_features, old.out_features, bias, *scheme.of(name))
        except Wrong as e:
            raise Wrong(f"quantization.{e.key}", e.found, f"{e.expected}, of {name}") from None
        if isinstance(old, nn.Parameter):
            delattr(owner, attribute)
        setattr(owner, attribute, new)


def quantize_linears(module: nn.Module, scheme: Scheme) -> None:
    """Quantise the linear layers of a loaded module in place, except quantised ones.

    A tied lm_head becomes its own. Raises ValueError as `replace_all`.
    """
    if scheme.lm_head and module.lm_head is None:
        module.lm_head = QuantizedLinear.of(module.embed.weight.detach(), *scheme.of("lm_head"))
    for name in linear_names(module, scheme.lm_head is not None):
        layer = module.get_submodule(name)
        bias = None if layer.bias is None else layer.bias.detach()
        setattr(*_place(module, name), QuantizedLinear.of(layer.weight.detach(), *scheme.of(name), bias))


def quantize_at_load(model: nn.Module, mode: str, own_lm_head: bool) -> None:
    """Quantize a 16-bit model in place. own_lm_head: its lm_head too, which else is another model's."""
    quantize_linears(model, Scheme(mode, 0, mode if own_lm_head else None))
