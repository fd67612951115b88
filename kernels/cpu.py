"""Our own products for the CPU, in C++ (`csrc/`): linear layers, attention, RMS norm, all layers at once.

Every one is row-invariant: a row's result does not depend, by a single bit, on the rows computed with it.
That makes speculative text equal plain text in bfloat16 too.

They are compiled for one instruction set (`kernels.isa`), and for another beside it if asked to. They are
PyTorch operators (`torch.ops.eagle_avx2` and so on) without a gradient, and do so much at once that a step
calls few of them: it needs no torch.compile. `kernels.packed` has the modules that use them, `kernels.parts`
what is beside the modules.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import large_pages
from kernels.build import NoKernels, build_library, namespace
from kernels.isa import choose


class Layout(NamedTuple):
    """How an instruction set wants weights packed."""

    columns: int  # of one block
    bf16_per_word: int  # inputs side by side in a quantised weight, if x is bfloat16
    bytes_per_word: int  # and in a w8a8 weight
    byte_offset: int  # added to the values of a w8a8 weight
    nibbles_per_word: int  # inputs side by side in a w4a8 weight


_alone = False  # whether `alone` is entered
_loaded: dict[str, Layout] = {}  # by instruction set
_in_use: str | None = None  # the name of the one in use
_layout: Layout  # its layout
_ops = None  # its operators


def load_kernels(say: Callable[[str], None] = lambda line: None, isa: str | None = None) -> str:
    """Make the operators callable, and use those of an instruction set from now on. Returns its name.

    isa: its name, or None for the one of `kernels.isa.choose`. What is not compiled yet on this machine, for
    this source and torch, is compiled.
    Raises InputError, one line, if the processor has not got it, and NoKernels, which is one, if the C++
    compiler is missing or fails.
    """
    global _in_use, _layout, _ops
    chosen = choose(isa)
    operators = getattr(torch.ops, namespace(chosen))
    if chosen.name not in _loaded:
        library = build_library(chosen, say)
        try:
            torch.ops.load_library(str(library))
        except OSError as e:
            raise NoKernels(f"{library}: cannot be loaded ({e}); delete it") from None
        for name, shapes in SHAPES.items():
            torch.library.register_fake(f"{namespace(chosen)}::{name}")(shapes)
        _loaded[chosen.name] = Layout(*operators.layout())
    _in_use, _layout, _ops = chosen.name, _loaded[chosen.name], operators
    return chosen.name


def try_kernels(say: Callable[[str], None], isa: str | None = None, must: bool = False) -> bool:
    """`load_kernels`; or False, and `say` is told why, if this machine cannot have them.

    must: something was asked for that only they can do. Raises InputError then, if an instruction set was
    named, or if the processor has not got it.
    """
    try:
        load_kernels(say, isa)
    except NoKernels as e:
        if must or isa is not None:
            raise
        say(f"{e}. Until then PyTorch decodes alone, which is slower")
        return False
    return True


def isa_in_use() -> str | None:
    """The name of the instruction set in use, or None before any is loaded."""
    return _in_use


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which the kernels have PyTorch's number of threads, and PyTorch's own operators have one.

    Two pools of threads would take the processor from each other: those of OpenMP go on waiting, at full
    speed, long after their work. What PyTorch does between our operators is little.
    """
    global _alone
    if _alone:
        yield
        return
    count = torch.get_num_threads()
    _ops.use_threads(count)
    torch.set_num_threads(1)
    _alone = True
    try:
        yield
    finally:
        _alone = False
        torch.set_num_threads(count)
        _ops.use_threads(0)


def is_alone() -> bool:
    """Whether this is within `alone`: the target at work is on the kernels, and so is all of its step."""
    return _alone


