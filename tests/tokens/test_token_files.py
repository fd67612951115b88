"""Files that say the same thing about tokens, and those that contradict each other: one rule decides.

Right values: transformers 5.23. It does not read the lists of special_tokens_map.json; we do.
"""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tokenizers import CHATML, write_byte_tokenizer

from tokens.convert import copy_files
from tokens.tokenizer import Tokenizer, byte_alphabet

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
MAP = {"special_tokens_map": {"eos_token": END}}


def special(**tokens: str) -> dict:
    """added_tokens_decoder of special tokens: i257="x" is the token x with id 257."""
    return {name[1:]: {"content": token, "special": True} for name, token in tokens.items()}


def write(folder: Path, **files: dict | None) -> Path:
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def folder_of(folder: Path, config: dict, added: dict[str, bool | None], **files: dict) -> Path:
    """A folder whose ids 0 to 255 are bytes. added: more tokens of its tokenizer.json, and whether special;
    None: it is one of the vocabulary.

    config: its tokenizer_config.json. files: others, by name.
    """
    write_byte_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    tokens = {TEXT_END: True} | added
    content["added_tokens"] = [
        content["added_tokens"][0] | {"id": 256 + n, "content": token, "special": special}
        for n, (token, special) in enumerate(tokens.items()) if special is not None]
    content["model"]["vocab"] |= {t: 256 + n for n, t in enumerate(tokens) if None in tokens.values()}
    config = {"eos_token": TEXT_END, "chat_template": CHATML} | config
    return write(folder, tokenizer=content, tokenizer_config=config, **files)


@pytest.mark.parametrize("added, config, files, count, text, control", [
    # A token is special if any file makes it so.
    ({START: False, END: False}, {"added_tokens_decoder": special(i257=START, i258=END)}, {}, 21, "bc",
     {START, END}),
    ({START: False, END: False}, {"eos_token": END, "added_tokens_decoder": {"258": {"content": END}}}, {},
     21, f"{START}bc", {END}),
    # Tokens that only the settings have: with their id, or after the last.
    ({}, {"additional_special_tokens": [START, {"content": END}]}, {}, 21, "bc", {START, END}),
    ({}, {"extra_special_tokens": {"start": START, "end": END}}, {}, 21, "bc", {START, END}),
    ({}, {}, {"added_tokens": {START: 257, END: 258}}, 21, f"{START}b{END}c", set()),
    ({}, {}, {"added_tokens": {START: 257, END: 258},
              "special_tokens_map": {"eos_token": END, "additional_special_tokens": [START]}},
     21, "bc", {START, END}),
    # Names under any key make tokens special, and so do lists: tokens of the vocabulary too.
    ({START: None, END: None}, {"start_token": START, "image_token": END}, {}, 21, "bc", {START, END}),
    ({START: None, END: None}, {"additional_special_tokens": [START, END]}, {}, 21, "bc", {START, END}),
    # A list changes no flag of an added token of the encoder.
    ({START: False, END: False}, {"additional_special_tokens": [START, END]}, {}, 21, f"{START}b{END}c",
     set()),
    # A name that no file gives an id.
    ({START: True, END: True}, {"pad_token": "<pad>"}, {}, 21, "bc", {START, END, "<pad>"}),
    # added_tokens.json is older than added_tokens_decoder, and tokenizer_config.json without the latter is
    # older than special_tokens_map.json.
    ({}, {"added_tokens_decoder": {}}, {"added_tokens": {START: 257, END: 258}, **MAP}, 52, "bc", set()),
    ({}, {"eos_token": None, "added_tokens_decoder": {}}, MAP, 43, "bc", {END}),
    ({}, {"eos_token": "<x>"}, MAP, 43, "bc", {END}),
])
def test_tokens_of_any_file(tmp_path, added, config, files, count, text, control):
    tok = Tokenizer.load(folder_of(tmp_path, config, added, **files))
    ids = tok.chat([{"role": "user", "content": "hi"}])
    assert len(ids) == count and tok.decode([257, ord("b"), 258, ord("c")]) == text
    assert tok.control.keys() == {TEXT_END} | control
    assert not control or tok.control.keys().isdisjoint(map(tok.decode, [[i] for i in tok.encode(END)]))


