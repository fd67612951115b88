"""Quantized weights in the order of the tensor cores' registers, and their conversion to floats there."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantized import unpack_pairs
from kernels.stored import pack_pairs

LAYOUT_BLOCK = tl.constexpr(64)  # rows and inputs of a weight that are stored together
RUN = tl.constexpr(1024)  # 16-bit words that four warps load at once, 16 bytes per thread


@triton.constexpr_function
def assembly(bits, floats, dtype):
    """Return the assembly from two stored words in a register to 16 / bits registers of two 16-bit floats.

    An integer n < 128 or-ed into the mantissa of the base, 128 in bfloat16 or 1024 in float16, gives base +
    n. A nibble stores its value + 8, which is subtracted with the base. The sign bit of a byte, or-ed into
    another base, gives base + 128, which is subtracted from the former.

    The bits after the sign of an e2m1 or e4m3 number become the lowest of the exponent and the highest of the
    mantissa of a float. That float times a power of two is the value, also if it is subnormal.
    """
    kind, base, one, minus, less, moved, scales = {
        "bf16": ("bf16x2", "4300", "3F80", "BF80", "C308", (6, 4), ("7E80", "7B80")),
        "fp16": ("f16x2", "6400", "3C00", "BC00", "E408", (9, 7), ("7400", "5C00")),
    }[dtype.name]
    count, up = 16 // bits, moved[bits // 8] if floats else 0
    factor, source, term = scales[bits // 8], "sign", "term"
    if not floats:
        factor, source, term = (one, "word", "term") if bits == 4 else (minus, "sign", "word")
    mask = "000F" if bits == 4 and not floats else f"{(1 << bits - 1) - 1 << up:04X}"
    sign_mask, onto = ("8000", ("0", "word")) if floats else ("0080", ("base", "base"))
    values = {"factor": factor, "term": "8000" if floats else less, "base": base}
    lines = [".reg .b32 word, sign, factor, term, base"]
    lines += [f"mov.b32 {name}, 0x{value}{value}" for name, value in values.items()]
    for i in range(count):
        shifts = {"word": up - bits * i, "sign": 16 - bits - bits * i if floats else -bits * i}
        lines += [f"sh{'rl'[n >= 0]}.b32 {name}, ${count}, {abs(n)}" for name, n in shifts.items()]
        lines += [f"lop3.b32 word, word, 0x{mask}{mask}, {onto[0]}, 0xEA",
                  f"lop3.b32 sign, sign, 0x{sign_mask}{sign_mask}, {onto[1]}, 0xEA",
                  f"fma.rn.{kind} ${i}, {source}, factor, {term}"]
    return "".join(["{", *(f"\n    {line};" for line in lines), "\n}"])


# A layout block of 64 x 64 values is 4 warps of 2 x 8 rows, and its inputs are 4 times 2 x 4 pairs: the order
# in memory of the dimensions [row blocks, 4, 2, 8, input blocks, 4, 2, 4, 2].
ORDER_8_BITS, ORDER_4_BITS = (0, 4, 2, 1, 3, 7, 5, 8, 6), (0, 4, 1, 3, 7, 5, 8, 2, 6)


def block_shape(N: int, K: int) -> tuple[int, ...]:
    """Return the dimensions of a weight [N, K], padded to whole blocks, before they are reordered."""
    return -(-N // 128) * 2, 4, 2, 8, -(-K // 64), 4, 2, 4, 2


def to_register_order(weight: Tensor) -> Tensor:
    """Reorder a weight of `QuantizedLinear` as threads load it -> words [n] int16.

    Of 16 inputs of a tile with 64 rows, a tensor-core thread holds two pairs of neighbors in two rows each.
    All that it holds of 64 inputs is contiguous: 16 bytes, in int8 of one row. Zeros fill the last blocks and
    pad the end, which the last tiles read.
    """
    has_nibbles = weight.dtype == torch.uint8
    q = unpack_pairs(weight) if has_nibbles else weight
    N, K = q.shape
    q = F.pad(q.view(torch.uint8), (0, -K % 64, 0, -N % 128)).view(block_shape(N, K))
    q = q.permute(ORDER_4_BITS if has_nibbles else ORDER_8_BITS)
    if has_nibbles:
        q = q[..., 0] | q[..., 1] << 4
    return F.pad(q.flatten(), (0, 4 * 64 * 64)).view(torch.int16)


def from_register_order(words: Tensor, N: int, K: int, has_nibbles: bool) -> Tensor:
    """Invert `to_register_order`: words [..., n] -> weights [..., N, K] of `QuantizedLinear`."""
    shape, order, lead = block_shape(N, K), ORDER_4_BITS if has_nibbles else ORDER_8_BITS, words.shape[:-1]
    q = words.view(torch.uint8)[..., : math.prod(shape) // (2 if has_nibbles else 1)]
    if has_nibbles:
        q = torch.stack((q & 15, q >> 4), -1)
    q = q.reshape(*lead, *(shape[i] for i in order))
    q = q.permute(*range(len(lead)), *(len(lead) + order.index(i) for i in range(len(order))))
    q = q.reshape(*lead, shape[0] * 64, -1)[..., :N, :K]
    return pack_pairs(q.to(torch.uint8)) if has_nibbles else q.view(torch.int8)


@triton.jit
def code_to_float32(words, shift: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr):
    """Convert the BITS at `shift` of each word, see `to_floats`."""
    code = words >> shift & (1 << BITS) - 1
    if FLOATS:
        sign = (code >> BITS - 1).to(tl.uint32) << 31
        bits = sign | ((code & (1 << BITS - 1) - 1).to(tl.uint32) << (22 if BITS == 4 else 20))
        return bits.to(tl.float32, bitcast=True) * (2.0**126 if BITS == 4 else 2.0**120)
    return code.to(tl.int8).to(tl.float32) if BITS == 8 else code.to(tl.float32) - 8


@triton.jit
def to_floats(
    words, dtype: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Convert the stored words of a tile to its unscaled values [BLOCK_N, BLOCK_K], exactly.

    words: [blocks of inputs, the 2 runs of each in 8 bits, blocks of rows, RUN], flat. FLOATS: values are
    e2m1 or e4m3, not integers.
    """
    N_BLOCKS: tl.constexpr = BLOCK_N // LAYOUT_BLOCK
    K_BLOCKS: tl.constexpr = BLOCK_K // LAYOUT_BLOCK
    if dtype == tl.float32:
        a, b = code_to_float32(words, 0, BITS, FLOATS), code_to_float32(words, BITS, BITS, FLOATS)
        if BITS == 4:
            c, d = code_to_float32(words, 8, BITS, FLOATS), code_to_float32(words, 12, BITS, FLOATS)
    else:
        text: tl.constexpr = assembly(BITS, FLOATS, dtype)
        if BITS == 4:
            a, b, c, d = tl.inline_asm_elementwise(
                text, "=&r,=&r,=&r,=&r,r", [words], (dtype.value,) * 4, True, 2)
        else:
            a, b = tl.inline_asm_elementwise(text, "=&r,=&r,r", [words], (dtype.value,) * 2, True, 2)
    if BITS == 4:
        y = tl.join(tl.join(a, b), tl.join(c, d)).reshape(K_BLOCKS, N_BLOCKS, 4, 8, 4, 4, 2, 2, 2)
        y = y.permute(1, 2, 8, 3, 0, 5, 7, 4, 6)
    else:
        y = tl.join(a, b).reshape(K_BLOCKS, 2, N_BLOCKS, 4, 8, 4, 4, 2, 2).permute(2, 3, 1, 4, 0, 6, 8, 5, 7)
    return y.reshape(BLOCK_N, BLOCK_K)
