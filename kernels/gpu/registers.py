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
# Assembly from two stored words in a register to registers of two 16-bit floats. An integer n < 128 or-ed
# into the mantissa of the base, 128 in bfloat16 or 1024 in float16, gives base + n. The sign bit of a byte,
# or-ed into another base, gives base + 128. The value is their difference.
BYTES = """{{
    .reg .b32 high, low, sign, minus;
    mov.b32 minus, {minus};
    shr.u32 high, $2, 8;
    lop3.b32 low, $2, 0x007F007F, {base}, 0xEA;
    lop3.b32 sign, $2, 0x00800080, {base}, 0xEA;
    fma.rn.{kind} $0, sign, minus, low;
    lop3.b32 low, high, 0x007F007F, {base}, 0xEA;
    lop3.b32 sign, high, 0x00800080, {base}, 0xEA;
    fma.rn.{kind} $1, sign, minus, low;
}}"""
# A nibble stores its value + 8, which is subtracted with the base.
NIBBLES = """{{
    .reg .b32 word, one, less;
    mov.b32 one, {one};
    mov.b32 less, {less};
""" + "".join(f"""    shr.u32 word, $4, {4 * i};
    lop3.b32 word, word, 0x000F000F, {{base}}, 0xEA;
    fma.rn.{{kind}} ${i}, word, one, less;
""" for i in range(4)) + "}}"


def _assembly(kind: str, one: str, minus: str, base: str, less: str) -> tuple[tl.constexpr, tl.constexpr]:
    """Return BYTES and NIBBLES for a dtype, whose 1, -1, base and -(base + 8) are given twice in hex."""
    words = {"kind": kind, "one": one, "minus": minus, "base": base, "less": less}
    return tuple(tl.constexpr(text.format(**words)) for text in (BYTES, NIBBLES))


BYTES_TO_BF16, NIBBLES_TO_BF16 = _assembly(
    "bf16x2", "0x3F803F80", "0xBF80BF80", "0x43004300", "0xC308C308")
BYTES_TO_FP16, NIBBLES_TO_FP16 = _assembly(
    "f16x2", "0x3C003C00", "0xBC00BC00", "0x64006400", "0xE408E408")


def _floats_assembly(kind: str, bits: int, shift: int, scale: str) -> tl.constexpr:
    """Return the assembly from e2m1 or e4m3 numbers, in the order of NIBBLES or BYTES.

    The bits after the sign, `shift` bits up, become the lowest of the exponent and the highest of the
    mantissa of a 16-bit float. That float times `scale`, a power of two, is the value, also if subnormal.
    """
    count, mask = 16 // bits, f"{(1 << bits - 1) - 1 << shift:04X}"
    lines = [f".reg .b32 word, sign, scale, zero; mov.b32 zero, 0x80008000; mov.b32 scale, 0x{scale}{scale}"]
    for i in range(count):
        up = shift - bits * i
        lines += [
            f"shl.b32 word, ${count}, {up}" if up >= 0 else f"shr.u32 word, ${count}, {-up}",
            f"shl.b32 sign, ${count}, {16 - bits - bits * i}",
            "lop3.b32 sign, sign, 0x80008000, 0, 0xEA",
            f"lop3.b32 word, word, 0x{mask}{mask}, sign, 0xEA", f"fma.rn.{kind} ${i}, word, scale, zero",
        ]
    return tl.constexpr("".join(["{", *(f"\n    {line};" for line in lines), "\n}"]))


E2M1_TO_BF16 = _floats_assembly("bf16x2", 4, 6, "7E80")
E2M1_TO_FP16 = _floats_assembly("f16x2", 4, 9, "7400")
E4M3_TO_BF16 = _floats_assembly("bf16x2", 8, 4, "7B80")
E4M3_TO_FP16 = _floats_assembly("f16x2", 8, 7, "5C00")


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
    if BITS == 8:
        if dtype == tl.float32:
            a, b = code_to_float32(words, 0, BITS, FLOATS), code_to_float32(words, 8, BITS, FLOATS)
        else:
            if FLOATS:
                text: tl.constexpr = E4M3_TO_BF16 if dtype == tl.bfloat16 else E4M3_TO_FP16
            else:
                text: tl.constexpr = BYTES_TO_BF16 if dtype == tl.bfloat16 else BYTES_TO_FP16
            a, b = tl.inline_asm_elementwise(text, "=&r,=&r,r", [words], (dtype.value, dtype.value), True, 2)
        y = tl.join(a, b).reshape(K_BLOCKS, 2, N_BLOCKS, 4, 8, 4, 4, 2, 2).permute(2, 3, 1, 4, 0, 6, 8, 5, 7)
    else:
        if dtype == tl.float32:
            a, b = code_to_float32(words, 0, BITS, FLOATS), code_to_float32(words, 4, BITS, FLOATS)
            c, d = code_to_float32(words, 8, BITS, FLOATS), code_to_float32(words, 12, BITS, FLOATS)
        else:
            if FLOATS:
                text: tl.constexpr = E2M1_TO_BF16 if dtype == tl.bfloat16 else E2M1_TO_FP16
            else:
                text: tl.constexpr = NIBBLES_TO_BF16 if dtype == tl.bfloat16 else NIBBLES_TO_FP16
            a, b, c, d = tl.inline_asm_elementwise(
                text, "=&r,=&r,=&r,=&r,r", [words], (dtype.value,) * 4, True, 2
            )
        y = tl.join(tl.join(a, b), tl.join(c, d)).reshape(K_BLOCKS, N_BLOCKS, 4, 8, 4, 4, 2, 2, 2)
        y = y.permute(1, 2, 8, 3, 0, 5, 7, 4, 6)
    return y.reshape(BLOCK_N, BLOCK_K)
