"""The files of a tokenizer in a checkpoint's folder."""
from __future__ import annotations

from pathlib import Path

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


def file_of(folder: Path) -> str | None:
    """The name of the file in a folder that text is encoded with, None if there is none."""
    return next((name for name in ENCODERS if (folder / name).is_file()), None)
