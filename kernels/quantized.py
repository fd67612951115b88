"""Quantized weights: their arithmetic, and the linear layers that hold them.

Weights are w = scale * q, symmetric. Here they are rounded to the nearest q; `kernels.gptq` does better.

int8   one scale per output, q in -127..127
int4   one scale per output and group of inputs, q in -8..7; two values per byte in files
w8a8   int8 weights; a layer's inputs are rounded to int8 too, with one scale per 64 inputs of a token
w4a8   int4 weights; inputs are rounded to int8 too, with one scale per group of the weight
fp8    e4m3, one scale per output; inputs are rounded to fp8 too, with one scale per token
mxfp4  of experts whose files have it: e2m1, stored like int4; one scale per 32 inputs, a power of two (e8m0:
       a byte, the exponent + 127)
q4, q8 of published quantized files, see `kernels.stored`; inputs are rounded to int8 in the weight's groups
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from common.errors import first_line
from common.schema import Flag, InvalidValue, schema_of
from kernels.stored import STORED, Kind, numbers, pack_pairs, unpack_pairs, values

MODES = ("int8", "w8a8", "int4", "w4a8", "fp8")
FOUR_BITS = ("int4", "w4a8")
EMBED = "embed"  # the name of the embedding table, quantized only as its source stores it
AS_STORED = "stored"  # the mode of a scheme whose layers have kinds of their own, see `kernels.stored`
MXFP4, MXFP4_GROUP = "mxfp4", 32  # of experts only, read from files, never rounded to
# The mode of the lm_head and of draft heads, which are more sensitive, if not the mode of the layers.
LM_HEAD_MODES = {"int4": "int8", "w4a8": "w8a8", MXFP4: "w8a8"}
GROUPS = (32, 64, 128)

ROUNDS_INPUTS = ("w8a8", "w4a8", *STORED)  # to int8
W8A8_GROUP = 64  # inputs that share a scale
FP8_MAX = 448.0  # the largest e4m3 number
# int4: candidates for the q of a group's extreme value, which is clamped to -8..7.
EXTREME_Q = (-8.6, -8.0, -7.4, -6.8, -6.2)
CHUNK_VALUES = 1 << 16  # values rounded at a time: with their results they fit a core's cache


@dataclass(frozen=True)
class Scheme:
    """The quantization of a module's layers, `quantization` in a config.json.

    mode: None if only experts are quantized. group: in int4 and w4a8, the inputs that share a scale. lm_head:
    its mode; None: not quantized. experts: the mode of experts, if it differs. kinds: of layers as they are
    stored, by their names; others are not quantized.
    """

    mode: Literal[(*MODES, AS_STORED)] | None
    group: Literal[(0, *GROUPS)]
    lm_head: Literal[MODES] | Flag | None
    experts: Literal[MXFP4] | None = None
    kinds: dict[str, str] | None = None

    @classmethod
    def from_config(cls, quantization: dict) -> Scheme:
        """Read the entry of a config.json. Raises InvalidValue, a ValueError, if it is invalid.

        In older folders, lm_head is true, which means the mode of the layers, or false.
        """
        schema_of(cls).check(quantization, "quantization")
        mode, group, lm_head, experts, kinds = (quantization.get(f.name) for f in fields(cls))
        if mode == AS_STORED:
            for name, kind in (kinds or {}).items():
                try:
                    Kind.parse(kind)
                except (ValueError, TypeError):
                    key = f"quantization.kinds.{name}"
                    raise InvalidValue(key, kind, "a kind as q4-32-256-min") from None
            return cls(mode, 0, None, experts, kinds or {})
        if isinstance(lm_head, bool):
            lm_head = mode if lm_head else None
        if mode is None and (lm_head or not experts):
            raise InvalidValue("quantization.mode", mode, f"one of {', '.join(MODES)}")
        if bool({mode, lm_head} & {*FOUR_BITS}) != bool(group):
            groups, names = (" or ".join(map(str, words)) for words in (GROUPS, FOUR_BITS))
            wanted = "0" if group else groups
            expected = f"{wanted}: {names} has groups of inputs, others none"
            raise InvalidValue("quantization.group", group, expected)
        return cls(mode, group, lm_head, experts)

    def to_config(self) -> dict:
        """Return the entry of a config.json."""
        return {name: value for name, value in asdict(self).items()
                if value is not None or name not in ("experts", "kinds")}

    def mode_of(self, name: str, is_experts: bool = False) -> tuple:
        """Return mode and group of a quantized layer, as it is stored its `Kind`."""
        if self.kinds and name in self.kinds:
            return Kind.parse(self.kinds[name])
        if is_experts and self.experts:
            return self.experts, MXFP4_GROUP
        mode = self.lm_head if name == "lm_head" else self.mode
        return mode, self.group if mode in FOUR_BITS else 0


def scales_of(weight: Tensor, mode: str, group: int = 0) -> Tensor:
    """Return the scales of weight [..., N, K]: [..., N, 1] float32, in 4 bits [..., N, K/group] bfloat16."""
    weight = weight.float()
    if mode not in FOUR_BITS:
        return weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (FP8_MAX if mode == "fp8" else 127)
    return int4_scales(weight.unflatten(-1, (-1, group)))[..., 0]


def int4_scales(parts: Tensor, importance: Tensor | None = None) -> Tensor:
    """Return the scales [..., 1] bfloat16 of groups [..., group] float32 with the least squared error.

    importance [..., group]: weights of the squared errors; None: 1.
    """
    # The scale that represents the extreme exactly is rarely the best one.
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    inverse = torch.where(extreme == 0, 1, extreme).reciprocal()
    best, gain, q, product = torch.zeros_like(extreme), 0.0, torch.empty_like(parts), torch.empty_like(parts)
    for q_extreme in EXTREME_Q:
        torch.mul(parts, inverse * q_extreme, out=q).round_().clamp_(-8, 7)
        # With these values the best scale is q.parts / q.q. It makes the error q.parts * scale smaller.
        torch.mul(q, parts, out=product)
        q.square_()
        if importance is not None:
            product.mul_(importance), q.mul_(importance)
        fit = product.sum(-1, keepdim=True)
        scale = fit / q.sum(-1, keepdim=True).clamp_(min=1e-30)
        fit *= scale
        best, gain = torch.where(fit > gain, scale, best), fit.clamp(min=gain)
    return best.bfloat16()


def quantized_values(weight: Tensor, scale: Tensor, mode: str) -> Tensor:
    """Return q of weight [..., N, K]: int8 (with 4 bits in -8..7) or float8_e4m3fn."""
    parts = weight.float().unflatten(-1, (scale.shape[-1], -1))
    units = (parts / torch.where(scale == 0, 1, scale).float()[..., None]).flatten(-2)
    if mode == "fp8":
        return units.to(torch.float8_e4m3fn)
    return (units.round_().clamp_(-8, 7) if mode in FOUR_BITS else units.round_()).to(torch.int8)


def split_rows(weight: Tensor, rows: int | None = None) -> tuple[Tensor, ...]:
    """Split a weight [..., N, K] into views of `rows` rows each (default: of `CHUNK_VALUES` values)."""
    return weight.flatten(0, -2).split(rows or max(1, CHUNK_VALUES // weight.shape[-1]))


def quantize_with(weight: Tensor, scale: Tensor, mode: str) -> Tensor:
    """Return `quantized_values` as files and layers store them: with 4 bits, two per byte."""
    q = quantized_values(weight, scale, mode)
    return pack_nibbles(q) if mode in FOUR_BITS else q


def quantize(weight: Tensor, mode: str, group: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize weight [..., N, K]. Returns it as files and layers store it, and its scales."""
    done = []
    for rows in split_rows(weight):
        scale = scales_of(rows, mode, group)
        done.append((quantize_with(rows, scale, mode), scale))
    stored, scale = zip(*done)
    # torch.cat does not support fp8, so its bytes are concatenated.
    stored, scale = torch.cat([x.view(torch.uint8) for x in stored]).view(stored[0].dtype), torch.cat(scale)
    return stored.unflatten(0, weight.shape[:-1]), scale.unflatten(0, weight.shape[:-1])


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [..., N, K] of a stored one and its scales."""
    if scale.dtype == torch.uint8:
        values = e2m1(unpack_nibbles(weight) + 8).unflatten(-1, (-1, MXFP4_GROUP))
        return torch.ldexp(values, scale.int()[..., None] - 127).flatten(-2).to(dtype)
    q = unpack_nibbles(weight) if weight.dtype == torch.uint8 else weight
    return (q.float().unflatten(-1, (scale.shape[-1], -1)) * scale.float()[..., None]).flatten(-2).to(dtype)


def e2m1(codes: Tensor) -> Tensor:
    """Convert e2m1 codes 0..15 to numbers: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives."""
    size = (codes & 7).float()
    twice = torch.where(size < 4, size, torch.where(size < 6, 2 * size - 4, 4 * size - 16))
    return torch.where(codes > 7, -twice, twice) / 2


def pack_nibbles(q: Tensor) -> Tensor:
    """Pack q [..., K] int8 in -8..7 as `kernels.stored.pack_pairs` does."""
    return pack_pairs(q + 8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Invert `pack_nibbles`, to int8."""
    return unpack_pairs(packed).to(torch.int8) - 8


