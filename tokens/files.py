"""The files of a tokenizer in a checkpoint's folder."""
from __future__ import annotations

import os
from pathlib import Path

from typing_extensions import NotRequired, TypedDict

from common.files import check_file
from common.schema import Digits, Flag, Schema, Text, text

GGUF_ADVICE = "convert the Hugging Face folder instead"  # of a GGUF whose tokenizer cannot be rebuilt
ENCODERS = ("tokenizer.json", "tokenizer.model")  # the first that exists is used
FILES = (
    *ENCODERS, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
)


ENDS = ("bos_token", "eos_token", "unk_token", "pad_token")
FLAGS = ("special", "lstrip", "rstrip", "single_word")
_Token = TypedDict("Token", {"content": text(2**16), **dict.fromkeys(FLAGS, NotRequired[Flag])})
_Template = text(1 << 24)
TOKENIZER_CONFIG = Schema(TypedDict("TokenizerConfig", {
    **{name: NotRequired[text(2**16) | _Token | None] for name in ENDS},
    "added_tokens_decoder": NotRequired[dict[Digits, _Token] | None],
    "add_bos_token": NotRequired[Flag | None], "legacy": NotRequired[Flag | None],
    "chat_template": NotRequired[
        _Template | list[TypedDict("Named", {"name": Text, "template": _Template})] | None],
}))


def has(folder: Path, name: str) -> bool:
    """Whether a folder has this file. Raises InputError if it has something of this name that is no file."""
    path = folder / name
    if not os.path.lexists(path):
        return False
    check_file(path)
    return True


def file_of(folder: Path) -> str | None:
    """The name of the file in a folder that text is encoded with, None if there is none. Raises as `has`."""
    return next((name for name in ENCODERS if has(folder, name)), None)
