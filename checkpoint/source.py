"""Checkpoints of others as the converter sees them, and how a name leads to one: a folder, a file, the hub.

Opening a source reads names, shapes and metadata only. The numbers are read one tensor at a time, when the
converter asks for them, and are not kept: a model larger than the memory can be converted.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import TypedDict

from checkpoint.folder import CONFIG, is_gguf
from common.cli import library_errors
from common.errors import InputError
from common.files import read_json
from common.schema import Schema, text
from tokens.files import TOKENIZER_FILES

# Weights of a Hugging Face folder, best first: safetensors before pickles, one file before shards.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt",  # heads, as their authors have it
)
INDEX = Schema(TypedDict("Index", {"weight_map": dict[str, text(255)]}))
SMALL_FILES = (CONFIG, "generation_config.json", *TOKENIZER_FILES)


@dataclass(frozen=True)
class Entry:
    """One tensor of a source. `blocks()` reads it as consecutive blocks of rows.

    `dtype` is None if the source stores the tensor in a type that the converter does not know.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    blocks: Callable[[], Iterator[Tensor]]

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype | None, read: Callable[[], Tensor]) -> Entry:
        """A tensor that is read in one block, by calling `read`."""
        return cls(tuple(shape), dtype, lambda: iter([read()]))

    def changed(self, change: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None = None) -> Entry:
        """A tensor that `change` makes of this one. shape: if it is another."""
        return Entry.of(shape or self.shape, self.dtype, lambda: change(self.read()))

    def read(self) -> Tensor:
        """The complete tensor; a view of its file if that has it in one block."""
        blocks = list(self.blocks())
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]


@dataclass(frozen=True)
class Source:
    """An opened source: what it says about itself and where its tensors are."""

    path: Path
    family: str | None  # an `architectures` entry, or "gguf:ARCH"
    config: dict  # with the keys of Hugging Face's config.json, whatever the container
    tensors: dict[str, Entry]
    stop_ids: list[int]  # of its config; the tokenizer may have more
    bos_id: int | None
    # Writes the tokenizer files into a folder; False if there are none. added: a chat template to come.
    tokenizer: Callable[[Path, str | None], bool]


def unique_ids(*groups: int | list[int] | None) -> list[int]:
    """Flatten token ids and lists of them into one list in order of appearance, without repetitions."""
    flat = [i for group in groups for i in (group if isinstance(group, list) else [group])]
    return list(dict.fromkeys(i for i in flat if isinstance(i, int) and i >= 0))


def resolve_source(checkpoint: str | Path) -> Path:
    """Return the local path of a checkpoint: a folder, a .gguf file, or a download of the hub's `org/name`.

    Local paths come first. Raises InputError on any other name, or if the download fails.
    """
    path = Path(checkpoint)
    if path.is_dir() and not (path / CONFIG).exists():
        raise InputError(f"{path}: holds no {CONFIG}; name the folder of a checkpoint")
    if path.is_dir() or (is_gguf(path) and path.is_file()):
        return path
    if path.exists():
        raise InputError(f"{path}: not a folder (nor a .gguf file)")
    if path.parent.is_dir() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(checkpoint)):
        place = next(parent for parent in path.parents if parent.is_dir())
        there = sorted(p.name for p in place.glob("*"))[:12] if place != Path() else ()
        inside = f"; {place} is no name on the hub but a folder here with {', '.join(there)}" if there else ""
        raise InputError(f"{path}: no such file or folder{inside}; name a converted folder, a Hugging Face"
                         " folder, a .gguf file or a hub id (org/name)")
    with library_errors(f"{path}: no such folder, and the hub did not send it"):
        return _download(str(checkpoint))


def _download(repo: str) -> Path:
    """Download the files that we need of a hub repository into the hub's cache -> the local folder.

    An interrupted download is resumed. Without a connection, an earlier download is taken.
    """
    import huggingface_hub as hub

    try:  # one request with a time limit: listing the files page by page retries for half a minute
        files = [file.rfilename for file in hub.HfApi().model_info(repo, timeout=20).siblings or ()]
    except Exception:
        with contextlib.suppress(Exception):
            return Path(hub.snapshot_download(repo, local_files_only=True))
        raise
    weights = next((name for name in WEIGHT_FILES if name in files), None)
    if weights is None or CONFIG not in files:
        raise InputError(f"{repo}: the hub repository lacks {CONFIG} or weights ({', '.join(WEIGHT_FILES)})")
    wanted = [*(name for name in SMALL_FILES if name in files), weights]
    folder = Path(hub.snapshot_download(repo, allow_patterns=wanted))
    if weights.endswith(".json"):
        wanted += dict.fromkeys(shards(folder / weights).values())
        folder = Path(hub.snapshot_download(repo, allow_patterns=wanted))
    return folder


def shards(index: Path) -> dict[str, str]:
    """Return the file of each tensor, of an index file. Raises InputError if it names files elsewhere."""
    weight_map = INDEX.require(read_json(index), index)["weight_map"]
    for file in weight_map.values():
        if Path(file).name != file:
            raise InputError(f"{index}: {file!r} is not the name of a file beside it")
    return weight_map
