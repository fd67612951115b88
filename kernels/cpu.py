"""Our own products for the CPU, in C++ (`csrc/`): linear layers, attention, RMS norm, all layers at once.

Every one is row-invariant: a row's result does not depend, by a single bit, on the rows computed with it.
That makes speculative text equal plain text in bfloat16 too.

They are PyTorch operators (`torch.ops.eagle`) that torch.compile does not look into, so one compiled step may
call them. They have no gradient. `kernels.packed` has the modules that use them.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.errors import InputError
from kernels.build import build_library

COLUMNS = 32  # of one packed block, as in products.h
_loaded = False


def load_kernels(
    say: Callable[[str], None] = lambda line: None, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Make the operators callable. Compile them if this machine has not had this source and torch before.

    `meanwhile` is called while the compiler is at work.
    Raises InputError, one line, if there is no C++ compiler or it fails.
    """
    global _loaded
    if _loaded:
        return
    library = build_library(say, meanwhile)
    try:
        torch.ops.load_library(str(library))
    except OSError as e:
        raise InputError(f"{library}: cannot be loaded ({e}); delete it, or pass --no-kernels") from None
    for name, shapes in SHAPES.items():
        torch.library.register_fake(f"eagle::{name}")(shapes)
    _loaded = True


def takes(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels work on rows of so many values.

    They take float32, and bfloat16 in even numbers, on the CPU.
    """
    return device.type == "cpu" and (dtype == torch.float32 or (dtype == torch.bfloat16 and columns % 2 == 0))


def pack(weight: Tensor, per_word: int) -> Tensor:
    """Weight [N, K] -> [ceil(N/32), K/w, 32, w]; rows from N on are zero.

    w = `per_word` is how many values of x there are in 4 bytes.
    32 output columns lie side by side, so that a block is read front to back, once per pass. int8 weights are
    laid out the same way.
    """
    return _blocks(weight).unflatten(2, (-1, per_word)).transpose(1, 2).contiguous()


def pack_int4(values: Tensor, per_word: int) -> Tensor:
    """Values [N, K] int8 in -8..7 -> [ceil(N/32), K/w, 16*w] uint8.

    The low four bits of a byte belong to column c, the high ones to column c + 16.
    """
    low, high = (pack(values, per_word) + 8).to(torch.uint8).flatten(2).chunk(2, dim=2)
    return low | (high << 4)


def pack_bytes(values: Tensor, per_word: int) -> Tensor:
    """Values [N, K] int8 of a w8a8 weight -> [ceil(N/32), K/4, 32, 4] uint8, 128 added.

    The processors' product of bytes wants one of the two without a sign. x comes in bytes, four to a word,
    whatever its dtype.
    """
    return pack(values, 4).view(torch.uint8) ^ 128


def pack_scale(scale: Tensor) -> Tensor:
    """Scales [N, groups] -> [ceil(N/32), groups, 32]."""
    return _blocks(scale).transpose(1, 2).contiguous()


def interleave(weight: Tensor) -> Tensor:
    """Gate and up [2*N, K], one above the other -> 16 rows of each in turn.

    A block then holds both, for GATED.
    """
    half = COLUMNS // 2
    gate, up = (_padded(part, half).unflatten(0, (-1, half)) for part in weight.chunk(2))
    return torch.cat((gate, up), dim=1).flatten(0, 1)


def _blocks(weight: Tensor) -> Tensor:
    return _padded(weight, COLUMNS).unflatten(0, (-1, COLUMNS))


def _padded(weight: Tensor, multiple: int) -> Tensor:
    """The rows of a weight, and zero rows after them so that their number is a multiple."""
    missing = -weight.shape[0] % multiple
    return torch.cat((weight, weight.new_zeros(missing, weight.shape[1]))) if missing else weight


SAME, FLOAT32, GATED = range(3)  # modes of `linear`


def linear(
    x: Tensor, packed: Tensor, columns: int, scale: Tensor | None = None, bias: Tensor | None = None,
    residual: Tensor | None = None,
    mode: int = SAME,
) -> Tensor:
    """x [..., K] times a packed weight of `columns` rows -> [..., N].

    bias [N] (float32) and residual [..., N] are added.
    scale: of an int8, w8a8 (float32) or int4 (bfloat16) weight, from `pack_scale`. Sums are float32, rounded
    once, to x's dtype; FLOAT32: not at all. GATED: the weight was interleaved and silu(gate) * up [..., N]
    comes out.
    """
    return torch.ops.eagle.linear(x, packed, scale, bias, residual, columns, mode)


def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor, visible: Tensor,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:
    """Everything between a layer's wqkv and wo: qkv [B, T, (nh + 2*nkv)*hd] -> [B, T, nh*hd].

    Query and key heads are RMS-normed (if there are weights [hd]) and rotated by cos, sin [B, T, hd/2]; keys
    and values are stored at slots [B, T] of the caches k, v [B, S, nkv, hd]; then each row attends to those
    of the first n slots that visible [B, T, n] says. Scores, softmax and sums are float32.
    """
    return torch.ops.eagle.attend(qkv, cos, sin, q_norm, k_norm, eps, k, v, slots, visible)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [..., H] divided by its root mean square, times weight [H], in float32, rounded once."""
    return torch.ops.eagle.rms_norm(x, weight, eps)


def layers(
    x: Tensor, cos: Tensor, sin: Tensor, weights: list[Tensor], k: list[Tensor], v: list[Tensor],
    slots: Tensor, visible: Tensor,
    eps: float, aux: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """All L layers of a target on x [B, T, H].

    Returns the residual stream after them [B, T, H], and the streams entering the layers `aux` side by side
    [B, T, len(aux)*H]; L stands for the stream after the last layer.
    weights: thirteen of each layer, an empty tensor for what it has not: norm, wqkv packed, its scale and
    bias (float32), q_norm, k_norm, wo packed, its scale, norm, gate and up packed, their scale, down packed,
    its scale. k, v: the caches of each layer. The other arguments are `attend`'s.
    """
    return torch.ops.eagle.layers(x, cos, sin, weights, k, v, slots, visible, eps, aux)


def move(caches: list[Tensor], source: Tensor, target: Tensor) -> None:
    """Copy the entries at slots `source` [B, W] of every cache [B, S, nkv, hd] to slots `target`.

    All entries are read before any is written.
    """
    torch.ops.eagle.move(caches, source, target)


# What torch.compile is told of the operators: the shapes of what they return.
SHAPES = {
    "linear": lambda x, packed, scale, bias, residual, columns, mode: x.new_empty(
        (*x.shape[:-1], columns), dtype=torch.float32 if mode == FLOAT32 else x.dtype
    ),
    "attend": lambda qkv, cos, sin, q_norm, k_norm, eps, k, v, slots, visible: qkv.new_empty(
        (*qkv.shape[:2], qkv.shape[2] - 2 * k.shape[2] * k.shape[3])
    ),
    "rms_norm": lambda x, weight, eps: x.new_empty(x.shape),
    "layers": lambda x, cos, sin, weights, k, v, slots, visible, eps, aux: (
        x.new_empty(x.shape), x.new_empty((*x.shape[:2], len(aux) * x.shape[2]))
    ),
    "move": lambda caches, source, target: None,
}