@pytest.mark.parametrize("files, new, stops", [
    ({"tokenizer_config": {"eos_token": "<sep>", "added_tokens_decoder": {}}}, {}, [3, 2]),
    # The encoder's id counts.
    ({"tokenizer_config": {"added_tokens_decoder": special(i530="<sep>")}}, {}, [2]),
    # New ones come after the last one. The text after them has one space, however it begins.
    ({"special_tokens_map": {"eos_token": END, "pad_token": "<pad>", "cls_token": {"content": ""},
                             "additional_special_tokens": [START, "<sep>"]}, "tokenizer_config": {}},
     {END: 520, "<pad>": 521, START: 522}, [520, 2]),
])
def test_tokens_that_the_settings_make_special_in_sentencepiece(sp, tmp_path, files, new, stops):
    """A model may have them as text."""
    copy_files(sp, tmp_path)
    assert Tokenizer.load(sp).encode("<sep>", bos=False)[-1] == 3 and 3 not in Tokenizer.load(sp).control
    tok = Tokenizer.load(write(tmp_path, **files))
    assert new.items() < tok.control.items() and tok.vocab_size == 520 + len(new)
    assert tok.control["<sep>"] == 3 and tok.stop_ids == stops
    ids = tok.encode("a<sep>b", bos=False)
    assert 3 not in ids and tok.decode([*ids, 3]) == "a<sep>b"
    for text in ("the fox", " the fox"):
        ids = tok.encode(f"a <sep>{text}", parse_special=True)
        assert ids == tok.encode("a ") + [3] + tok.encode("the fox", bos=False)


def test_ids_with_gaps(tmp_path):
    """Right values: tokenizers 0.23, which numbers added tokens itself."""
    folder = folder_of(tmp_path, {"eos_token": "<|end|>"}, {"<|end|>": True, "<think>": False})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"he": 256, "ll": 300, "hell": 301, "hello": 310}
    content["model"]["merges"] = ["h e", "l l", "he ll", "hell o"]
    end, think = content["added_tokens"][1:]
    content["added_tokens"] = [end | {"id": 500}, think | {"id": 510}]
    tok = Tokenizer.load(write(folder, tokenizer=content))
    assert tok.encode("hello<think> hell") == [310, 261, 32, 301]
    assert tok.decode([310, 261, 32, 301, 305]) == "hello<think> hell"
    assert (tok.vocab_size, tok.stop_ids) == (311, [260])


@pytest.mark.parametrize("more, model, config, id_, ids", [
    ({}, {"model_type": "qwen2"}, None, 258, [256, 257, 78]),
    ({TEXT_END: 258}, {"model_type": "gpt2"}, None, 258, [256, 257, 78]),
    ({TEXT_END: 258}, {"model_type": "qwen3_moe"}, {"tokenizer_class": "Other"}, 258, [256, 257, 78]),
    ({}, None, {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": END,
                "added_tokens_decoder": special(i258=END)}, 259, [256, 257, 78]),
    ({}, {"model_type": "qwen2"}, {"add_prefix_space": True}, 258, [220, 256, 257, 78]),
])
def test_vocab_json_and_merges(tmp_path, more, model, config, id_, ids):
    """The end of text is a control token of these classes, whether a file names it or not."""
    source, copy = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    copy.mkdir()
    vocab = {c: i for i, c in enumerate(sorted(byte_alphabet()))} | {"he": 256, "ll": 257} | more
    write(source, vocab=vocab, config=model, tokenizer_config=config)
    assert Tokenizer.load(source) is None  # of no use without merges
    (source / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    assert copy_files(source, copy)
    for tok in map(Tokenizer.load, (source, copy)):
        assert tok.control[TEXT_END] == id_ and id_ in tok.stop_ids and tok.decode([id_]) == ""
        assert tok.encode("hello") == ids and tok.special_tokens_map["unk_token"] == TEXT_END
        assert (tok.encode("e\u0301 12") == tok.encode("\u00e9 12")) is (model != {"model_type": "gpt2"})
        assert tok.encode(f"o{TEXT_END}", parse_special=True)[-1] == id_
