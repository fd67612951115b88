"""Rebuild a tokenizer from the metadata of a GGUF file.

GGUF stores the vocabulary, merges or scores, token types, the chat template, and the name of the
pre-tokenization rule (`tokens.word_rules`).
"""
from __future__ import annotations

import contextlib
import json
import re
from itertools import product
from pathlib import Path

from tokenizers import AddedToken

from common.errors import InputError, library_errors
from tokens.calls import TAGS
from tokens.convert import END_TOKENS
from tokens.files import Template
from tokens.tokenizer import render_template
from tokens.word_rules import GEMMA4, WORD_RULES, byte_level_bpe

# The values of tokenizer.ggml.token_type: those of sentencepiece's piece types. 0: undefined.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Control tokens in any model.
CONTROL_NAMES = {*END_TOKENS, "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>"}
# A marker, such as <|user|>, has letters or digits between punctuation. Tags of reasoning and tool calls look
# the same, but are text.
MARKER = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
TAG = re.compile(r"</?(?!(?:s|system|human|user|bot|assistant)>)([\w:-]+)>")
# GGUF has no flags for control tokens that strip adjacent white space; model names imply them.
STRIPPING = {  # pattern of "architecture model rule" -> sides; first match wins
    r"^phi3 .* dbrx$": ("lstrip", "rstrip"), r"^phi3|^phimoe|phi[ -]?3": ("rstrip",)}
NOT_STRIPPING = {"<unk>", "<s>", "<|endoftext|>"}
# Conversations to render in order to find markers. Several, as a template may reject roles or their order.
PROBES = [[{"role": role, "content": "x"} for role in roles] for roles in (
    ("system",), ("user",), ("user", "assistant"), ("user", "assistant", "tool"))]


def rebuild(fields: dict, folder: str | Path, where: str = "GGUF", added: str | None = None) -> bool:
    """Write tokenizer.json or tokenizer.model, tokenizer_config.json and chat templates into `folder`.

    fields: metadata key -> plain value ("tokenizer.ggml.tokens" -> list of str, ...). where: file name for
    error messages. added: a chat template that the caller will write. Returns False if there are no tokens.
    Raises InputError if they are damaged, or the tokenizer's type is not supported.
    """
    folder, prefix = Path(folder), "tokenizer.ggml."
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    if not metadata.get("tokens"):
        return False
    keys = {"chat_template.jinja": "chat_template", "tool_use.jinja": "chat_template.tool_use"}
    templates = {name: fields.get(f"tokenizer.{key}") or "" for name, key in keys.items()}
    with library_errors(f"{where}: the tokenizer cannot be rebuilt; convert the Hugging Face folder instead"):
        settings = _write(metadata, [text for text in (*templates.values(), added) if text], folder)
        names = (fields.get("general.architecture"), fields.get("general.name"), metadata.get("pre"))
        settings |= _stripping(" ".join(map(str, names)).lower(), metadata)
        config = json.dumps(settings, ensure_ascii=False, indent=2)
        for name, text in {**templates, "tokenizer_config.json": config}.items():
            if text:
                (folder / name).write_text(text, encoding="utf-8")
    return True


def _stripping(names: str, metadata: dict) -> dict:
    """Return the settings of control tokens that strip white space. names: see `STRIPPING`."""
    sides = next((sides for pattern, sides in STRIPPING.items() if re.search(pattern, names)), ())
    return {"added_tokens_decoder": {
        i: {"content": token, "special": True, "normalized": False, **dict.fromkeys(sides, True)}
        for i, (token, type_) in enumerate(zip(metadata["tokens"], metadata["token_type"]))
        if type_ == CONTROL and (len(sides) > 1 or token not in NOT_STRIPPING)}} if sides else {}


def _types(metadata: dict, templates: list[str]) -> list[int]:
    """Return the type of each token.

    GGUF writers are not consistent about control tokens. A token of any type is a control token if it is an
    end token of the metadata, has a well-known name, or is a marker in a template. A token that merges
    produce is a word. Tags in a template are text.
    """
    tokens, ends = metadata["tokens"], {metadata.get(f"{name}_token_id") for name in ("eos", "eot", "eom")}
    text, vocabulary = _template_texts(templates), {*tokens}
    merged = {merge.replace(" ", "") for merge in metadata.get("merges", ())}
    # In vocabularies with HTML tags, </s> is a word unless <s> is the BOS token.
    if (bos := metadata.get("bos_token_id")) is not None and "<s>" in vocabulary and tokens[bos] != "<s>":
        merged.add("</s>")
    names = CONTROL_NAMES - merged | {token for i, token in enumerate(tokens) if i in ends}

    def is_word(token: str) -> bool:
        halves = () if merged else ((token[:i], token[i:]) for i in range(1, len(token)))
        return token in merged or any(vocabulary.issuperset(pair) for pair in halves)

    def type_of(token: str, type_: int) -> int:
        if token in names:
            return CONTROL
        marker = MARKER.fullmatch(token.strip()) and token in text
        if marker and (type_ == USER_DEFINED or not is_word(token)):
            tag = TAG.fullmatch(token)
            is_text = tag and (token in TAGS or vocabulary.issuperset((f"<{tag[1]}>", f"</{tag[1]}>")))
            return CONTROL if not is_text else USER_DEFINED if type_ in (0, NORMAL) else type_
        return NORMAL if type_ == 0 or (type_ == UNUSED and token in merged) else type_

    return list(map(type_of, tokens, metadata["token_type"]))


