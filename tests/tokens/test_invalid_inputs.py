"""Damaged files and malicious inputs: each raises an InputError of one printable line."""
from __future__ import annotations

import json
import re

import pytest

from common.errors import InputError
from tokens.convert import copy_files
from tokens.dataset import read_prompts, read_questions, row_texts
from tokens.gguf_tokenizer import rebuild
from tokens.grammar import Grammars
from tokens.tokenizer import Tokenizer

JSON, CONFIG, JINJA = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def folder(files: dict, bpe, tmp_path):
    """Load a copy of a tokenizer with changed files: a new text, changed JSON keys, or "" to delete it."""
    copy_files(bpe, tmp_path)
    for name, change in files.items():
        file = tmp_path / name
        data = change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change)
        file.write_text(data) if data else file.unlink()
    message = "x" if "pre_tokenizer" not in files.get(JSON, ()) else "a" * 40 + "b" + "a" * 3000
    Tokenizer.load(tmp_path).chat([{"role": "user", "content": message}])


def content(value, bpe, tmp_path):
    Tokenizer.load(bpe).chat([{"role": "user", "content": value}])


def schema(text: str, bpe, tmp_path):
    Grammars(Tokenizer.load(bpe), 600, [2]).guide(text)


def rows(reader_and_text: tuple, bpe, tmp_path):
    read, text = reader_and_text
    (tmp_path / "rows").write_text(text)
    read(tmp_path / "rows")


def gguf(metadata: dict, bpe, tmp_path):
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a"], "merges": []} | metadata
    rebuild({f"tokenizer.ggml.{key}": value for key, value in fields.items()}, tmp_path, "m.gguf")


# The token does not exist, so the library panics.
MISSING_TOKEN = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}, "single": [
    {"SpecialToken": {"id": "x", "type_id": 0}}]}
# Backtracking on a long text exceeds the library's limit.
SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("load, value, error", [
    (folder, {JSON: "{"}, "tokenizer.json: cannot be read as a tokenizer"),
    (folder, {JSON: "", "tokenizer.model": "x"}, "tokenizer.model: cannot be read as a sentencepiece model"),
    (folder, {JSON: {"post_processor": MISSING_TOKEN}}, "cannot be read as a tokenizer (no entry found"),
    (folder, {JSON: {"decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True}}}, "decoder WordPiece"),
    (folder, {JSON: {"pre_tokenizer": SLOW}}, "tokenizer.json: cannot encode this text (Onig: Regex search"),
    (folder, {CONFIG: '{"added_tokens_decoder": {"a": 1}}'}, "the tokenizer's files are damaged"),
    (folder, {CONFIG: {"added_tokens_decoder": {"9999999": {"content": "<x>"}}}}, "65,536 gaps"),
    (folder, {CONFIG: "{}"}, "no chat template"), (folder, {JINJA: "{% if %}"}, "Expected an expression"),
    (folder, {JSON: "", "vocab.json": "{}", "merges.txt": "\n"}, "tokenizer_class None is not supported"),
    (folder, {JINJA: "{{ messages.__class__.__mro__ }}"}, "unsafe"),
    (folder, {JINJA: "{{ messages.append(1) }}"}, "chat_template.jinja: chat template: "),
    (folder, {JINJA: "{{ raise_exception('\x1b[2Jonly\nuser') }}"}, r"chat template: \x1b[2Jonly user"),
    (content, [{"type": "image_url", "image_url": {}}], "messages: 'image_url' is not text"),
    (content, [{"type": "text"}], "is not text"), (content, 3, "messages: 3 is not text"),
    (content, [{"type": "thinking", "thinking": 3}], "is not text"),
    (schema, '{"$ref": "#"}', "cannot be satisfied"),  # compiles, but fails at the first mask
    (schema, '{"type": "no such type"}', "cannot be used"), (schema, "{", "the JSON schema: cannot be read"),
    (schema, '{"description": "' + "x" * (1 << 16) + '"}', "characters, at most 65,536"),
    (gguf, {"pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported"),
    (gguf, {"model": "bert"}, "m.gguf: the tokenizer cannot be rebuilt; convert"),
    (gguf, {"merges": ["no such"]}, "cannot be rebuilt"), (gguf, {"tokens": ["a", "a"]}, "duplicate tokens"),
    (rows, (read_prompts, '{"turns": ["a"]}\n{"turns": [3]}\n'), "rows: line 2: no user turns"),
    (rows, (read_prompts, "x\n"), "line 1: cannot be read as JSON"), (rows, (read_prompts, ""), "no prompts"),
    (rows, (read_prompts, '{"messages": [{"role": "robot", "content": "x"}]}'), "unknown role 'robot'"),
    (rows, (read_prompts, '{"messages": [{"content": [{"type": "image"}]}]}'), "has no prompts"),
    (rows, (read_prompts, '{"text": "a"}'), "line 1: no conversation"),
    (rows, (read_questions, '{"prompt": "a"}\n{"messages": []}'), "no question in 1 row"),
    (rows, (lambda file: row_texts("line 1", {"title": "x"}), ""), "line 1: no conversation"),
], ids=lambda x: x.__name__ if callable(x) else "")
def test_errors_are_one_line(load, value, error, bpe, tmp_path):
    with pytest.raises(InputError, match=re.escape(error)) as e:
        load(value, bpe, tmp_path)
    assert str(e.value).isprintable()
