"""The container of GGUF: its metadata and where its tensors are, read without trusting a length in it.

The format is llama.cpp's (ggml/docs/gguf.md). Every length is compared with what the file has left before
anything of that length is read.
"""
from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import InputError, printable
from common.files import check_file

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # GGUF's number of a type: struct's letter
TEXT, ARRAY = 8, 9
MOST_VALUES = 1 << 22  # of all arrays together: tokens, merges
MOST_NAME, MOST_TEXT = 1 << 16, 1 << 26  # bytes
MOST_TENSORS = 1 << 18


class Tensor(NamedTuple):
    """A tensor of the file. shape: the innermost dimension first, as the file has it. data: its bytes, uint8,
    [..., bytes of a row].
    """

    name: str
    type: object  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray


class _Cursor:
    """Reads values one after the other. Every method raises InputError where the file ends before they do."""

    def __init__(self, path: Path, content):
        self.path, self.content, self.at, self.order = path, content, 0, "<"
        self.values_left = MOST_VALUES

    def damaged(self, what: str) -> InputError:
        return InputError(f"{self.path}: truncated or damaged: {what}")

    def room(self, what: str, count: int, size: int, most: int) -> None:
        """Raise InputError unless `count` things of at least `size` bytes can follow, and are no more than
        `most`.
        """
        most = min(most, (len(self.content) - self.at) // size)
        if count > most:
            raise self.damaged(f"{what} is said to be {count:,} long; expected at most {most:,}")

    def number(self, letter: str, what: str) -> int | float | bool:
        self.room(what, 1, struct.calcsize(letter), 1)
        value, = struct.unpack_from(self.order + letter, self.content, self.at)
        self.at += struct.calcsize(letter)
        return value

    def text(self, what: str, most: int) -> str:
        size = self.number("Q", what)
        self.room(what, size, 1, most)
        self.at += size
        try:
            return self.content[self.at - size : self.at].decode("utf-8")
        except UnicodeDecodeError as e:
            raise self.damaged(f"{what} is no UTF-8 ({e.reason})") from None

    def value(self, key: str):
        """A value of metadata, after its type."""
        kind = self.number("I", key)
        if kind == TEXT:
            return self.text(key, MOST_TEXT)
        if kind in SCALARS:
            return self.number(SCALARS[kind], key)
        if kind != ARRAY:
            raise self.damaged(f"{key} is of type {kind}; expected 0 to 12")
        kind, count = self.number("I", key), self.number("Q", key)
        if kind != TEXT and kind not in SCALARS:
            raise self.damaged(f"{key} is an array of type {kind}; expected numbers or texts")
        size = 8 if kind == TEXT else struct.calcsize(SCALARS[kind])  # a text begins with its length
        self.room(key, count, size, self.values_left)
        self.values_left -= count
        if kind == TEXT:
            return [self.text(key, MOST_TEXT) for _ in range(count)]
        values = struct.unpack_from(f"{self.order}{count}{SCALARS[kind]}", self.content, self.at)
        self.at += size * count
        return list(values)


def read_gguf(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """(The metadata by key, the tensors by name). Raises InputError if the file is damaged, or the package
    that knows the quantised types is missing.
    """
    try:
        import gguf
    except ImportError:
        raise InputError(f"{path}: reading a GGUF needs the package gguf (pip install gguf)") from None
    if check_file(path) < 24:
        raise InputError(f"{path}: truncated, or no GGUF file: it has less than 24 bytes")
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, content)
    if content[:4] != b"GGUF":
        raise cursor.damaged(f"it begins with {bytes(content[:4])!r}; expected b'GGUF'")
    cursor.at = 4
    version = cursor.number("I", "its version")
    if version & 0xFFFF == 0:  # written on a machine of the other byte order
        cursor.order, cursor.at = ">", 4
        version = cursor.number("I", "its version")
    if version not in (2, 3):
        raise cursor.damaged(f"its version is {version}; expected 2 or 3")
    tensor_count, key_count = (cursor.number("Q", f"the number of {what}") for what in ("tensors", "keys"))
    cursor.room("the list of keys", key_count, 13, 1 << 16)
    fields: dict = {}
    for i in range(key_count):
        key = cursor.text(f"the name of key {i}", MOST_NAME)
        if key in fields:
            raise cursor.damaged(f"{printable(key)} is there twice; expected once")
        fields[key] = cursor.value(printable(key))
    cursor.room("the list of tensors", tensor_count, 32, MOST_TENSORS)
    places = [_place(cursor, i) for i in range(tensor_count)]
    alignment = fields.get("general.alignment", 32)
    if alignment not in [1 << n for n in range(17)]:
        raise cursor.damaged(f"general.alignment is {alignment!r}; expected a power of 2 up to 65,536")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in places:
        shown = f"tensor {printable(name)}"
        if name in tensors:
            raise cursor.damaged(f"{shown} is there twice; expected once")
        try:
            kind = gguf.GGMLQuantizationType(kind)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise cursor.damaged(f"{shown} is of type {kind}, which is not known") from None
        if shape[0] % block:
            raise cursor.damaged(f"{shown} has rows of {shape[0]:,}; expected a multiple of {block}")
        row, count = shape[0] // block * size, math.prod(shape[1:])
        begin, end = start + offset, start + offset + row * count
        if end > len(content):
            raise cursor.damaged(f"{shown} ends at byte {end:,}; the file has {len(content):,}")
        data = np.frombuffer(content, np.uint8, row * count, begin).reshape(*shape[:0:-1], row)
        tensors[name] = Tensor(name, kind, shape, data)
    _check_types(path, tensors)
    return fields, tensors


def _place(cursor: _Cursor, number: int) -> tuple[str, tuple[int, ...], int, int]:
    """The name, shape, type and offset of a tensor."""
    name = cursor.text(f"the name of tensor {number}", MOST_NAME)
    what = f"tensor {printable(name)}"
    dimensions = cursor.number("I", what)
    if not 1 <= dimensions <= 4:
        raise cursor.damaged(f"{what} has {dimensions} dimensions; expected 1 to 4")
    shape = tuple(cursor.number("Q", what) for _ in range(dimensions))
    if not all(shape):
        raise cursor.damaged(f"{what} has shape {list(shape)}; expected no 0 in it")
    return name, shape, cursor.number("I", what), cursor.number("Q", what)


def _check_types(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise InputError if a tensor is of a type that cannot be dequantised."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    for tensor in {t.type: t for t in tensors.values()}.values():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.type][1]), np.uint8), tensor.type)
        except NotImplementedError:
            raise InputError(
                f"{path}: tensor {printable(tensor.name)} is of type {tensor.type.name}, which cannot be"
                " dequantised"
            ) from None