def round_inputs(x: Tensor, group: int = W8A8_GROUP) -> Tensor:
    """Round x [..., K] to int8 with one scale per `group` inputs, and return it in its own dtype."""
    K = x.shape[-1]
    parts = F.pad(x.float(), (0, -K % group)).unflatten(-1, (-1, group))
    scale = parts.abs().amax(-1, keepdim=True) / 127
    q = (parts * torch.where(scale > 1e-30, scale.reciprocal(), 0)).round()
    return (q * scale).flatten(-2)[..., :K].to(x.dtype)


FP8_DEVICES: set[torch.device] = set()  # GPUs where `torch._scaled_mm` works, see `detect_fp8`


def detect_fp8(device: torch.device, log: Callable[[str], None]) -> None:
    """Try fp8 products on a GPU of compute capability 8.9 or later. Log why, if they fail."""
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
    """A quantized weight [..., N, K] and its scales. Raises ValueError if the group does not divide K.

    restore: inverts the order in which a backend has stored weight and scales, if it has changed it.
    """

    restore: Callable[[Quantized, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __init__(self, shape: tuple[int, ...], mode: str, group: int, *more):
        super().__init__()
        (*_, self.outputs, self.inputs), self.mode, self.group = shape, mode, group
        self.kind = Kind(mode, group, *more) if mode in STORED else None
        if group and self.inputs % max(group, 0, *more[:1]):
            raise InvalidValue("group", group, f"a divisor of {self.inputs} inputs")
        if self.kind:
            for name, (size, dtype) in self.kind.sizes(self.inputs).items():
                tensor = torch.empty(*shape[:-1], size, dtype=dtype)
                setattr(self, name, nn.Parameter(tensor, requires_grad=False))
            if self.kind.ordered:
                self.order = nn.Parameter(torch.empty(self.inputs, dtype=torch.int32), requires_grad=False)
            return
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

    def round_inputs(self, x: Tensor) -> Tensor:
        """Round x to int8 if this mode does."""
        group = self.kind.rounded_inputs if self.kind else self.group or W8A8_GROUP
        if self.kind and self.kind.ordered:
            return round_inputs(x[..., self.order], group)[..., self.order.argsort()]
        return round_inputs(x, group) if self.mode in ROUNDS_INPUTS else x

    def dequantize(self, dtype: torch.dtype, index: Tensor | None = None) -> Tensor:
        """Return the weight [..., N, K], or of a stack [E, N, K] the matrices of experts `index` [...]."""
        weight, scale = self.weight, self.scale
        if self.kind:
            codes = self.codes if self.kind.unit else None
            stored = (x if x is None or index is None else x[index] for x in (weight, scale, codes))
            weight, *scales = stored
            exact = numbers(self.kind, values(self.kind, weight), *scales).to(dtype)
            return exact[..., self.order.argsort()] if self.kind.ordered else exact
        if index is not None:  # indexing does not support fp8, so its bytes are indexed
            weight, scale = weight.view(torch.uint8)[index].view(weight.dtype), scale[index]
        if self.restore is not None:
            weight, scale = self.restore(self, weight, scale)
        return dequantize(weight, scale, dtype)


class QuantizedLinear(Quantized):
    """A quantized linear layer [K] -> [N]. This is the reference: it dequantizes the weight at every call.

    `kernels.packed` has the form for CPUs, `kernels.gpu.products` the one for int8 and int4 on GPUs; fp8 uses
    tensor cores where they support it. On a GPU, w8a8 and w4a8 run as int8 and int4 on rounded inputs.
    fused: computes `product` in one kernel.
    """

    fused: Callable | None = None

    def __init__(
        self, inputs: int, outputs: int, bias: bool = False, mode: str = "int8", group: int = 0, *more
    ):
        super().__init__((outputs, inputs), mode, group, *more)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @classmethod
    def from_weight(
        cls, weight: Tensor, mode: str, group: int = 0, bias: Tensor | None = None
    ) -> QuantizedLinear:
        """Quantize a weight [N, K]."""
        layer = cls(weight.shape[1], weight.shape[0], False, mode, group)
        layer.weight.data, layer.scale.data = quantize(weight, mode, group)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return layer

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N] in x's dtype, rounded before `residual` [..., N] is added."""
        return (self.fused or QuantizedLinear.product)(self, x, residual, False)

    def logits(self, x: Tensor) -> Tensor:
        """Return the same in float32, for an lm_head: on a GPU without rounding to x's dtype first."""
        return (self.fused or QuantizedLinear.product)(self, x, None, True)

    def product(self, x: Tensor, residual: Tensor | None, float32: bool) -> Tensor:
        """Compute `forward`, or `logits` if float32, in PyTorch."""
        x = self.round_inputs(x)
        if self.mode == "fp8":
            y = self._fp8_product(x, float32)
        else:
            y = F.linear(x, self.dequantize(x.dtype), self.bias)
        y = y.float() if float32 else y
        return y if residual is None else residual + y

    def _fp8_product(self, x: Tensor, float32: bool) -> Tensor:
        tokens = x.flatten(0, -2)
        scale = scales_of(tokens, "fp8")
        q = quantized_values(tokens, scale, "fp8")
        on_tensor_cores = x.device in FP8_DEVICES and all(n % 16 == 0 for n in self.weight.shape)
        multiply = partial(torch._scaled_mm, q, self.weight.t(), use_fast_accum=True)
        if on_tensor_cores and x.dtype == torch.bfloat16 and not float32:
            y = multiply(scale, self.scale.t(), out_dtype=torch.bfloat16)
        elif on_tensor_cores:  # float32 results need one scale for all tokens
            one = torch.ones((), device=x.device)
            y = multiply(one, one, out_dtype=torch.float32) * scale * self.scale.t()
        else:
            y = q.float() @ self.weight.float().t() * scale * self.scale.t()
        y = y if self.bias is None else y + self.bias
        return y.to(torch.float32 if float32 else x.dtype).view(*x.shape[:-1], -1)


class QuantizedEmbedding(QuantizedLinear):
    """An embedding table as its source stores it, which is the lm_head too if the two are tied.

    like: a module without quantized weights, whose dtype embeddings have.
    """

    dtype, device = property(attrgetter("like.weight.dtype")), property(attrgetter("weight.device"))

    def __init__(self, like: nn.Module, *layer):
        super().__init__(*layer)
        object.__setattr__(self, "like", like)  # no child of this module

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> their embeddings [..., H]."""
        return self.dequantize(self.dtype, tokens)


class QuantizedStack(Quantized):
    """The matrices of all E experts of a mixture [E, N, K]. In fp8 only weights are rounded, not inputs."""


def linear_names(module: nn.Module, lm_head: bool) -> list[str]:
    """Return the names of linear layers to quantize: not the routers of experts; the lm_head if asked for."""
    return [
        name for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and not name.endswith("router")
        and (lm_head or name.partition(".")[0] != "lm_head")
    ]


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, attribute = name.rpartition(".")
    return module.get_submodule(parent), attribute


def replace_linears(module: nn.Module, scheme: Scheme) -> None:
    """Replace linear layers and stacks of experts by empty quantized ones.

    Raises ValueError if a group does not divide a layer's inputs.
    """
    linear = linear_names(module, scheme.lm_head is not None) if scheme.mode else []
    stacks = [name for name, p in module.named_parameters() if p.ndim == 3]
    if scheme.kinds is not None:
        found = [*linear_names(module, True), *stacks, EMBED]
        if unknown := [name for name in scheme.kinds if name not in found]:
            kind = scheme.kinds[unknown[0]]
            raise InvalidValue(f"quantization.kinds.{unknown[0]}", kind, "the name of a layer")
        linear = list(scheme.kinds)
        stacks = [name for name in stacks if scheme.experts and name not in scheme.kinds]
    for name in linear + stacks:
        owner, attribute = _owner(module, name)
        old = getattr(owner, attribute)
        try:
            if isinstance(old, nn.Parameter):
                new: nn.Module = QuantizedStack(tuple(old.shape), *scheme.mode_of(name, is_experts=True))
            elif name == EMBED:
                new = QuantizedEmbedding(module.norm, *old.weight.shape[::-1], False, *scheme.mode_of(name))
            else:
                bias = old.bias is not None
                new = QuantizedLinear(old.in_features, old.out_features, bias, *scheme.mode_of(name))
        except InvalidValue as e:
            raise InvalidValue(f"quantization.{e.key}", e.found, f"{e.expected}, of {name}") from None
        if isinstance(old, nn.Parameter):
            delattr(owner, attribute)
        setattr(owner, attribute, new)


def quantize_linears(module: nn.Module, scheme: Scheme) -> None:
    """Quantize the linear layers of a loaded module in place, except those that are quantized already.

    A tied lm_head is untied. Raises ValueError as `replace_linears` does.
    """
    if scheme.lm_head and module.lm_head is None:
        module.lm_head = QuantizedLinear.from_weight(module.embed.weight.detach(), *scheme.mode_of("lm_head"))
    for name in linear_names(module, scheme.lm_head is not None):
        layer = module.get_submodule(name)
        bias = None if layer.bias is None else layer.bias.detach()
        quantized = QuantizedLinear.from_weight(layer.weight.detach(), *scheme.mode_of(name), bias)
        setattr(*_owner(module, name), quantized)


def quantize_at_load(model: nn.Module, mode: str, own_lm_head: bool) -> None:
    """Quantize a 16-bit model in place. own_lm_head: its lm_head too, which is not shared with its target."""
    quantize_linears(model, Scheme(mode, 0, mode if own_lm_head else None))
