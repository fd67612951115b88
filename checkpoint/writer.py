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
    """A tensor to write. Its parts follow each other along the output dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Entry]
    sources: tuple[str, ...] = ()  # what the parts are called where they come from

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def fill(
    folder: Path, config: dict, plan: list[Planned], *, quiet: bool = False, where: str = "the source"
) -> None:
    """Write weights and config.json into a folder, which may be there already and may hold other files.

    where: the source's name, for errors. Raises OSError, and InputError on a config that is not right, and on
    numbers that are not finite.
    """
    with named(where):
        check_config(config)
    folder.mkdir(exist_ok=True)
    hidden, total = quiet or not sys.stderr.isatty(), sum(t.nbytes for t in plan)
    with tqdm(total=total, unit="B", unit_scale=True, desc=config["kind"], disable=hidden) as progress:
        digest = _write_safetensors(folder / WEIGHTS, plan, progress.update, where)
    text = json.dumps({**config, "sha256": digest}, indent=1, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def _write_safetensors(
    path: Path, plan: list[Planned], progress: Callable[[int], object], where: str
) -> str:
    """Write the planned tensors -> the file's sha256. Threads read a few ahead of the one that is written.

    safetensors' own writer takes all tensors at once, from memory. The format is simple: the length of the
    header as u64, a JSON header padded to 8 bytes, the data in the order of the offsets
    (github.com/huggingface/safetensors). Raises OSError and InputError.
    """
    # Multiples of 8 bytes in their order, then others, the widest type first: each is aligned to its type.
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

        def ready(item: tuple[Planned, Entry, str]) -> np.ndarray:
            """Read a part in the tensor's dtype, as bytes."""
            (t, part, _), what = item, f"{where}: tensor {item[2]}"
            tensor = part.read()
            if tensor.shape != part.shape:
                raise InputError(f"{what} has shape {list(tensor.shape)}, expected {list(part.shape)}")
            exponents = t.dtype == torch.uint8 and t.name.endswith(".scale")  # of MXFP4; 255 is nan
            check_finite(what, torch.where(tensor == 255, math.nan, 0.0) if exponents else tensor)
            return _cast(what, tensor, t.dtype).contiguous().flatten().view(torch.uint8).numpy()

        write(len(text).to_bytes(8, "little") + text)
        for data in parallel_map(ready, ((t, *part) for t in plan for part in zip(
                t.parts, t.sources or (t.name,) * len(t.parts)))):
            write(data)
            progress(data.nbytes)
    return digest.hexdigest()


def check_finite(what: str, tensor: Tensor) -> None:
    """Raise InputError if a tensor has nan or infinite numbers."""
    if count := count_nonfinite(tensor):
        raise InputError(f"{what} holds {count:,} numbers that are not finite (nan or infinite); expected"
                         " none")


def _cast(what: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if dtype != tensor.dtype and count_nonfinite(cast) > count_nonfinite(tensor):
        raise InputError(f"{what} overflows {str(dtype)[6:]}: choose another --dtype")
    return cast


def count_nonfinite(tensor: Tensor) -> int:
    """Return the count of nan and infinite numbers."""
    if not tensor.is_floating_point():
        return 0
    found = 0
    for part in tensor.flatten().split(1 << 18):  # PyTorch sums bfloat16 by way of a copy in float32
        part = part.float() if part.dtype.itemsize < 4 else part
        # A sum is nan or infinite if any of its terms is, and costs less than to look at each.
        found += 0 if bool(part.sum().isfinite()) else int((~part.isfinite()).sum())
    return found