def takes(columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels work on rows of so many values.

    They take float32, and bfloat16 in even numbers, on the CPU.
    """
    return device.type == "cpu" and (dtype == torch.float32 or (dtype == torch.bfloat16 and columns % 2 == 0))


def pack(weight: Tensor, per_word: int, gated: bool = False) -> Tensor:
    """Weight [N, K] -> [blocks, K/w, c, w]; rows that a block wants beyond N are zero.

    c output columns lie side by side, so that a block is read front to back, once per pass, and w =
    `per_word` inputs of each. In a weight that is not quantised, those are what 4 bytes hold. gated: the rows
    are gate and up, one above the other; half a block's columns are of each, for GATED.
    """
    return _pack(weight, per_word, gated)


def quantized_per_word(dtype: torch.dtype) -> int:
    """`per_word` of int8 and int4 weights, if x has this dtype."""
    return _layout.bf16_per_word if dtype == torch.bfloat16 else 1


def quantized_bytes_per_word() -> int:
    """How many integers of a row are multiplied as one word: 4 have 8 bits each, 2 have 16."""
    return _layout.bytes_per_word


def pack_int4(stored: Tensor, per_word: int, gated: bool = False) -> Tensor:
    """Values of 4 bits, stored [N, K/2] uint8 as `pack_nibbles` does -> [blocks, K/w, c/2 * w] uint8.

    The low four bits of a byte belong to a column of the block's first half, the high ones to its second.
    """
    return _pack_nibbles(stored, per_word, gated).flatten(2)


def pack_w4a8(stored: Tensor, gated: bool = False) -> Tensor:
    """Values of a w4a8 weight, stored [N, K/2] uint8 -> [blocks, K/w, c/2, w] uint8, as `pack_int4`.

    x comes in integers, w to a word, whatever its dtype.
    """
    return _pack_nibbles(stored, _layout.nibbles_per_word, gated)


def pack_bytes(values: Tensor, gated: bool = False) -> Tensor:
    """Values [N, K] int8 of a w8a8 weight -> [blocks, K/w, c, w] uint8.

    Some products of bytes want one of the two without a sign: 128 is added for those. x comes in integers,
    w to a word, whatever its dtype.
    """
    return _pack(values, _layout.bytes_per_word, gated, _layout.byte_offset).view(torch.uint8)


def _pack(weight: Tensor, per_word: int, gated: bool, flip: int = 0) -> Tensor:
    shape = _blocks(len(weight), gated), weight.shape[1] // per_word, _layout.columns, per_word
    out = large_pages.empty(shape, weight.dtype)
    _ops.pack(weight, gated, flip, out)
    return out


def _pack_nibbles(stored: Tensor, per_word: int, gated: bool) -> Tensor:
    shape = _blocks(len(stored), gated), 2 * stored.shape[1] // per_word, _layout.columns // 2, per_word
    out = large_pages.empty(shape, torch.uint8)
    _ops.pack_nibbles(stored, gated, out)
    return out


def _blocks(rows: int, gated: bool) -> int:
    """How many blocks the rows of a weight make; gated: as many of gate as of up."""
    return -(-rows // 2 // (_layout.columns // 2)) if gated else -(-rows // _layout.columns)


def pack_scale(scale: Tensor, gated: bool = False) -> Tensor:
    """Scales [N, groups] -> [blocks, groups, c]."""
    return _pack(scale, 1, gated).flatten(2)


SAME, FLOAT32, GATED = range(3)  # modes of `linear`


def linear(
    x: Tensor, packed: Tensor, columns: int, scale: Tensor | None = None, bias: Tensor | None = None,
    residual: Tensor | None = None,
    mode: int = SAME,
) -> Tensor:
    """x [..., K] times a packed weight of `columns` rows -> [..., N].

    bias [N] (float32) and residual [..., N] are added.
    scale: of an int8, w8a8 (float32), int4 or w4a8 (bfloat16) weight, from `pack_scale`. Sums are float32,
    rounded once, to x's dtype; FLOAT32: not at all. GATED: the weight was interleaved and silu(gate) * up
    [..., N] comes out.
    """
    return _ops.linear(x, packed, scale, bias, residual, columns, mode)


def attend(
    qkv: Tensor, cos: Tensor, sin: Tensor, k: Tensor, v: Tensor, slots: Tensor, visible: Tensor,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 0.0,
) -> Tensor:
    """Everything between a layer's wqkv and wo: qkv [B, T, (nh + 2*nkv)*hd] -> [B, T, nh*hd].

    Query and key heads are RMS-normed (if there are weights [hd]) and rotated by cos, sin [B, T, hd/2]; keys
    and values are stored at slots [B, T] of the caches k, v [B, S, nkv, hd]; then each row attends to those
    of the first n slots that visible [B, T, n] says. Scores, softmax and sums are float32.
    Caches in bytes (uint8) are [B, blocks, nkv, bytes of a block], see `byte_blocks` and csrc/in_bytes.h.
    """
    return _ops.attend(qkv, cos, sin, q_norm, k_norm, eps, k, v, slots, visible)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of x [..., H] divided by its root mean square, times weight [H], in float32, rounded once."""
    return _ops.rms_norm(x, weight, eps)


def layers(
    x: Tensor, cos: Tensor, sin: Tensor, weights: list[Tensor], parts: list[int], k: list[Tensor],
    v: list[Tensor], slots: Tensor, visible: Tensor, eps: float, aux: tuple[int, ...] = (),
    read: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All L layers of a target, or one of a head, on x [B, T, H].

    Returns the residual stream after them [B, T, H], and the streams entering the layers `aux` side by side
    [B, T, len(aux)*H]; L stands for the stream after the last layer.
    weights: of each layer those that it has of thirteen: norm, wqkv packed, its scale and bias (float32),
    q_norm, k_norm, wo packed, its scale, norm, gate and up packed, their scale, down packed, its scale.
    parts: for each layer which, a bit for each. k, v: the caches of each layer. read [B, T, inputs]: what the
    first layer's attention reads, if that is not x, normed. The other arguments are `attend`'s.
    """
    return _ops.layers(x, cos, sin, weights, parts, k, v, slots, visible, eps, aux, read)


def byte_blocks(head_dim: int) -> tuple[int, int, int]:
    """Of a cache in bytes: the slots in a block, the bytes of a block of keys and of one of values."""
    return tuple(_ops.byte_blocks(head_dim))


def head(
    tokens: Tensor, table: Tensor, table_norm: Tensor, feature: Tensor, feature_norm: Tensor,
    positions: Tensor, inverse: Tensor, factor: float, weights: list[Tensor], parts: list[int],
    k: list[Tensor], v: list[Tensor], slots: Tensor, visible: Tensor, eps: float,
) -> Tensor:
    """A pass of an EAGLE-3 head over tokens [B, T] with features [B, T, H] -> its residual stream [B, T, H].

    The first layer reads rows of the embedding table and the features, both normed, side by side. positions
    [B, T] are rotated by inverse frequencies [hd/2], cosine and sine times factor. The rest: see `layers`.
    """
    return _ops.head(
        tokens, table, table_norm, feature, feature_norm, positions, inverse, factor, weights, parts, k, v,
        slots, visible, eps,
    )


def normed_linear(
    x: Tensor, norm: Tensor, eps: float, packed: Tensor, columns: int, scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`linear` of `rms_norm` of x, in float32."""
    return _ops.normed_linear(x, norm, eps, packed, scale, bias, columns)


def move(k: list[Tensor], v: list[Tensor], head_dim: int, source: Tensor, target: Tensor) -> None:
    """Copy the entries at slots `source` [B, W] of every layer's caches k, v (`attend`) to slots `target`.

    All entries are read before any is written.
    """
    _ops.move(k, v, head_dim, source, target)


def restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`sampling.restrict.restrict` as one operator: logits [B, T, V] float32, the others [B]."""
    return _ops.restrict(logits, temperature, top_k, top_p)



def gumbel(key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int) -> Tensor:
    """temperature [B] times `sampling.noise.gumbel` [B, W, V] of key [B, 2] and positions [B, W]."""
    return _ops.gumbel(key, positions, temperature, vocabulary)


def draw(logits: Tensor, noise: Tensor | None, depth: Tensor | None) -> Tensor:
    """The first largest of logits [B, T, V], plus noise [B, W, V] at each row's depth [B, T] -> [B, T]."""
    return _ops.draw(logits, noise, depth)


def rank(
    logits: Tensor, noise: Tensor | None, k: int, names: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids [B, R, k] of the k largest of logits [B, R, V] plus noise [B, R or 1, V].

    names [V]: what stands for an id, if not it itself.
    """
    return _ops.rank(logits, noise, k, names)


def advance(scores: Tensor, tokens: Tensor, sees: Tensor, size: int) -> tuple[Tensor, ...]:
    """`tree.Growth.advance`: the newest children's scores and tokens [B, k*k], what the beam sees [B, k, M].

    size: candidates before them. Returns the next beam: scores, tokens, places among all candidates [B, k],
    what it sees [B, k, M+k], and which row each came from [B, k].
    """
    return _ops.advance(scores, tokens, sees, size)


def see(length: Tensor, local: Tensor, slots: int) -> Tensor:
    """`tree.visible_slots` [B, T, n] of the slots 0..n-1; length [B], local [B, T, M]."""
    return _ops.see(length, local, slots)


def prune(scores: Tensor, tokens: Tensor, parents: Tensor, root: Tensor, nodes: int) -> tuple[Tensor, ...]:
    """The fields of the `tree.Tree` of T nodes, the best of candidates [B, C] below root [B]."""
    return _ops.prune(scores, tokens, parents, root, nodes)


def join(
    one: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor], nodes: int
) -> tuple[Tensor, ...]:
    """The fields of `tree.join` of two trees' tokens, parents and scores, [B, T1] and [B, T2]."""
    return _ops.join(*one, *other, nodes)


def follow(
    text: Tensor, length: Tensor, slots: int, chain: Tensor, ahead: Tensor, first: Tensor, further: Tensor,
    shortest: int,
) -> tuple[Tensor, Tensor]:
    """`drafters.lookup.Lookup.follow` in the first `slots` of text [B, N], whose roots are at length [B]."""
    return _ops.follow(text, length, slots, chain, ahead, first, further, shortest)


def accept(
    tokens: Tensor, parent: Tensor, depth: Tensor, chosen: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """`tree.accept` -> path [B, W], count [B]."""
    return _ops.accept(tokens, parent, depth, chosen, window)


def emit(
    tokens: Tensor, count: Tensor, text: Tensor, length: Tensor, done: Tensor, out: Tensor, limit: Tensor,
    stop_ids: Tensor,
) -> Tensor:
    """`engine.state.State.emit` on its buffers, in place -> how many were appended [B]."""
    return _ops.emit(tokens, count, text, length, done, out, limit, stop_ids)


def hand_over(
    features: Tensor | None, path: Tensor, count: Tensor, where: Tensor, more: bool, unread: Tensor,
    unread_count: Tensor,
) -> None:
    """`engine.state.State.hand_over` on its buffers, in place."""
    _ops.hand_over(features, path, count, where, more, unread, unread_count)


def angles(positions: Tensor, inverse: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, T, hd/2] of positions [B, T] times inverse frequencies [hd/2], times factor."""
    return _ops.angles(positions, inverse, factor)


# A model of which not all is on the kernels (experts, fp8) runs through torch.compile, which is told the
# shapes of what the operators that it calls return.
SHAPES = {
    "linear": lambda x, packed, scale, bias, residual, columns, mode: x.new_empty(
        (*x.shape[:-1], columns), dtype=torch.float32 if mode == FLOAT32 else x.dtype
    ),
    "attend": lambda qkv, cos, sin, q_norm, k_norm, eps, k, v, slots, visible: qkv.new_empty(
        (*qkv.shape[:2], qkv.shape[2] - 4 * k.shape[2] * cos.shape[2])
    ),
    "rms_norm": lambda x, weight, eps: x.new_empty(x.shape),
    "angles": lambda positions, inverse, factor: (
        inverse.new_empty((*positions.shape, inverse.shape[0])),
        inverse.new_empty((*positions.shape, inverse.shape[0])),
    ),
}
