"""GGUF quantization types that a kind of `kernels.stored` represents exactly.

The integers are those that the package gguf dequantizes with scales of 1 and minima of 0. Layouts: ggml's
ggml-common.h.
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

Found = tuple[Tensor, Tensor | None]  # scales [n, 1 or 2], minima after scales, and codes [n, 1 or 2, groups]
ONE, ZERO = b"\x00\x3c", b"\x00\x00"  # in float16
LOW, HIGH, SIX = 0x0F0F0F0F, 0x30303030, 0x3F3F3F3F  # bits of the four bytes of a word


class GGUFType(NamedTuple):
    """A type. head, tail: first and last bytes of a block with scales of 1. scales(blocks): their scales."""

    kind: Kind
    scales: Callable[[Tensor], Found]
    head: bytes = b""
    tail: bytes = b""


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at this byte of blocks [n, bytes] -> [n] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()[:, 0]


def _first(blocks: Tensor) -> Found:
    return _half(blocks, 0)[:, None], None


def _affine(blocks: Tensor) -> Found:  # w = scale * q + minimum
    return torch.stack((_half(blocks, 0), -_half(blocks, 2)), 1), None


def _exponent(blocks: Tensor) -> Found:
    return torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 127) / 2, None  # 255: infinite


def _e4m3(blocks: Tensor) -> Found:
    return torch.from_numpy(NVFP4.ue4m3_to_fp32(blocks[:, :4].numpy())).float()[:, None], None


def _ternary(blocks: Tensor) -> Found:  # of two groups
    return _half(blocks, blocks.shape[1] - 2).expand(1, 2, -1).permute(2, 0, 1), None


def _six_bits(blocks: Tensor) -> Found:  # of Q4_K and Q5_K
    low, middle, high = blocks[:, 4:16].contiguous().view(torch.int32).unbind(1)
    codes = torch.stack((low & SIX, high & LOW | low >> 2 & HIGH,
                         middle & SIX, high >> 4 & LOW | middle >> 2 & HIGH), 1)
    return torch.stack((_half(blocks, 0), _half(blocks, 2)), 1), codes.view(torch.int8).unflatten(1, (2, 8))


def _q2_k(blocks: Tensor) -> Found:
    codes = torch.stack((blocks[:, :16] & 15, blocks[:, :16] >> 4), 1)
    return torch.stack((_half(blocks, 80), _half(blocks, 82)), 1), codes.view(torch.int8)


def _q3_k(blocks: Tensor) -> Found:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    codes = torch.cat((low & 15, low >> 4), 1) | torch.cat([high >> at & 3 for at in (0, 2, 4, 6)], 1) << 4
    return _half(blocks, 108)[:, None], (codes.view(torch.int8) - 32)[:, None]


def _q6_k(blocks: Tensor) -> Found:
    return _half(blocks, 208)[:, None], blocks[:, 192:208].view(torch.int8)[:, None]


def _iq4_xs(blocks: Tensor) -> Found:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1)
    high = torch.stack([blocks[:, 2:4] >> at & 3 for at in (0, 2, 4, 6)], 2).flatten(1)
    return _half(blocks, 0)[:, None], ((low | high << 4).view(torch.int8) - 32)[:, None]


K_HEAD = ONE + ZERO + bytes([1] * 4 + [0] * 4 + [1] * 4)
TYPES = {
    "Q4_0": GGUFType(Kind("q4", 32), _first, ONE),
    "Q4_1": GGUFType(Kind("q4", 32, 0, True), _affine, ONE + ZERO),
    "Q5_0": GGUFType(Kind("q6", 32), _first, ONE),
    "Q5_1": GGUFType(Kind("q6", 32, 0, True), _affine, ONE + ZERO),
    "Q8_0": GGUFType(Kind("q8", 32), _first, ONE),
    "IQ4_NL": GGUFType(Kind("q8", 32), _first, ONE),
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
    return torch.stack((words & LOW, words >> 4 & LOW), 2).view(torch.uint8).flatten(1)


def _q6_k_values(blocks: Tensor) -> Tensor:
    first, last = blocks[:, :128].contiguous().view(torch.int32).unflatten(1, (2, 2, 8)).unbind(2)
    two = blocks[:, 128:192].contiguous().view(torch.int32).unflatten(1, (2, 8))
    q = torch.stack((first & LOW | two << 4 & HIGH, last & LOW | two << 2 & HIGH,
                     first >> 4 & LOW | two & HIGH, last >> 4 & LOW | two >> 2 & HIGH), 2)
    return q.view(torch.int8).flatten(1) - 32


FAST = {"Q4_K": _q4_k_values, "Q6_K": _q6_k_values}  # in a fraction of the time


def read_stored(kind, data: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the integers [N, K] int8, scales and codes of rows [N, bytes] of a type in `TYPES`.

    kind: gguf's type. data: writable; not modified.
    """
    blocks, rows = torch.from_numpy(data).view(-1, GGML_QUANT_SIZES[kind][1]), (len(data), -1)
    _, read_scales, head, tail = TYPES[kind.name]
    if kind.name in FAST:
        q = FAST[kind.name](blocks).view(torch.int8)
    else:
        plain, head, tail = blocks.numpy().copy(), *(np.frombuffer(x, np.uint8) for x in (head, tail))
        plain[:, : len(head)], plain[:, plain.shape[1] - len(tail) :] = head, tail
        q = torch.from_numpy(dequantize(plain.reshape(rows), kind)).to(torch.int8)  # blocks alone are slow
    found = read_scales(blocks)
    return q.view(rows), *(x if x is None else x.unflatten(0, rows).transpose(1, 2).flatten(1) for x in found)
