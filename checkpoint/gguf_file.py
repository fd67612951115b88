"""GGUF files: metadata, and where their tensors are, read by the package gguf."""
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
from common.errors import check_file, library_errors
from kernels.stored import numbers

UNSUPPORTED = "Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "F64"  # package gguf does not dequantize them


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. shape: outputs first. data: its bytes, [*shape[:-1], bytes of a row]."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """Return rows in float32; integers of 64 bits unchanged."""
        if self.type.name == "I64":
            return torch.from_numpy(self.data[rows].view("<i8"))
        if self.type.name in FAST:
            return numbers(TYPES[self.type.name].kind, *read_stored(self.type, self.data[rows]))
        return torch.from_numpy(dequantize(self.data[rows], self.type))


class _Reader(GGUFReader):
    """The package's reader, but an array is one part, not one for each entry: seconds for a vocabulary."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list[int], list]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
        at = orig_offs + 12
        if kind != GGUFValueType.STRING:
            found = self._get(at, self.gguf_scalar_to_np[kind], count).tolist()
            at += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        else:
            found, content = [], memoryview(self.data)
            for _ in range(count):
                (size,) = struct.unpack_from("<Q", content, at)
                at += 8 + size
                found.append(str(content[at - size : at], "utf-8"))
        if at > len(self.data):
            raise ValueError("an array reaches beyond the end of the file")
        return at - orig_offs, [found], [0], [GGUFValueType.ARRAY]


def _value(field) -> object:
    """Return one value of the metadata as a Python object."""
    value = field.parts[-1]
    if field.types[0] == GGUFValueType.STRING:
        return str(bytes(value), "utf-8")
    return value if field.types[0] == GGUFValueType.ARRAY else value[0].item()


def read_gguf(path: Path) -> tuple[dict, dict[str, GGUFTensor]]:
    """Return the metadata by key and the tensors by name; their data are views of the mapped file.

    Raises InputError if the file is missing, truncated or damaged.
    """
    check_file(path)
    with library_errors(f"{path}: truncated or damaged"):
        reader = _Reader(path, "c")  # writable for PyTorch
        end = reader.data_offset
        for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
            if tensor.tensor_type.name in UNSUPPORTED:
                raise ValueError(f"type {tensor.tensor_type.name} of a tensor is not supported")
            if tensor.data_offset != end:
                raise ValueError(f"tensor {tensor.name} begins at byte {tensor.data_offset}, expected {end}")
            end += -(-tensor.n_bytes // reader.alignment) * int(reader.alignment)
        return {key: _value(field) for key, field in reader.fields.items()}, {
            one.name: GGUFTensor(one.tensor_type, tuple(one.shape.tolist()[::-1]), one.data.view(np.uint8))
            for one in reader.tensors}
