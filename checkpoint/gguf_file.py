"""Read metadata and tensors of GGUF files with the package gguf."""
from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize
from torch import Tensor

from checkpoint.gguf_types import FAST, TYPES, read_stored
from common.errors import InputError, check_file, library_errors
from kernels.stored import numbers

UNSUPPORTED = "Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "F64"  # the package cannot dequantize them


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. shape: outputs first. data [*shape[:-1], bytes per row] uint8."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def dequantize(self, rows: slice = slice(None)) -> Tensor:
        """Return these rows in float32, or in int64 if they are 64-bit integers."""
        if self.type.name == "I64":
            return torch.from_numpy(self.data[rows].view("<i8"))
        if self.type.name in FAST:
            return numbers(TYPES[self.type.name].kind, *read_stored(self.type, self.data[rows]))
        return torch.from_numpy(dequantize(self.data[rows], self.type))


class _Reader(GGUFReader):
    """Read each metadata array as one part.

    The package's reader makes one part per entry, which takes seconds for a vocabulary.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list[int], list]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, count = struct.unpack_from("<IQ", self.data, orig_offs)
        end = orig_offs + 12
        if item_type != GGUFValueType.STRING:
            dtype = self.gguf_scalar_to_np[item_type]
            items = self._get(end, dtype, count).tolist()
            end += count * np.dtype(dtype).itemsize
        else:
            items, content = [], memoryview(self.data)
            for _ in range(count):
                (size,) = struct.unpack_from("<Q", content, end)
                end += 8 + size
                items.append(str(content[end - size : end], "utf-8"))
        if end > len(self.data):
            raise ValueError("an array reaches beyond the end of the file")
        return end - orig_offs, [items], [0], [GGUFValueType.ARRAY]


def _value(field) -> object:
    """Return one value of the metadata as a Python object."""
    value = field.parts[-1]
    if field.types[0] == GGUFValueType.STRING:
        return str(bytes(value), "utf-8")
    return value if field.types[0] == GGUFValueType.ARRAY else value[0].item()


def read_gguf(path: Path) -> tuple[dict, dict[str, GGUFTensor]]:
    """Return the metadata by key and the tensors by name; their data are views of the mapped file.

    Raises InputError if the file is missing, truncated or damaged, or if a tensor's type is not supported.
    """
    check_file(path)
    with library_errors(f"{path}: truncated or damaged"):
        reader = _Reader(path, "c")  # writable for PyTorch
        expected = reader.data_offset
        for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
            if tensor.tensor_type.name in UNSUPPORTED:
                raise InputError(f"{path}: tensor {tensor.name}: type {tensor.tensor_type.name} is not"
                                 " supported")
            if (start := tensor.data_offset) != expected:
                raise ValueError(f"tensor {tensor.name} begins at byte {start}, expected {expected}")
            expected += -(-tensor.n_bytes // reader.alignment) * int(reader.alignment)
        return {key: _value(field) for key, field in reader.fields.items()}, {
            one.name: GGUFTensor(one.tensor_type, tuple(one.shape.tolist()[::-1]), one.data.view(np.uint8))
            for one in reader.tensors}
