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
from common.schema import Schema, in_words, text
from tokens.files import TOKENIZER_FILES

# Weights of a Hugging Face folder, best first: safetensors before pickles, one file before shards.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)
INDEX = Schema(TypedDict("Index", {"weight_map": dict[str, text(255)]}))
MOST_LISTED = 12  # names of a folder in a message
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


def listed(folder: Path) -> str:
    """Return the names in a folder, the first ones of many."""
    return ", ".join(sorted(p.name for p in folder.iterdir())[:MOST_LISTED]) or "nothing"


def resolve_source(checkpoint: str | Path) -> Path:
    """Return the local path of a checkpoint: a folder, a .gguf file, or a download of the hub's `org/name`.

    Local paths come first. Raises InputError on any other name, or if the download fails.
    """
    path = Path(checkpoint)
    if path.is_dir() and not (path / CONFIG).exists():
        raise InputError(f"{path}: holds no {CONFIG}, but {listed(path)}; name the folder of a checkpoint")
    if path.is_dir() or (is_gguf(path) and path.is_file()):
        return path
    if path.exists():
        inside = f"; name the folder that it is in, {path.parent}" if (path.parent / CONFIG).exists() else ""
        raise InputError(f"{path}: not a folder (nor a .gguf file){inside}")
    name, place = str(checkpoint), next(parent for parent in path.parents if parent.is_dir())
    missing = f"{path}: no such file or folder"
    if place not in (Path(), Path("/")):  # a mistyped path is no hub id
        raise InputError(f"{missing}; not looked up on the hub, as {place} is a folder here, which holds"
                         f" {listed(place)}")
    if is_gguf(path) or name.startswith(".") or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{missing}; name a converted folder, a Hugging Face folder, a .gguf file or a hub"
                         " id (org/name)")
    return _download(name)


def _download(repo: str) -> Path:
    """Download the files that we need of a hub repository into the hub's cache -> the local folder.

    An interrupted download is resumed. Raises InputError.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    def fetch(*names: str) -> Path:
        return Path(hub.snapshot_download(repo, allow_patterns=list(names)))

    with library_errors(f"{repo}: no such folder, and the hub did not send it"):
        try:
            try:  # one request with a time limit: listing the files page by page retries for half a minute
                files = [file.rfilename for file in hub.HfApi().model_info(repo, timeout=20).siblings or ()]
            except (errors.RepositoryNotFoundError, errors.HFValidationError):
                raise
            except Exception:  # whatever it is, an earlier download may have left all that is needed
                with contextlib.suppress(Exception):
                    return Path(hub.snapshot_download(repo, local_files_only=True))
                raise
            weights = next((name for name in WEIGHT_FILES if name in files), None)
            if weights is None or CONFIG not in files:
                lacks = CONFIG if weights else "weights we read (" + ", ".join(WEIGHT_FILES) + ")"
                raise InputError(f"{repo}: the hub repository has no {lacks}")
            small = [name for name in SMALL_FILES if name in files]
            folder = fetch(*small, weights)
            if not weights.endswith(".json"):
                return folder
            return fetch(*small, weights, *dict.fromkeys(shards(folder / weights).values()))
        except errors.GatedRepoError:  # a kind of RepositoryNotFoundError, hence first
            raise InputError(
                f"{repo}: gated; accept its licence on the hub, then run `hf auth login`") from None
        except errors.RepositoryNotFoundError:
            raise InputError(
                f"{repo}: no such folder, and no such public repository on the hub") from None


def shards(index: Path) -> dict[str, str]:
    """Return the file of each tensor, of an index file. Raises InputError if it names files elsewhere."""
    weight_map = INDEX.require(read_json(index), index)["weight_map"]
    if not weight_map:
        raise InputError(f"{index}: has no weight_map")
    for file in dict.fromkeys(weight_map.values()):
        if not file or Path(file).name != file or "\0" in file:
            raise InputError(f"{index}: {in_words(file)} is not the name of a file beside it")
    return weight_map
