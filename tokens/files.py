"""Tokenizer files of a checkpoint folder: names, settings, chat templates."""
from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken

from common.errors import InputError, read_json, read_text

ENCODERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # the first that exists is used
MERGES, ADDED = "merges.txt", "added_tokens.json"  # merges.txt belongs to vocab.json
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# For conversations with tools: the path of transformers, and of converted folders, which have no subfolders.
TOOL_TEMPLATES = ("additional_chat_templates/tool_use.jinja", "tool_use.jinja")
# Copied unchanged; vocab.json is converted to a tokenizer.json.
COPIED = (*ENCODERS[:2], ADDED, *SETTINGS, *TEMPLATE_FILES, *TOOL_TEMPLATES)
TOKENIZER_FILES = (*COPIED, ENCODERS[2], MERGES)
# Default settings of tokenizer classes, as in transformers 5.
VOCAB_JSON_DEFAULTS = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
LLAMA_DEFAULTS = {"add_bos_token": False, "legacy": False}
SPACE = "▁"  # how sentencepiece spells a space
MAX_GAPS = 1 << 16  # maximum number of unused ids below the highest
SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKEN_KEYS = ("additional_special_tokens", "extra_special_tokens")
TOKEN_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


def has(folder: Path, name: str) -> bool:
    """Return whether a folder has an entry of this name. A dangling link counts, so that reading it fails."""
    return os.path.lexists(folder / name)


def encoder_of(folder: Path) -> str | None:
    """Return the name of the file that text is encoded with, None if the folder has no tokenizer."""
    found = next((name for name in ENCODERS if has(folder, name)), None)
    return found if found != "vocab.json" or has(folder, MERGES) else None


def tokenizer_settings(folder: Path) -> dict:
    """Return the merged settings files without null values. Raises InputError.

    If tokenizer_config.json has `added_tokens_decoder`, special_tokens_map.json only adds missing keys.
    Without that key, the files are older: special_tokens_map.json overrides tokenizer_config.json, and
    added_tokens.json replaces `added_tokens_decoder` (here: id -> token). Tokenizer classes have defaults.
    """
    def read(name: str) -> dict:
        content = read_json(folder / name) if has(folder, name) else {}
        return {key: value for key, value in content.items() if value is not None}

    special, config = map(read, SETTINGS)
    encoder = encoder_of(folder)
    class_name = config.get("tokenizer_class", "") if encoder == "tokenizer.model" else ""
    is_llama = class_name.startswith("LlamaTokenizer")
    config = (VOCAB_JSON_DEFAULTS if encoder == "vocab.json" else LLAMA_DEFAULTS if is_llama else {}) | config
    if class_name.startswith("CodeLlamaTokenizer"):  # never had the legacy behavior
        config["legacy"] = False
    decoder, settings = config.get("added_tokens_decoder"), config | special
    if decoder is not None:
        added = {int(i): AddedToken(t["content"], **{flag: t[flag] for flag in TOKEN_FLAGS if flag in t})
                 for i, t in decoder.items()}
        return special | config | {"added_tokens_decoder": added}
    names = {*special_tokens_map(settings).values(), *listed_tokens(settings)}
    added = {i: AddedToken(t, special=t in names) for t, i in read(ADDED).items()}
    return settings | {"added_tokens_decoder": added}


def special_tokens_map(settings: dict) -> dict[str, str]:
    """Return name -> text of bos_token, eos_token, ...; files spell them "<s>" or {"content": "<s>", ...}.

    The order is that in which transformers assigns ids to new tokens.
    """
    names = (*SPECIAL_TOKEN_NAMES, *settings)
    tokens = {name: settings.get(name) for name in names if name.endswith("_token")}
    for extra in map(settings.get, EXTRA_TOKEN_KEYS):
        tokens |= extra if isinstance(extra, dict) else {}
    texts = {name: _text(token) for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}


def listed_tokens(settings: dict) -> list[str]:
    """Return the texts of the special tokens in lists of the settings."""
    lists = (tokens for tokens in map(settings.get, EXTRA_TOKEN_KEYS) if isinstance(tokens, list))
    return [text for tokens in lists for text in map(_text, tokens) if text]


