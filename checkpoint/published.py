"""Weights of published quantized checkpoints: GPTQ, AWQ, compressed-tensors and fp8.

The layouts are those of AutoGPTQ's and AutoAWQ's linear layers, of vllm-project/compressed-tensors and of
transformers' fine-grained fp8.
"""
from __future__ import annotations

import json
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
from kernels.stored import GROUPS, Kind, numbers, pack_values, regroup

PARTS = {"weight", "qweight", "qzeros", "scales", "g_idx"} | {  # tensors of a quantized layer
    f"weight_{part}" for part in
    ("packed", "scale", "scale_inv", "global_scale", "zero_point", "shape", "g_idx")}
# How others round activations and KV caches, which we do not.
UNUSED = re.compile(r"\.(input|output|[qkv])_(scale|zero_point|global_scale|scale_ub)$")
AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7  # where the eight columns of a word lie
FP8_BLOCK = 128, 128
Parts = dict[str, Entry]


class Codes(NamedTuple):
    """The values of a matrix w = q * scale - minimum.

    q [N, K] int8 or uint8. scale, minimum [N, groups] float32. groups [K]: of each input, if groups are not
    runs of equal size.
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    groups: Tensor | None = None

    def scales(self, times: int = 1) -> Tensor:
        """Return the scales of all groups, then their minima, each `times` times [N, 1 or 2 * groups]."""
        both = (x for x in (self.scale, self.minimum) if x is not None)
        return torch.cat([x.repeat_interleave(times, 1) for x in both], 1)

    def numbers(self) -> Tensor:
        """Return the matrix in float32."""
        kind, order = Kind("q8", 0, 0, self.minimum is not None), None
        if self.groups is not None:
            order = self.groups.argsort(stable=True)
        found = numbers(kind, self.q if order is None else self.q[:, order], self.scales(), None)
        return found if order is None else found[:, order.argsort()]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the values [R, W * 32 / bits] uint8 in int32 words [R, W], which begin with their low bits."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    return torch.stack([packed >> at & (1 << bits) - 1 for at in range(0, 8, bits)], -1).flatten(1)


def _gptq(layer: Parts, bits: int, missing: int) -> Codes:
    """qweight [K / values, N], qzeros [groups, N / values], scales [groups, N], g_idx [K]: an input's group.

    missing: from the zeros, which the first version of the format stores as one less.
    """
    scale = layer["scales"].read().float().t()
    q = unpack(layer["qweight"].read().t(), bits)
    zeros = unpack(layer["qzeros"].read(), bits).t().float() + missing
    if bits == 8:
        q, zeros = (q.int() - 128).to(torch.int8), zeros - 128
    return Codes(q, scale, scale * zeros, _groups(layer.get("g_idx"), scale.shape[1]))


def _groups(entry: Entry | None, count: int) -> Tensor | None:
    """Return the group of each input; None if groups are runs of equal size. count: of groups."""
    groups = None if entry is None else entry.read().long()
    if groups is None or int(groups.min()) < 0:  # -1: not written yet
        return None
    runs = torch.arange(len(groups)) // -(-len(groups) // count)
    return None if torch.equal(groups, runs) else groups


def _awq(layer: Parts) -> Codes:
    """qweight [K, N / 8], qzeros [groups, N / 8], scales [groups, N]."""
    q, zeros = (unpack(layer[part].read(), 4).unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1).t()
                for part in ("qweight", "qzeros"))
    scale = layer["scales"].read().float().t()
    return Codes(q, scale, scale * zeros)


def _integers(layer: Parts, rows: int, columns: int) -> Codes:
    """weight_packed [N, K / values] with an offset or weight int8 [N, K]; weight_scale [N, groups] or one."""
    scale, zeros, packed = layer["weight_scale"].read().float(), layer.get("weight_zero_point"), None
    scale = scale.view(-1, scale.shape[-1] if scale.ndim > 1 else 1).expand(rows, -1)
    if "weight_packed" in layer:
        packed = layer["weight_packed"].read()
        bits = 32 * packed.shape[1] // columns
        offset = 0 if bits == 4 and zeros else 1 << bits - 1
        q = (unpack(packed, bits)[:, :columns].int() - offset).to(torch.int8)
    else:
        q = layer["weight"].read()
    if zeros is not None:
        zeros = zeros.read()
        if packed is not None:
            zeros = unpack(zeros.t(), bits)[:, :rows].t().float() - offset
        zeros = zeros.view(-1, scale.shape[1])
    minimum = None if zeros is None else scale * zeros
    return Codes(q, scale, minimum, _groups(layer.get("weight_g_idx"), scale.shape[1]))


def _float4(layer: Parts) -> Codes:
    """weight_packed uint8 [N, K / 2] of e2m1; weight_scale e4m3 with a weight_global_scale, or exponents."""
    scale, packed = layer["weight_scale"].read(), layer["weight_packed"].read()
    if scale.dtype == torch.uint8:  # MXFP4
        scale = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    else:  # NVFP4
        scale = scale.float() / layer["weight_global_scale"].read().float()
    twice = e2m1(torch.stack((packed & 15, packed >> 4), -1).flatten(1)).mul_(2)
    return Codes(twice.to(torch.int8), scale / 2)


def _float8(layer: Parts, block: tuple[int, int]) -> Tensor:
    """weight e4m3 [N, K]; a scale for all, for each row, or for each block."""
    weight = layer["weight"].read().float()
    scale = (layer.get("weight_scale") or layer["weight_scale_inv"]).read().float()
    if scale.numel() in (1, len(weight)):
        return weight.mul_(scale.view(-1, 1))
    for dim, size in enumerate(block):
        scale = scale.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return weight.mul_(scale)


class Layer(NamedTuple):
    """A quantized layer: its weight's shape, what reads it and, for integers, their bits and groups."""

    shape: tuple[int, ...]
    read: Callable[[], Codes | Tensor]
    bits: int = 0
    groups: int = 0
    minima: bool = False

    def grouped(self) -> Grouped | None:
        """Return the weight as `kernels.stored` holds it; None if no kind does."""
        size = self.shape[1] // self.groups if self.groups else 0
        group = next((n for n in reversed(GROUPS) if size and size % n == 0), 0)
        if not group or size * self.groups != self.shape[1]:
            return None

        kind = Kind("q4" if self.bits <= 4 and group > 16 else "q8", group, 0, self.minima)

        def read(to: Kind) -> tuple:
            codes = self.read()
            return pack_values(to, codes.q), *regroup(kind, to, codes.scales(size // group), None)

        return Grouped(kind, read)


def _layer(said: dict, layer: Parts) -> Layer:
    """Return what the parts of a quantized layer are."""
    method, packed, weight = said["quant_method"], layer.get("weight_packed"), layer.get("weight")
    scale = layer.get("scales") or layer.get("weight_scale")
    order = layer.get("g_idx") or layer.get("weight_g_idx")
    if words := layer.get("qweight"):
        (rows, columns), groups = words.shape, scale.shape[0]
        if method == "awq":
            return Layer((columns * 8, rows), partial(_awq, layer), 4, groups, True)
        missing, bits = int(said.get("checkpoint_format") != "gptq_v2"), said["bits"]
        shape, read = (columns, rows * 32 // bits), partial(_gptq, layer, bits, missing)
        return Layer(shape, read, bits, 0 if _groups(order, groups) is not None else groups, True)
    groups = scale.shape[-1] if scale and len(scale.shape) > 1 else 1
    if packed and packed.dtype == torch.uint8:
        return Layer((packed.shape[0], 2 * packed.shape[1]), partial(_float4, layer), 8, groups)
    if packed or weight.dtype == torch.int8:
        shape = tuple(layer["weight_shape"].read().tolist()) if packed else weight.shape
        bits = 32 * packed.shape[1] // shape[1] if packed else 8
        groups = 0 if _groups(order, groups) is not None else groups
        return Layer(shape, partial(_integers, layer, *shape), bits, groups, "weight_zero_point" in layer)
    return Layer(weight.shape, partial(_float8, layer, said.get("weight_block_size") or FP8_BLOCK))


# Keys of the config of each method, and the values of them that we read. Others change what tensors mean.
METHODS = {
    "gptq": {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2", ""), "quant_method": ("gptq",)},
    "awq": {"bits": (4,), "w_bit": (4,), "version": ("gemm", "GEMM")},
    "fp8": {"fmt": ("e4m3",)}, "fbgemm_fp8": {},
    "compressed-tensors": {
        "format": ("dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized",
                   "naive-quantized", "nvfp4-pack-quantized", "pack-quantized"),
        "sparsity_config": ({},), "transform_config": ({},),
    },
}


def dequantized(path: Path, config: dict, tensors: dict[str, Entry]) -> tuple[dict, dict[str, Entry]]:
    """Return a folder's config and tensors with the weights of quantized layers in the place of their parts.

    They are read as bfloat16 or, see `Entry.grouped`, as they are stored. A method that is not known is left
    as it is. Raises InputError on a variant of one that we would read wrongly.
    """
    key = next(key for key in QUANTIZATION if config.get(key))
    said = config[key]
    if (method := said.get("quant_method", "compressed-tensors")) not in METHODS:
        return config, tensors
    for name, known in METHODS[method].items():
        if said.get(name) not in (None, *known):
            raise InputError(f"{path}: {key}: {name} {json.dumps(said[name])[:60]} is not supported; expected"
                             f" {' or '.join(map(json.dumps, known))}")
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
            whole = _layer(said | {"quant_method": method}, layer)
            grouped = whole.grouped()

        def checked(read: Callable, *given, name=name):
            with library_errors(f"{path}: tensor {name}: its parts do not fit each other"):
                return read(*given)

        def dense(read=whole.read) -> Tensor:
            found = read()
            return (found if isinstance(found, Tensor) else found.numbers()).bfloat16()

        if grouped:
            grouped = Grouped(grouped.kind, partial(checked, grouped.read))
        found[name] = Entry(whole.shape, torch.bfloat16, partial(checked, dense), method, grouped)
    return {k: v for k, v in config.items() if k != key}, found
