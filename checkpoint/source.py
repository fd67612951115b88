"""What every kind of checkpoint looks like to the converter.

Opening a source reads names, shapes and metadata only. The numbers are read one tensor at a time, when the
converter asks for them, and are not kept: a model larger than the memory can be converted.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

# Tokens that end a turn or a text, in any model. A GGUF stores one eos id and some repositories declare only
# one, yet a chat model may also emit the base model's end of text. Without that id the text never stops.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")


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

        def blocks() -> Iterator[Tensor]:
            yield read()

        return cls(tuple(shape), dtype, blocks)

    def read(self) -> Tensor:
        """The complete tensor."""
        return torch.cat(list(self.blocks()))


@dataclass(frozen=True)
class Source:
    """An opened source: what it says about itself and where its tensors are."""

    path: Path
    family: str | None  # an `architectures` entry, or "gguf:ARCH"
    config: dict  # with the keys of Hugging Face's config.json, whatever the container
    tensors: dict[str, Entry]
    stop_ids: list[int]
    bos_id: int | None
    tokenizer: Callable[[Path], bool]  # writes the tokenizer files into a folder; False if there are none
    keys: dict[str, str] = field(default_factory=dict)  # how the container calls keys of config, if otherwise


def unique_ids(*groups: int | list[int] | None) -> list[int]:
    """Flatten token ids and lists of them into one list in order of appearance, without repetitions."""
    flat = [i for group in groups for i in (group if isinstance(group, list) else [group])]
    return list(dict.fromkeys(i for i in flat if isinstance(i, int) and i >= 0))