def _text(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token


def add_tokens(
    model: tokenizers.Tokenizer, settings: dict, path: Path
) -> tuple[int, dict[int, AddedToken]]:
    """Add the tokens of the settings to the tokenizer of a file, and set the flags of its existing tokens.

    Returns one more than the highest id, and id -> token of the added tokens. Raises InputError on
    ids that are too high.
    """
    new = _set_flags(model, settings)
    tokens, added = {i: token for token, i in model.get_vocab().items()}, model.get_added_tokens_decoder()
    # The library assigns consecutive ids from here on, so fillers take the unused ids.
    first_free = max(model.get_vocab_size(with_added_tokens=False), 1 + max(added, default=-1))
    placed = {i: token for i, token in new if i >= first_free and i not in tokens}
    highest = max([*tokens, *placed])
    without_id = [token for i, token in new if placed.get(i) is not token]
    placed |= dict(enumerate(without_id, highest + 1))
    tokens |= {i: token.content for i, token in placed.items()}
    size, nonce = 1 + max(tokens), secrets.token_hex(8)
    if size - len(tokens) > MAX_GAPS:
        raise InputError(f"{path}: {len(tokens):,} tokens have ids up to {size - 1:,}; expected at most"
                         f" {MAX_GAPS:,} gaps")
    fillers = (AddedToken(f"\ue000{nonce}-{i}\ue001", normalized=False) for i in range(first_free, size))
    model.add_tokens([placed.get(i, filler) for i, filler in enumerate(fillers, first_free)])
    return size, added | placed


def _set_flags(model: tokenizers.Tokenizer, settings: dict) -> list[tuple[int, AddedToken]]:
    """Apply the flags of the settings to tokens of the file. Returns ids and tokens of the settings only.

    A token is special if the file or the settings say so, or if the settings only name or list it. The id of
    a new token is -1 if the settings give none. Lists do not change flags.
    """
    known, changed, new = model.get_added_tokens_decoder(), [], []
    decoder = {token.content: (i, token) for i, token in settings["added_tokens_decoder"].items()}
    named = special_tokens_map(settings).values()
    for content in filter(None, dict.fromkeys((*decoder, *named, *listed_tokens(settings)))):
        (i, from_settings), known_id = decoder.get(content, (-1, None)), model.token_to_id(content)
        old = known.get(known_id)
        token = from_settings or old or AddedToken(content, special=True)
        token.special |= content in named or bool(old and old.special)
        if known_id is None:
            new.append((i, token))
        elif token is old or repr(token) != repr(old):
            changed.append(token)
    model.add_tokens(changed)
    return sorted(new, key=lambda pair: pair[0])


def decoder_of(model: tokenizers.Tokenizer, path: Path) -> tuple[bool, bool, bool]:
    """Return how the tokens of a tokenizer.json spell bytes.

    Three values: whether it is byte-level; whether <0xE2> is a byte; whether encoding puts a space before the
    first word, which decoding removes. Raises InputError on other decoders.
    """
    decoder = json.loads(model.decoder.__getstate__()) if model.decoder else {"decoders": []}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    byte_level = set(steps) == {"ByteLevel"}
    supported = byte_level or (
        steps and steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
    if not supported or steps.get("Replace", {}).get("pattern", {"String": SPACE}) != {"String": SPACE}:
        name = "+".join(steps) or "none"
        raise InputError(f"{path}: decoder {name} is neither byte-level nor sentencepiece's")
    prepend_scheme = steps.get("Metaspace", {}).get("prepend_scheme", "never")
    return byte_level, "ByteFallback" in steps, "Strip" in steps or prepend_scheme != "never"


class Template(NamedTuple):
    """A chat template, None if there is none, and its file."""

    text: str | None
    file: Path


def read_templates(folder: Path, settings: dict) -> tuple[Template, Template]:
    """Return the chat templates of a folder, without and with tools; the same one twice if it has only one.

    settings: see `tokenizer_settings`. Raises InputError if a file is damaged.
    """
    file_name = next((name for name in TEMPLATE_FILES if has(folder, name)), None)
    file = folder / (file_name or "tokenizer_config.json")
    if file.suffix == ".jinja":
        content = read_text(file)
    else:
        content = (read_json(file) if file_name else settings).get("chat_template")
    # [{"name": "default", "template": ...}, {"name": "tool_use", ...}], or {name: template}
    templates = {x["name"]: x["template"] for x in content} if isinstance(content, list) else content
    by_name = templates if isinstance(templates, dict) else {"default": templates}
    text = by_name.get("default", next(iter(by_name.values()), None))
    for_tools = Template(by_name.get("tool_use", text), file)
    for name in TOOL_TEMPLATES:
        if has(folder, name):
            for_tools = Template(read_text(folder / name), folder / name)
    return (for_tools if text is None else Template(text, file)), for_tools
