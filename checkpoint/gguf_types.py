"""GGUF quantization types that a `Kind` of `kernels.stored` represents exactly.

Integers are read by dequantizing with the package gguf after setting scales to 1 and minima to 0. Layouts:
ggml's ggml-common.h.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import NVFP4, dequantize
from torch import Tensor

from kernels.stored import Kind

Scales = tuple[Tensor, Tensor | None]  # scales [n, 1], or with minima [n, 2]; codes [n, 1 or 2, groups]
ONE, ZERO = b"\x00\x3c", b"\x00\x00"  # in float16
BITS_0_3, BITS_4_5, BITS_0_5 = 0x0F0F0F0F, 0x30303030, 0x3F3F3F3F  # masks of the four bytes of an int32


class GGUFType(NamedTuple):
    """A type. scales(blocks): read their scales. head, tail: bytes at the start and end of a block that set
    its scales to 1 and minima to 0.
    """

    kind: Kind
    scales: Callable[[Tensor], Scales]
    head: bytes = b""
    tail: bytes = b""


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each block [n, bytes], as float32 [n]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()[:, 0]


def _leading_scale(blocks: Tensor) -> Scales:
    return _half(blocks, 0)[:, None], None


def _affine(blocks: Tensor) -> Scales:  # w = scale * q + minimum
    return torch.stack((_half(blocks, 0), -_half(blocks, 2)), 1), None


def _exponent(blocks: Tensor) -> Scales:
    return torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 127) / 2, None  # 255: infinite


def _e4m3(blocks: Tensor) -> Scales:
    return torch.from_numpy(NVFP4.ue4m3_to_fp32(blocks[:, :4].numpy())).float()[:, None], None


def _ternary(blocks: Tensor) -> Scales:  # one scale for two groups
    return _half(blocks, blocks.shape[1] - 2).expand(1, 2, -1).permute(2, 0, 1), None


def _six_bits(blocks: Tensor) -> Scales:  # Q4_K and Q5_K
    low, middle, high = blocks[:, 4:16].contiguous().view(torch.int32).unbind(1)
    codes = torch.stack((low & BITS_0_5, high & BITS_0_3 | low >> 2 & BITS_4_5,
                         middle & BITS_0_5, high >> 4 & BITS_0_3 | middle >> 2 & BITS_4_5), 1)
    return torch.stack((_half(blocks, 0), _half(blocks, 2)), 1), codes.view(torch.int8).unflatten(1, (2, 8))


def _q2_k(blocks: Tensor) -> Scales:
    codes = torch.stack((blocks[:, :16] & 15, blocks[:, :16] >> 4), 1)
    return torch.stack((_half(blocks, 80), _half(blocks, 82)), 1), codes.view(torch.int8)


def _q3_k(blocks: Tensor) -> Scales:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    codes = torch.cat((low & 15, low >> 4), 1) | torch.cat([high >> at & 3 for at in (0, 2, 4, 6)], 1) << 4
    return _half(blocks, 108)[:, None], (codes.view(torch.int8) - 32)[:, None]


def _q6_k(blocks: Tensor) -> Scales:
    return _half(blocks, 208)[:, None], blocks[:, 192:208].view(torch.int8)[:, None]


def _iq4_xs(blocks: Tensor) -> Scales:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1)
    high = torch.stack([blocks[:, 2:4] >> at & 3 for at in (0, 2, 4, 6)], 2).flatten(1)
    return _half(blocks, 0)[:, None], ((low | high << 4).view(torch.int8) - 32)[:, None]


K_HEAD = ONE + ZERO + bytes([1] * 4 + [0] * 4 + [1] * 4)
TYPES = {
    "Q4_0": GGUFType(Kind("q4", 32), _leading_scale, ONE),
    "Q4_1": GGUFType(Kind("q4", 32, 0, True), _affine, ONE + ZERO),
    "Q5_0": GGUFType(Kind("q6", 32), _leading_scale, ONE),
    "Q5_1": GGUFType(Kind("q6", 32, 0, True), _affine, ONE + ZERO),
    "Q8_0": GGUFType(Kind("q8", 32), _leading_scale, ONE),
    "IQ4_NL": GGUFType(Kind("q8", 32), _leading_scale, ONE),
    "MXFP4": GGUFType(Kind("q6", 32), _exponent, bytes([128])),
    "NVFP4": GGUFType(Kind("q6", 16), _e4m3, bytes([64] * 4)),
    "TQ1_0": GGUFType(Kind("q4", 128), _ternary, tail=ONE),
    "TQ2_0": GGUFType(Kind("q4", 128), _ternary, tail=ONE),
    "Q2_K": GGUFType(Kind("q6", 16, 256, True), _q2_k, bytes([1] * 16), ONE + ZERO),
    "Q3_K": GGUFType(Kind("q6", 16, 256), _q3_k, tail=bytes([0x11] * 8 + [0xAA] * 4) + ONE),
    "Q4_K": GGUFType(Kind("q4", 32, 256, True), _six_bits, K_HEAD),
    "Q5_K": GGUFType(Kind("q6", 32, 256, True), _six_bits, K_HEAD),
    "Q6_K": GGUFType(Kind("q6", 16, 256), _q6_k, tail=bytes([1] * 16) + ONE),
    "IQ4_XS": GGUFType(Kind("q8", 32, 256), _iq4_xs, ONE + bytes([0xAA] * 2 + [0x11] * 4)),
}


def _q4_k_values(blocks: Tensor) -> Tensor:
    words = blocks[:, 16:].unflatten(1, (4, 32)).contiguous().view(torch.int32)
    return torch.stack((words & BITS_0_3, words >> 4 & BITS_0_3), 2).view(torch.uint8).flatten(1)


def _q6_k_values(blocks: Tensor) -> Tensor:
    first, last = blocks[:, :128].contiguous().view(torch.int32).unflatten(1, (2, 2, 8)).unbind(2)
    high = blocks[:, 128:192].contiguous().view(torch.int32).unflatten(1, (2, 8))
    q = torch.stack((first & BITS_0_3 | high << 4 & BITS_4_5, last & BITS_0_3 | high << 2 & BITS_4_5,
                     first >> 4 & BITS_0_3 | high & BITS_4_5, last >> 4 & BITS_0_3 | high >> 2 & BITS_4_5), 2)
    return q.view(torch.int8).flatten(1) - 32


FAST = {"Q4_K": _q4_k_values, "Q6_K": _q6_k_values}  # faster than the package


def read_stored(ggml_type, data: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the integers [N, K] int8, scales and codes of rows [N, bytes] of a type in `TYPES`.

    ggml_type: `gguf.GGMLQuantizationType`. data: writable; not modified.
    """
    blocks, rows = torch.from_numpy(data).view(-1, GGML_QUANT_SIZES[ggml_type][1]), (len(data), -1)
    _, read_scales, head, tail = TYPES[ggml_type.name]
    if ggml_type.name in FAST:
        q = FAST[ggml_type.name](blocks).view(torch.int8)
    else:
        unscaled, head, tail = blocks.numpy().copy(), *(np.frombuffer(x, np.uint8) for x in (head, tail))
        unscaled[:, : len(head)], unscaled[:, unscaled.shape[1] - len(tail) :] = head, tail
        q = torch.from_numpy(dequantize(unscaled.reshape(rows), ggml_type)).to(torch.int8)
    return q.view(rows), *(x if x is None else x.unflatten(0, rows).transpose(1, 2).flatten(1)
                           for x in read_scales(blocks))
