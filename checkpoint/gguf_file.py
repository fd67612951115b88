"""Read the header of a GGUF file: metadata, and where its tensors are.

The format is described in ggml's docs/gguf.md. The package gguf reads it too, but takes 20 seconds for the
262,144 tokens of a Gemma vocabulary.
"""
from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoint.gguf_types import FAST, TYPES, read_stored
from common.errors import check_file, library_errors
from kernels.stored import numbers

# NumPy's type of each kind of value in the metadata. Kinds 8 and 9 are texts and arrays.
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
           12: "<f8"}
TEXT, ARRAY = 8, 9
UNSUPPORTED = "Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "F64"  # package gguf does not dequantize them


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. shape: outputs first. data: its bytes, [*shape[:-1], bytes of a row]."""

    type: object  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """Return rows in float32; integers of 64 bits unchanged."""
        from gguf.quants import dequantize

        if self.type.name == "I64":
            return torch.from_numpy(self.data[rows].view("<i8"))
        if self.type.name in FAST:
            return numbers(TYPES[self.type.name].kind, *read_stored(self.type, self.data[rows]))
        return torch.from_numpy(dequantize(self.data[rows], self.type))


class _Cursor:
    """A position in the bytes of a file. Reading beyond the end raises ValueError or struct.error."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def array(self, kind: str, count: int) -> np.ndarray:
        found = np.frombuffer(self.data, kind, count, self.at)
        self.at += found.nbytes
        return found

    def size(self) -> int:
        (value,) = struct.unpack_from("<Q", self.data, self.at)
        self.at += 8
        return value

    def kind(self) -> int:
        (value,) = struct.unpack_from("<I", self.data, self.at)
        self.at += 4
        return value

    def text(self) -> str:
        start = self.at + 8
        self.at = start + self.size()
        if self.at > len(self.data):
            raise ValueError("a text reaches beyond the end of the file")
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int):
        """Return one value of the metadata as a Python object."""
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            return self.array(NUMBERS[kind], 1).item()
        kind, count = self.kind(), self.size()
        if kind == TEXT:
            return [self.text() for _ in range(count)]
        return self.array(NUMBERS[kind], count).tolist()


def read_gguf(path: Path) -> tuple[dict, dict[str, GGUFTensor]]:
    """Return the metadata by key and the tensors by name; their data are views of the mapped file.

    Raises InputError if the file is missing, truncated or damaged.
    """
    check_file(path)
    with library_errors(f"{path}: truncated or damaged"), open(path, "rb") as file:
        cursor = _Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))  # writable for PyTorch
        if cursor.array("u1", 4).tobytes() != b"GGUF":
            raise ValueError("it does not start with GGUF")
        if (version := cursor.kind()) not in (2, 3):
            raise ValueError(f"version {version} of the format is not supported, 2 and 3 are")
        tensors, keys = cursor.size(), cursor.size()
        fields = {}
        for _ in range(keys):
            key = cursor.text()
            fields[key] = cursor.value(cursor.kind())
        entries = [(cursor.text(), cursor.array("<u8", cursor.kind()).tolist(), cursor.kind(), cursor.size())
                   for _ in range(tensors)]
        if len({name for name, *_ in entries}) != tensors:
            raise ValueError("two tensors have one name")
        alignment = fields.get("general.alignment", 32)
        start, end = cursor.at + -cursor.at % alignment, 0
        for name, *entry, offset in sorted(entries, key=lambda one: one[-1]):
            if offset != end:
                raise ValueError(f"tensor {name} begins at byte {offset} of the data, expected {end}")
            end += -(-_size(*entry)[2] // alignment) * alignment
        return fields, {name: _tensor(cursor.data, sizes, kind, start + offset)
                        for name, sizes, kind, offset in entries}


def _size(sizes: list[int], kind: int) -> tuple:
    """Return the type, the shape and the bytes of a tensor. sizes: inputs first, as in the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind, shape = GGMLQuantizationType(kind), tuple(sizes[::-1])
    if kind.name in UNSUPPORTED:
        raise ValueError(f"type {kind.name} of a tensor is not supported")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise ValueError(f"a tensor of shape {list(shape)} is not made of blocks of {block}")
    return kind, shape, math.prod(shape) // block * block_bytes


def _tensor(data: mmap.mmap, sizes: list[int], kind: int, offset: int) -> GGUFTensor:
    kind, shape, count = _size(sizes, kind)
    return GGUFTensor(kind, shape, np.frombuffer(data, np.uint8, count, offset).reshape(*shape[:-1], -1))
