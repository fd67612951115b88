"""safetensors files: opened, listed and checked before a number is read."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from common.errors import InputError, first_line
from common.files import check_file

Shapes = dict[str, tuple[int, ...]]
STORED_DTYPES = {  # safetensors' names
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}


class Stored(NamedTuple):
    """A tensor as a file stores it. dtype: safetensors' name for it."""

    dtype: str
    shape: tuple[int, ...]


@contextlib.contextmanager
def opened(path: Path, advice: str, device: torch.device | str = "cpu") -> Iterator:
    """Open a file for the time of a context. Raises InputError, which ends in the advice, if that fails."""
    check_file(path)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except SafetensorError as e:
        raise InputError(f"{path}: damaged ({first_line(e)}); {advice}") from None


def listed(path: Path, advice: str) -> dict[str, Stored]:
    """Return the tensors of a file by name. Raises InputError."""
    with opened(path, advice) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        return {name: Stored(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def check_shapes(shapes: Shapes, expected: Shapes, where: str) -> None:
    """Compare tensor names and shapes both ways. Raises InputError naming the first difference."""
    for name, shape in expected.items():
        if name not in shapes:
            raise InputError(f"{where}: tensor {name} {list(shape)} is missing")
        if tuple(shapes[name]) != tuple(shape):
            raise InputError(f"{where}: tensor {name} has shape {list(shapes[name])}, expected {list(shape)}")
    for name in shapes:
        if name not in expected:
            raise InputError(f"{where}: unexpected tensor {name!r} {list(shapes[name])}")
