"""Write config.json and weights of a checkpoint folder; tensors are streamed in blocks of rows."""
from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint.folder import CONFIG, WEIGHTS, check_config
from checkpoint.source import Entry
from checkpoint.weights import count_nonfinite
from common.errors import InputError
from common.schema import named

WRITTEN_DTYPES = {  # with safetensors' names for them
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64",
    torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
}


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
    folder: Path, config: dict, plan: list[Planned], *, quiet: bool = False, allow_nonfinite: bool = False,
    where: str = "the source",
) -> None:
    """Write weights and config.json into a folder, which may be there already and may hold other files.

    where: the source's name, for errors. Raises OSError, and InputError on a config that is not right, and on
    numbers that are not finite unless they are allowed.
    """
    with named(where):
        check_config(config)
    folder.mkdir(exist_ok=True)
    hidden, total = quiet or not sys.stderr.isatty(), sum(t.nbytes for t in plan)
    with tqdm(total=total, unit="B", unit_scale=True, desc=config["kind"], disable=hidden) as progress:
        digest = _write_safetensors(folder / WEIGHTS, plan, progress.update, allow_nonfinite, where)
    text = json.dumps({**config, "sha256": digest}, indent=1, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def _write_safetensors(
    path: Path, plan: list[Planned], progress: Callable[[int], object], allow_nonfinite: bool, where: str
) -> str:
    """Write the planned tensors one block of rows at a time -> the file's sha256.

    progress: gets the bytes of each block. The other arguments are those of `fill`.

    safetensors' own writer takes all tensors at once, from memory. The format is simple: the length of the
    header as u64, a JSON header padded to 8 bytes, the data in the order of the offsets
    (github.com/huggingface/safetensors). Raises OSError and InputError.
    """
    # With the widest type first every tensor is aligned to its own type.
    plan = sorted(plan, key=lambda t: -t.dtype.itemsize)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in plan:
        start, end = end, end + t.nbytes
        dtype = WRITTEN_DTYPES[t.dtype]
        header[t.name] = {"dtype": dtype, "shape": list(t.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data) -> None:
            digest.update(data)
            file.write(data)

        write(len(text).to_bytes(8, "little") + text)
        for t in plan:
            for part, name in zip(t.parts, t.sources or (t.name,) * len(t.parts)):
                bad = 0
                for block in part.blocks():
                    bad += count_nonfinite(block)
                    block = _cast(f"{where}: tensor {name}", block, t.dtype)
                    data = block.contiguous().flatten().view(torch.uint8).numpy()
                    write(data)
                    progress(data.nbytes)
                if bad:
                    judge_nonfinite(f"{where}: tensor {name}", bad, allow_nonfinite)
    return digest.hexdigest()


def judge_nonfinite(what: str, count: int, allowed: bool) -> None:
    """Refuse a tensor with `count` numbers that are not finite, by an InputError, or warn of them."""
    found = f"{what} holds {count:,} numbers that are not finite (nan or infinite)"
    if not allowed:
        raise InputError(f"{found}; expected none; --allow-nonfinite takes them as they are")
    print(f"warning: {found}", file=sys.stderr)


def _cast(what: str, block: Tensor, dtype: torch.dtype) -> Tensor:
    cast = block.to(dtype)
    if dtype.is_floating_point and dtype != block.dtype and count_nonfinite(cast) > count_nonfinite(block):
        raise InputError(f"{what} overflows {str(dtype)[6:]}: choose another --dtype")
    return cast
