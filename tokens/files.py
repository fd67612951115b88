"""The files of a tokenizer in a checkpoint's folder."""
from __future__ import annotations

import os
from pathlib import Path

from common.files import check_file
from common.schema import Digits, Either, Flag, List, Map, Null, Record, Text, maybe

GGUF_ADVICE = "convert the Hugging Face folder instead"  # of a GGUF whose tokenizer cannot be rebuilt
ENCODERS = ("tokenizer.json", "tokenizer.model")  # the first that exists is used
FILES = (
    *ENCODERS, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
)


TOKEN = Text(most=1 << 16)
ADDED = {"content": TOKEN}  # what describes a token has at least this
FLAGS = ("special", "lstrip", "rstrip", "single_word")
ENDS = ("bos_token", "eos_token", "unk_token", "pad_token")
_NAMED_TEMPLATES = List(Record({"name": Text(), "template": Text(most=1 << 24)}))
TOKENIZER_CONFIG = Record(optional={
    **{name: Either(Null(), TOKEN, Record(ADDED)) for name in ENDS},
    "added_tokens_decoder": maybe(Map(Record(ADDED, dict.fromkeys(FLAGS, Flag())), keys=Digits())),
    "add_bos_token": maybe(Flag()), "legacy": maybe(Flag()),
    "chat_template": Either(Null(), Text(most=1 << 24), _NAMED_TEMPLATES),
})


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
