"""Write config.json and weights of a checkpoint folder, one tensor at a time."""
from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint.load import CONFIG, WEIGHTS, check_config
from checkpoint.source import STORED_DTYPES, Entry
from common.errors import InputError
from common.parallel import parallel_map
from common.schema import named

DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to write: the concatenation of its parts along the output dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Entry]
    sources: tuple[str, ...] = ()  # names of the parts in the source

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_checkpoint(
    folder: Path, config: dict, plan: list[Planned], *, quiet: bool = False, where: str = "the source"
) -> None:
    """Write weights and config.json into a folder, which may exist and hold other files.

    where: the source's name, for errors. Raises OSError, and InputError on an invalid config and on NaN or
    infinite weights.
    """
    with named(where):
        check_config(config)
    folder.mkdir(exist_ok=True)
    quiet, total = quiet or not sys.stderr.isatty(), sum(t.nbytes for t in plan)
    with tqdm(total=total, unit="B", unit_scale=True, desc=config["kind"], disable=quiet) as progress:
        digest = _write_safetensors(folder / WEIGHTS, plan, progress.update, where)
    text = json.dumps({**config, "sha256": digest}, indent=1, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def _write_safetensors(
    path: Path, plan: list[Planned], progress: Callable[[int], object], where: str
) -> str:
    """Write the planned tensors and return the file's sha256. Threads read a few tensors ahead.

    safetensors' own writer takes all tensors at once, from memory. The format is simple: the length of the
    header as u64, a JSON header padded to 8 bytes, the data in the order of the offsets
    (github.com/huggingface/safetensors). Raises OSError and InputError.
    """
    # Tensors of a multiple of 8 bytes first, then the others by descending item size: all stay aligned.
    plan = sorted(plan, key=lambda t: -t.dtype.itemsize if t.nbytes % 8 else -8)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in plan:
        start, end = end, end + t.nbytes
        dtype = DTYPE_NAMES[t.dtype]
        header[t.name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data) -> None:
            digest.update(data)
            file.write(data)

        def read_part(item: tuple[Planned, Entry, str]) -> np.ndarray:
            """Read a part in the tensor's dtype, as bytes."""
            (t, part, _), what = item, f"{where}: tensor {item[2]}"
            tensor = part.read()
            if tensor.shape != part.shape:
                raise InputError(f"{what} has shape {list(tensor.shape)}, expected {list(part.shape)}")
            exponents = t.dtype == torch.uint8 and t.name.endswith(".scale")  # of MXFP4; 255 is NaN
            check_finite(what, torch.where(tensor == 255, math.nan, 0.0) if exponents else tensor)
            return _cast(what, tensor, t.dtype).contiguous().flatten().view(torch.uint8).numpy()

        write(len(text).to_bytes(8, "little") + text)
        for data in parallel_map(read_part, ((t, *part) for t in plan for part in zip(
                t.parts, t.sources or (t.name,) * len(t.parts)))):
            write(data)
            progress(data.nbytes)
    return digest.hexdigest()


def check_finite(what: str, tensor: Tensor) -> None:
    """Raise InputError if a tensor has NaN or infinite values. what: file and tensor, for the message."""
    if count := count_nonfinite(tensor):
        raise InputError(f"{what} has {count:,} NaN or infinite values")


def _cast(what: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if dtype != tensor.dtype and count_nonfinite(cast) > count_nonfinite(tensor):
        raise InputError(f"{what} overflows {str(dtype)[6:]}; choose another --dtype")
    return cast


def count_nonfinite(tensor: Tensor) -> int:
    """Return the number of NaN and infinite values."""
    if not tensor.is_floating_point():
        return 0
    count = 0
    for part in tensor.flatten().split(1 << 18):  # in blocks: PyTorch copies bfloat16 to float32 to sum it
        part = part.float() if part.dtype.itemsize < 4 else part
        # A sum is NaN or infinite if one of its terms is, and is cheaper than testing each.
        count += 0 if bool(part.sum().isfinite()) else int((~part.isfinite()).sum())
    return count
