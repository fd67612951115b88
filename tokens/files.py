"""Files of a tokenizer in a checkpoint folder: their names, their keys, and the settings that they give.

A file that holds tokens or settings of a tokenizer is read here, except the encoder's own
(`tokens.backends`) and the chat template (`tokens.templates`).
"""
from __future__ import annotations

import os
from pathlib import Path

from typing_extensions import NotRequired, TypedDict

from common.files import read_json
from common.schema import Digits, Flag, Schema, Text, text

ENCODERS = ("tokenizer.json", "tokenizer.model")  # the first that exists is used
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")  # a later file overrides an earlier one
# For conversations with tools: where transformers looks for it, and in converted folders, which are flat.
TOOL_TEMPLATES = ("additional_chat_templates/tool_use.jinja", "tool_use.jinja")
TOKENIZER_FILES = (*ENCODERS, *SETTINGS, "chat_template.jinja", "chat_template.json", *TOOL_TEMPLATES)
ENDS = ("bos_token", "eos_token", "unk_token", "pad_token")
TOKEN_FLAGS = ("special", "lstrip", "rstrip", "single_word")
_Token = TypedDict("Token", {"content": text(2**16), **dict.fromkeys(TOKEN_FLAGS, NotRequired[Flag])})
_Template = text(1 << 24)
TOKENIZER_CONFIG = Schema(TypedDict("TokenizerConfig", {
    **{name: NotRequired[text(2**16) | _Token | None] for name in ENDS},
    "added_tokens_decoder": NotRequired[dict[Digits, _Token] | None],
    "add_bos_token": NotRequired[Flag | None], "legacy": NotRequired[Flag | None],
    "chat_template": NotRequired[
        _Template | list[TypedDict("Named", {"name": Text, "template": _Template})] | None],
}))


def has(folder: Path, name: str) -> bool:
    """Return whether a folder has an entry of this name. A dangling link counts, so that reading it fails."""
    return os.path.lexists(folder / name)


def encoder_of(folder: Path) -> str | None:
    """Return the name of the file that text is encoded with, None if the folder has no tokenizer."""
    return next((name for name in ENCODERS if has(folder, name)), None)


def tokenizer_settings(folder: Path) -> dict:
    """Return the merged keys of the settings files, without those that are null. Raises InputError."""
    settings = {}
    for name in SETTINGS:
        if has(folder, name):
            found = TOKENIZER_CONFIG.require(read_json(folder / name), folder / name)
            settings |= {key: value for key, value in found.items() if value is not None}
    return settings


def special_tokens_map(settings: dict) -> dict[str, str]:
    """Return name -> text of bos_token, eos_token, ...; files spell them "<s>" or {"content": "<s>", ...}."""
    tokens = {name: settings.get(name) for name in ENDS}
    return {name: t if isinstance(t, str) else t["content"] for name, t in tokens.items() if t}
