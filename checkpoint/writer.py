"""Writing a checkpoint folder: tensors are streamed in blocks of rows.

The folder appears under its name when it is complete, not before.
"""
from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint.folder import CONFIG, WEIGHTS
from checkpoint.source import Entry
from common.errors import InputError
from common.files import read_json

WRITTEN_DTYPES = {  # with safetensors' names for them
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64",
    torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
}
SPARE_BYTES = 32 << 20  # room for what is not weights: tokenizer, config, file system


@dataclass(frozen=True)
class Planned:
    """A tensor to write. Its parts follow each other along the output dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Entry]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_out(out: Path, kind: str, force: bool) -> None:
    """Raise InputError unless `out` is free or, with `force`, one of our folders of the same kind."""
    if not out.exists() and not out.is_symlink():
        return
    try:
        config = read_json(out / CONFIG)
        old_kind, _ = config["kind"], config["format"]  # of any version: --force replaces old ones too
    except (InputError, KeyError):
        raise InputError(
            f"{out}: exists and is not one of our checkpoint folders; choose another --out"
        ) from None
    if old_kind != kind:
        raise InputError(
            f"{out}: holds a {old_kind} checkpoint, a {kind} may not replace it; choose another --out"
        )
    if not force:
        raise InputError(f"{out}: exists; replace it with --force or choose another --out")


def write_folder(
    out: Path, config: dict, plan: list[Planned], others: Callable[[Path], bool] | None, quiet: bool
) -> bool:
    """Fill a temporary folder beside `out`, then rename it to `out`, which `check_out` has allowed.

    `others(folder)` writes what belongs beside the weights, and says whether there was a tokenizer, or none
    is needed. Returns what it says, True without it. Raises InputError if there is no space or no
    permission. After an error and on Ctrl-C nothing is left on disk.
    """
    parent = out.absolute().parent
    created = [p for p in (parent, *parent.parents) if not p.exists()]
    temporary = parent / f".{out.name}.tmp-{os.getpid()}"
    done = False
    try:
        total = sum(t.nbytes for t in plan)
        need, free = total + SPARE_BYTES, shutil.disk_usage(created[-1].parent if created else parent).free
        if free < need:
            raise InputError(f"{out}: no space: {need:,} bytes are needed, {free:,} are free")
        temporary.mkdir(parents=True)
        has_tokenizer = others(temporary) if others else True
        text = json.dumps(config, indent=1, ensure_ascii=False) + "\n"
        (temporary / CONFIG).write_text(text, encoding="utf-8")
        hidden = quiet or not sys.stderr.isatty()
        with tqdm(total=total, unit="B", unit_scale=True, desc=out.name, disable=hidden) as progress:
            write_safetensors(temporary / WEIGHTS, plan, progress.update)
        _publish(temporary, out)
        done = True
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{out}: no space left on the device") from None
        raise InputError(f"{out}: cannot be written ({e})") from None
    finally:  # also on Ctrl-C
        if not done:
            shutil.rmtree(temporary, ignore_errors=True)
            for folder in created:
                with contextlib.suppress(OSError):  # it was never made, or another process uses it by now
                    folder.rmdir()
    return has_tokenizer


def write_safetensors(
    path: Path, plan: list[Planned], progress: Callable[[int], object] = lambda size: None
) -> None:
    """Write the planned tensors one block of rows at a time. `progress` is told the bytes of each block.

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
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in plan:
            for part in t.parts:
                for block in part.blocks():
                    data = _cast(t.name, block, t.dtype).contiguous().flatten().view(torch.uint8).numpy()
                    file.write(data)
                    progress(data.nbytes)


def _cast(name: str, block: Tensor, dtype: torch.dtype) -> Tensor:
    cast = block.to(dtype)
    if dtype == torch.float16 != block.dtype and bool((cast.isinf() & block.isfinite()).any()):
        raise InputError(f"tensor {name} overflows fp16; use --dtype bf16 or fp32")
    return cast


def _publish(temporary: Path, out: Path) -> None:
    """Rename the finished folder to `out`. Subfolders of one that it replaces, such as heads, are kept."""
    if not out.exists():
        os.replace(temporary, out)
        return
    old = temporary.with_name(f".{out.name}.old-{os.getpid()}")
    os.replace(out, old)
    try:
        os.replace(temporary, out)
    except BaseException:
        os.replace(old, out)
        raise
    for folder in (p for p in old.iterdir() if p.is_dir()):
        os.replace(folder, out / folder.name)
    shutil.rmtree(old)
