"""Files of a tokenizer in a checkpoint folder: their names, their keys, and the settings that they give.

A file that holds tokens or settings of a tokenizer is read here, except the encoder's own
(`tokens.backends`) and the chat template (`tokens.templates`).
"""
from __future__ import annotations

import os
from pathlib import Path

from tokenizers import AddedToken

from common.files import read_json

ENCODERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # the first that exists is used
MERGES, ADDED = "merges.txt", "added_tokens.json"  # the former stands beside vocab.json
SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# For conversations with tools: where transformers looks for it, and in converted folders, which are flat.
TOOL_TEMPLATES = ("additional_chat_templates/tool_use.jinja", "tool_use.jinja")
# vocab.json is copied as a tokenizer.json.
COPIED = (*ENCODERS[:2], ADDED, *SETTINGS, *TEMPLATE_FILES, *TOOL_TEMPLATES)
TOKENIZER_FILES = (*COPIED, ENCODERS[2], MERGES)
# Tokens that end a turn or a text, in any model. A GGUF stores one eos id and some repositories declare only
# one, yet a chat model may also emit the base model's end of text. Without that id the text never stops.
END_OF_MESSAGE, END_OF_ANSWER = "<|end|>", "<|return|>"  # a model that has both ends thoughts with the first
END_TOKENS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", END_OF_MESSAGE, "<|eot|>",
    "<|EOT|>", "<|eos|>", "<|end_of_turn|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>",
    "<turn|>", "<end_of_utterance>", "<EOT>", "\u2581<EOT>", "<eot>", "<eos>", "</s>", "[EOT]", "[EOS]",
    END_OF_ANSWER, "<|call|>", "<|calls|>", "<|flush|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
# Settings of the classes of tokenizers, where their files lack them, as transformers 5 has them.
DEFAULTS = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}  # of those with a vocab.json
LLAMA_DEFAULTS = {"add_bos_token": False, "legacy": False}
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")
TOKEN_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


def has(folder: Path, name: str) -> bool:
    """Return whether a folder has an entry of this name. A dangling link counts, so that reading it fails."""
    return os.path.lexists(folder / name)


def encoder_of(folder: Path) -> str | None:
    """Return the name of the file that text is encoded with, None if the folder has no tokenizer."""
    found = next((name for name in ENCODERS if has(folder, name)), None)
    return found if found != "vocab.json" or has(folder, MERGES) else None


def tokenizer_settings(folder: Path) -> dict:
    """Return the merged keys of the settings files, without those that are null. Raises InputError.

    A tokenizer_config.json that has `added_tokens_decoder` is complete, and special_tokens_map.json gives
    what it lacks. Without that key it is older: special_tokens_map.json overrides it, and added_tokens.json
    gives `added_tokens_decoder`, which is id -> token here. The class of the tokenizer has defaults.
    """
    def read(name: str) -> dict:
        found = read_json(folder / name) if has(folder, name) else {}
        return {key: value for key, value in found.items() if value is not None}

    special, config = map(read, SETTINGS)
    encoder = encoder_of(folder)
    kind = config.get("tokenizer_class", "") if encoder == "tokenizer.model" else ""
    is_llama = kind.startswith("LlamaTokenizer")
    config = (DEFAULTS if encoder == "vocab.json" else LLAMA_DEFAULTS if is_llama else {}) | config
    if kind.startswith("CodeLlamaTokenizer"):  # it has no older form
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

    Names come in the order of transformers, which numbers new tokens so.
    """
    given = {name: settings.get(name) for name in (*NAMES, *settings) if name.endswith("_token")}
    for found in map(settings.get, EXTRA):
        given |= found if isinstance(found, dict) else {}
    texts = {name: _text(token) for name, token in given.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}


def listed_tokens(settings: dict) -> list[str]:
    """Return the texts of the special tokens that stand in lists of the settings."""
    lists = (found for found in map(settings.get, EXTRA) if isinstance(found, list))
    return [text for found in lists for text in map(_text, found) if text]


def _text(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token
