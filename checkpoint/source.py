"""One face for every kind of checkpoint that can be converted.

Opening a source reads names, shapes and metadata only. The numbers are read one tensor at a time, when the
converter asks for them, and nothing is kept: a model larger than the memory converts.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "BOOL": torch.bool}


@dataclass(frozen=True)
class Entry:
    """One tensor of a source. `blocks()` reads it as consecutive blocks of rows; `dtype` None is one we do
    not know.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    blocks: Callable[[], Iterator[Tensor]]

    def read(self) -> Tensor:
        """The whole tensor at once."""
        return torch.cat(list(self.blocks()))


@dataclass(frozen=True)
class Source:
    """An opened source: what it says about itself and where its tensors are."""

    path: Path
    family: str | None  # an `architectures` entry, or "gguf:ARCH"
    config: dict  # in the vocabulary of Hugging Face's config.json, whatever the container
    tensors: dict[str, Entry]
    stop_ids: list[int]
    bos_id: int | None
    tokenizer: Callable[[Path], bool]  # writes the tokenizer files into a folder; False if there are none


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == ".gguf"


def _ids(*groups: int | list[int] | None) -> list[int]:
    """Flatten ids and lists of ids into one list, first come first, each once."""
    flat = [i for group in groups for i in (group if isinstance(group, list) else [group])]
    return list(dict.fromkeys(i for i in flat if isinstance(i, int) and i >= 0))
