"""Weights of published quantized checkpoints: GPTQ, AWQ, compressed-tensors and fp8.

The layouts are those of AutoGPTQ's and AutoAWQ's linear layers, of vllm-project/compressed-tensors and of
transformers' fine-grained fp8.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint.source import QUANTIZATION, Entry, Grouped
from common.errors import InputError, library_errors
from kernels.quantized import e2m1
from kernels.stored import GROUPS, Kind, pack_values, regroup

PARTS = {"weight", "qweight", "qzeros", "scales", "g_idx"} | {  # tensors of a quantized layer
    f"weight_{part}" for part in
    ("packed", "scale", "scale_2", "scale_inv", "global_scale", "zero_point", "shape", "g_idx")}
# Keys about quantization of activations and KV caches, which are ignored.
UNUSED = re.compile(r"\.(input|output|[qkv])_(scale|zero_point|global_scale|scale_ub)$")
WORDS, INTEGERS = (torch.int32,), (torch.int32, torch.int8, torch.int64)
FLOATS = torch.float32, torch.bfloat16, torch.float16
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # order of the eight columns of a word
FP8_BLOCK = 128, 128
Parts = dict[str, Entry]


class Codes(NamedTuple):
    """A matrix w = (q - zero) * scale: q [N, K] in bytes, scale and zero [N, groups] float32."""

    q: Tensor
    scale: Tensor
    zero: Tensor | None = None


class Layer(NamedTuple):
    """A quantized layer. shape: of its weight. minima: zero points are stored as minima. order: permutation
    that sorts the inputs by group, or None.
    """

    shape: tuple[int, int]
    read: Callable[[], Codes]
    mode: str  # of its `Kind`; q4 where the kernels have it
    minima: bool
    groups: int
    order: Tensor | None = None

    def stored(self, kind: Kind, to: Kind, times: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return integers and scales in kind `to`; `kind` has `times` scales for each of ours."""
        q, scale, zero = self._in_groups()
        if zero is not None and not self.minima:
            q = (q - zero[..., None]).to(torch.int8)
        scale = torch.cat([scale, scale * zero] if self.minima else [scale], 1).repeat_interleave(times, 1)
        return q.flatten(1), *regroup(kind, to, scale, None)

    def dequantize(self) -> Tensor:
        """Return the weight in float32."""
        q, scale, zero = self._in_groups()
        weight = ((q.float() if zero is None else q - zero[..., None]) * scale[..., None]).flatten(1)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def _in_groups(self) -> Codes:
        """Read the layer with its inputs sorted: q [N, groups, K / groups]."""
        q, *scales = self.read()
        return Codes((q if self.order is None else q[:, self.order]).unflatten(1, (self.groups, -1)), *scales)

    def grouped(self) -> Grouped | None:
        """Return the weight in a kind of `kernels.stored`; None if no kind represents it."""
        size, rest = divmod(self.shape[1], self.groups)
        group = next((n for n in reversed(GROUPS) if size and not rest and size % n == 0), 0)
        if not group:
            return None
        mode = "q6" if self.mode == "q4" and group == 16 else self.mode
        kind = Kind(mode, group, 0, self.minima, self.order is not None)

        def read(to: Kind) -> tuple:
            q, *scales = self.stored(kind, to, size // group)
            return pack_values(to, q), *scales

        return Grouped(kind, read, self.order)


def _expect(layer: Parts, **expected: tuple | None) -> None:
    """Raise ValueError unless a layer has these parts, with these dtypes and one of these shapes."""
    if other := [*(layer.keys() - {name for name, known in expected.items() if known})]:
        raise ValueError(f"{other[0]} is unexpected")
    for name, (dtypes, *shapes) in {name: known for name, known in expected.items() if known}.items():
        found = layer[name]
        if found.dtype not in dtypes or tuple(found.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{name} is {found.dtype} {list(found.shape)}, expected {dtypes[0]} {wanted}")


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words [R, W], low bits first, to [R, W * 32 / bits] uint8."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    return torch.stack([packed >> at & (1 << bits) - 1 for at in range(0, 8, bits)], -1).flatten(1)


def _order(entry: Entry | None, groups: int) -> Tensor | None:
    """Return the permutation that sorts inputs by group (g_idx, `entry`); None if they are sorted."""
    of = torch.tensor([-1]) if entry is None else entry.read().long()
    if bool((of < 0).all()):  # not written yet
        return None
    if of.bincount().tolist() != [len(of) // groups] * groups:
        raise ValueError(f"its {len(of)} inputs are not in {groups} groups of equal size")
    return None if bool((of.diff() >= 0).all()) else of.argsort(stable=True)


def _zero_points(bits: int, scale: Entry) -> tuple[str, bool]:
    """Return mode and `minima` of a layer with zero points.

    zero * scale is exact in float32 if the scale's last bits are 0, as those of a 16-bit one. Otherwise q -
    zero is stored, with 5 bits or, for 8 bits, which no mode holds, not.
    """
    exact = bits == 8 or scale.dtype != torch.float32 or not (scale.read().view(torch.int32) & 15).any()
    return "q8" if bits == 8 else "q4" if exact else "q6", bool(exact)


def _gptq(layer: Parts, quantization: dict) -> Layer:
    """Read a GPTQ layer. Version 1 of the format stores zero points minus 1."""
    (rows, N), groups, order = layer["qweight"].shape, layer["scales"].shape[0], layer.get("g_idx")
    zero_offset = int(quantization.get("checkpoint_format") != "gptq_v2")
    bits, known = 32 * layer["qzeros"].shape[1] // N, {one["bits"] for one in _schemes(quantization)}
    if bits not in METHODS["gptq"]["bits"] or bits not in known:
        raise ValueError(f"has {bits} bits, its config says {' or '.join(map(str, known))}")
    K = rows * 32 // bits
    _expect(layer, qweight=(WORDS, (rows, N)), qzeros=(WORDS, (groups, N * bits // 32)),
            scales=(FLOATS, (groups, N)), g_idx=order and (INTEGERS, (K,)))

    def read() -> Codes:
        scale = layer["scales"].read().float().t()
        q = unpack(layer["qweight"].read().t(), bits)
        zeros = unpack(layer["qzeros"].read(), bits).t().float() + zero_offset
        if quantization.get("sym") and bool((zeros != 1 << bits - 1).any()):
            raise ValueError(f"sym is true, but its zeros are not {1 << bits - 1}; check checkpoint_format")
        if bits == 8:
            q, zeros = (q.int() - 128).to(torch.int8), zeros - 128
        return Codes(q, scale, zeros)

    return Layer((N, K), read, *_zero_points(bits, layer["scales"]), groups, _order(order, groups))


def _awq(layer: Parts, quantization: dict) -> Layer:
    (K, columns), groups = layer["qweight"].shape, layer["scales"].shape[0]
    _expect(layer, qweight=(WORDS, (K, columns)), qzeros=(WORDS, (groups, columns)),
            scales=(FLOATS, (groups, 8 * columns)))

    def read() -> Codes:
        q, zeros = (unpack(layer[part].read(), 4).unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1).t()
                    for part in ("qweight", "qzeros"))
        scale = layer["scales"].read().float().t()
        return Codes(q, scale, zeros.float())

    return Layer((8 * columns, K), read, *_zero_points(4, layer["scales"]), groups)


def _integers(layer: Parts, quantization: dict) -> Layer:
    """Read an integer layer: packed words with an offset, or int8; weight_scale per tensor, row or group."""
    packed, zeros, order = map(layer.get, ("weight_packed", "weight_zero_point", "weight_g_idx"))
    scale = layer["weight_scale"]
    N, K = layer["weight_shape"].read().tolist() if packed else layer["weight"].shape
    bits, groups = 32 * packed.shape[1] // K if packed else 8, scale.shape[1] if len(scale.shape) > 1 else 1
    if bits not in (4, 8):
        raise ValueError(f"weight_packed has {bits} bits for a value; expected 4 or 8")
    offset = 0 if bits == 4 and zeros else 1 << bits - 1
    symmetric = all(one.get("symmetric") for one in _schemes(quantization))
    max_bits = max(one.get("num_bits") or 8 for one in _schemes(quantization))
    _expect(layer, weight_packed=packed and (WORDS, (N, -(-K * bits // 32))),
            weight_shape=packed and (INTEGERS, (2,)), weight=None if packed else (INTEGERS, (N, K)),
            weight_scale=(FLOATS, (N, groups), (N,), (1,), ()), weight_g_idx=order and (INTEGERS, (K,)),
            weight_zero_point=zeros and (
                (WORDS, (-(-N * bits // 32), groups)) if packed else (INTEGERS, scale.shape)))

    def read() -> Codes:
        each = scale.read().float()
        each, q = each.view(-1, groups).expand(N, -1), (packed or layer["weight"]).read()
        if packed:
            q = (unpack(q, bits)[:, :K].int() - offset).to(torch.int8)
        elif bool((q >> max_bits - 1 != q >> 7).any()):
            raise ValueError(f"has values of 8 bits, its config says {max_bits}")
        if not zeros:
            return Codes(q, each)
        zero = unpack(zeros.read().t(), bits)[:, :N].t().float() - offset if packed else zeros.read().float()
        if symmetric and bool((zero != (8 if packed and not offset else 0)).any()):
            raise ValueError("symmetric is true, but it has zero points")
        return Codes(q, each, zero.view(-1, groups))

    mode, minima = _zero_points(bits, scale) if zeros else (f"q{bits}", False)
    return Layer((N, K), read, mode, minima, groups, _order(order, groups))


def _float4(layer: Parts, quantization: dict) -> Layer:
    """Read an e2m1 layer, two values per byte.

    Scales: exponents (MXFP4), e4m3 / global scale (NVFP4), or e4m3 * scale_2 (ModelOpt's NVFP4).
    """
    name = "weight_packed" if "weight_packed" in layer else "weight"
    above, factor = map(layer.get, ("weight_global_scale", "weight_scale_2"))
    (N, columns), whole = layer[name].shape, above or factor
    groups, dtype = 2 * columns // (16 if whole else 32), torch.float8_e4m3fn if whole else torch.uint8
    _expect(layer, **{name: ([torch.uint8], (N, columns))}, weight_scale=([dtype], (N, groups)),
            weight_global_scale=above and (FLOATS, (1,)), weight_scale_2=factor and (FLOATS, (), (1,)))

    def read() -> Codes:
        scale, packed = layer["weight_scale"].read(), layer[name].read()
        if whole:
            each = whole.read().float()
            scale = scale.float() / each if above else scale.float() * each
            if bool(each.isinf()):
                raise ValueError("the scale of the whole weight is not finite")
        else:
            scale = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
        twice = e2m1(torch.stack((packed & 15, packed >> 4), -1).flatten(1)).mul_(2)
        return Codes(twice.to(torch.int8), scale / 2)

    return Layer((N, 2 * columns), read, "q6", False, groups)


def _float8(layer: Parts, quantization: dict) -> Layer:
    """Read an e4m3 layer with a scale per tensor, row or block."""
    (N, K), (rows, columns) = layer["weight"].shape, quantization.get("weight_block_size") or FP8_BLOCK
    name = "weight_scale" if "weight_scale" in layer else "weight_scale_inv"
    blocks = -(-N // rows), -(-K // columns)
    _expect(layer, **{"weight": ([torch.float8_e4m3fn], (N, K)),
                      name: (FLOATS, blocks, (N, 1), (N,), (1, 1), (1,), ())})

    in_blocks = tuple(layer[name].shape) == blocks
    group = math.gcd(K, columns) if in_blocks else K  # the last block may have fewer inputs

    def read() -> Codes:
        q, scale = layer["weight"].read(), layer[name].read().float()
        if bool((q.view(torch.uint8) & 127 == 127).any()):
            raise ValueError("weight has numbers that are not finite")
        if in_blocks:
            scale = scale.repeat_interleave(rows, 0)[:N]
            scale = scale.repeat_interleave(columns // group, 1)[:, : K // group]
        return Codes(q, scale if in_blocks else scale.view(-1, 1).expand(N, 1))

    return Layer((N, K), read, "f8", False, K // group)


def _layer(layer: Parts, quantization: dict) -> Layer:
    """Return the layer that these parts form. Raises ValueError or KeyError if no method has them."""
    if "qweight" in layer:
        return (_awq if quantization["quant_method"] == "awq" else _gptq)(layer, quantization)
    dtype = layer["weight_packed" if "weight_packed" in layer else "weight"].dtype
    readers = {torch.uint8: _float4, torch.int8: _integers, torch.float8_e4m3fn: _float8}
    return readers.get(dtype, _integers if "weight_packed" in layer else _float8)(layer, quantization)


def _schemes(quantization: dict) -> list[dict]:
    """Return the schemes of weights that a config describes."""
    if groups := quantization.get("config_groups"):
        return [one.get("weights") or {} for one in groups.values()]
    return [quantization, *(quantization | one for one in (quantization.get("dynamic") or {}).values())]


def _check_config(layer: Parts, whole: Layer, quantization: dict) -> None:
    """Raise ValueError if a layer contradicts its config."""
    schemes, K = _schemes(quantization), whole.shape[1]
    weight = layer.get("weight_packed") or layer.get("weight")
    sizes = {K if one.get("strategy") in ("channel", "tensor")
             else one.get("group_size", one.get("q_group_size")) for one in schemes}
    found = {"groups of {} inputs": (K // whole.groups, {K if size == -1 else size for size in sizes})}
    if weight:
        is_float = weight.dtype in (torch.uint8, torch.float8_e4m3fn)
        found["{} values"] = "float" if is_float else "int", {one.get("type") for one in schemes}
    if weight and weight.dtype != torch.int8:  # bytes may hold fewer bits
        bits = 8 * weight.dtype.itemsize * weight.shape[1] // K
        found["{} bits"] = bits, {one.get("num_bits") for one in schemes}
    for what, (own, known) in found.items():
        if own not in known and all(known):
            raise ValueError(f"has {what.format(own)}, its config says {' or '.join(map(str, known))}")
    orders = [layer[name].read() for name in ("g_idx", "weight_g_idx") if name in layer]
    lacks = {
        "g_idx": not any(bool((one >= 0).all()) for one in orders) and whole.groups > 1
        and all(one.get("desc_act") or one.get("actorder") == "group" for one in schemes),
        "zero points": not {"qzeros", "weight_zero_point"} & layer.keys()
        and all(one.get("symmetric") is False for one in schemes)}
    for what, lacking in lacks.items():
        if lacking:
            raise ValueError(f"lacks {what}, for which its config asks")


# Config keys of each method, and their supported values.
METHODS = {
    "gptq": {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2", ""), "quant_method": ("gptq",)},
    "awq": {"bits": (4,), "w_bit": (4,), "version": ("gemm", "GEMM")},
    "fp8": {"fmt": ("e4m3",)}, "fbgemm_fp8": {}, "modelopt": {"quant_algo": ("FP8", "NVFP4")},
    "compressed-tensors": {
        "format": ("dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized",
                   "naive-quantized", "nvfp4-pack-quantized", "pack-quantized"),
        "sparsity_config": ({},), "transform_config": ({},),
    },
}


def dequantized(path: Path, config: dict, tensors: dict[str, Entry]) -> tuple[dict, dict[str, Entry]]:
    """Return a folder's config and tensors; one weight replaces the parts of each quantized layer.

    Weights are read in float32 or as stored (`Entry.grouped`). MXFP4 is left to the families.
    Raises InputError on unknown methods and unsupported variants.
    """
    key = next(key for key in QUANTIZATION if config.get(key))
    quantization = config[key]
    if not isinstance(quantization, dict):
        raise InputError(f"{path}: {key} is {json.dumps(quantization)[:60]}; expected an object")
    if (method := quantization.get("quant_method", "compressed-tensors")) == "mxfp4":  # families read it
        return config, tensors
    if method not in METHODS:
        raise InputError(f"{path}: {key} {json.dumps(quantization)[:60]} is not supported")
    for name, known in METHODS[method].items():
        if quantization.get(name) not in (None, *known):
            raise InputError(f"{path}: {key}: {name} {json.dumps(quantization[name])[:60]} is not supported;"
                             f" expected {' or '.join(map(json.dumps, known))}")
    found, layers = {}, {}
    for name, entry in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf in PARTS:
            layers.setdefault(prefix, {})[leaf] = entry
        elif not UNUSED.search(name):
            found[name] = entry
    for prefix, layer in layers.items():
        name = f"{prefix}.weight"
        if layer.keys() == {"weight"}:
            found[name] = layer["weight"]
            continue
        with library_errors(f"{path}: {prefix}: not a layer of {method}"):
            whole = _layer(layer, quantization | {"quant_method": method})
            _check_config(layer, whole, quantization)
            grouped = whole.grouped()

        def checked(read: Callable, *given, name=name):
            with library_errors(f"{path}: tensor {name}: its parts do not fit each other"):
                return read(*given)

        grouped = grouped and grouped._replace(read=partial(checked, grouped.read))
        dense = partial(checked, whole.dequantize)
        found[name] = Entry(whole.shape, torch.bfloat16, dense, method, grouped)
    return {k: v for k, v in config.items() if k != key}, found