def _template_texts(templates: list[str]) -> str:
    """Return the templates and rendered conversations: some templates compose markers from parts."""
    texts = list(templates)
    for template, probe in product(templates, PROBES):
        with contextlib.suppress(InputError):
            texts.append(render_template(Template(template, Path()), probe, {}))
    return "\n".join(texts)


def _write(metadata: dict, templates: list[str], folder: Path) -> dict:
    """Write the tokenizer model file. Returns the settings. Raises ValueError."""
    model = metadata.get("model")
    if model not in WRITERS:
        raise ValueError(f"tokenizer model {model!r} is not supported ({' and '.join(WRITERS)} are)")
    write = WRITERS[model]
    tokens = metadata["tokens"]
    metadata.setdefault("token_type", [NORMAL] * len(tokens))
    if len({*tokens}) < len(tokens):
        raise ValueError("duplicate tokens")
    metadata["token_type"] = _types(metadata, templates)
    settings = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (i := metadata.get(f"{key}_token_id")) is not None:
            settings[f"{name}_token"] = tokens[i]
    return settings | {"add_bos_token": write(metadata, folder)}


def _write_bpe(metadata: dict, folder: Path) -> bool:
    """Write the tokenizer.json of a byte-level BPE. Returns whether a text starts with BOS."""
    name, tokens = metadata.get("pre"), metadata["tokens"]
    rules = {name: GEMMA4} if metadata["model"] == "gemma4" else WORD_RULES
    if name not in rules:
        raise ValueError(f"tokenizer.ggml.pre {name!r} is not supported ({', '.join(WORD_RULES)} are)")
    rule = rules[name]
    typed = list(zip(tokens, metadata["token_type"], strict=True))
    vocab = {token: i for i, (token, type_) in enumerate(typed) if type_ != UNUSED}
    # Splitting is safe: merges are in the byte alphabet, which has no space.
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    model = byte_level_bpe(vocab, merges, rule)
    # A single call: each call rebuilds the library's index.
    model.add_tokens([AddedToken(token, special=type_ == CONTROL, normalized=False)
                      for token, type_ in typed if type_ in (CONTROL, USER_DEFINED)])
    model.save(str(folder / "tokenizer.json"))
    return "bos_token_id" in metadata and bool(metadata.get("add_bos_token", rule.add_bos))


def _write_sentencepiece(metadata: dict, folder: Path) -> bool:
    """Write the tokenizer.model of a sentencepiece BPE. Returns whether a text starts with BOS."""
    from sentencepiece import sentencepiece_model_pb2 as spm

    tokens, types = metadata["tokens"], [*metadata["token_type"]]
    unknown = metadata.get("unknown_token_id", 0 if UNKNOWN not in types else types.index(UNKNOWN))
    types[unknown] = UNKNOWN  # Gemma's has type CONTROL; the library needs a piece of type UNKNOWN
    # llama.cpp writes user-defined runs of spaces (Gemma) as spaces, sentencepiece as ▁.
    tokens = [token.replace(" ", "▁") if type_ == USER_DEFINED else token
              for token, type_ in zip(tokens, types)]
    pieces = [spm.ModelProto.SentencePiece(piece=token, score=score, type=type_)
              for token, score, type_ in zip(tokens, metadata["scores"], types, strict=True)]
    special = {"bos": metadata.get("bos_token_id", 1), "eos": metadata.get("eos_token_id", 2),
               "unk": unknown}
    trainer = spm.TrainerSpec(
        model_type=spm.TrainerSpec.BPE, vocab_size=len(tokens), byte_fallback=BYTE in types,
        pad_id=metadata.get("padding_token_id", -1), **{f"{name}_id": i for name, i in special.items()},
        **{f"{name}_piece": tokens[i] for name, i in special.items()})
    normalizer = spm.NormalizerSpec(name="identity", remove_extra_whitespaces=False, escape_whitespaces=True,
                                    add_dummy_prefix=metadata.get("add_space_prefix", True))
    proto = spm.ModelProto(pieces=pieces, trainer_spec=trainer, normalizer_spec=normalizer)
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    return bool(metadata.get("add_bos_token", True))


WRITERS = {"gpt2": _write_bpe, "gemma4": _write_bpe, "llama": _write_sentencepiece}  # by tokenizer.ggml.model
