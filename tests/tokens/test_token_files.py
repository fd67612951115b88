"""Files that say the same thing about tokens, and those that contradict each other: one rule decides.

Right values: transformers 5.23. It does not read the lists of special_tokens_map.json; we do.
"""
from __future__ import annotations

import json
import shutil

import pytest
from helpers.tokenizers import CHATML, write_byte_tokenizer

from common.errors import InputError
from tokens.backends import byte_alphabet
from tokens.grammar import Grammars
from tokens.tokenizer import Tokenizer, copy_files

START, END = "<|im_start|>", "<|im_end|>"
CHAT = [{"role": "user", "content": "hi"}]


def special(**tokens: str) -> dict:
    """added_tokens_decoder of special tokens: i257="x" is the token x with id 257."""
    return {name[1:]: {"content": token, "special": True} for name, token in tokens.items()}


def folder_of(tmp_path, config: dict, added: dict[str, bool | None] | None = None, **files: dict):
    """A folder whose ids 0 to 255 are bytes. added: more tokens of its tokenizer.json, and whether special;
    None: it is one of the vocabulary.

    config: its tokenizer_config.json. files: others, by name.
    """
    write_byte_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = {"<|endoftext|>": True} | (added or {})
    content["added_tokens"] = [{"id": 256 + n, "content": t, "special": special, **flags}
                               for n, (t, special) in enumerate(tokens.items()) if special is not None]
    content["model"]["vocab"] |= {t: 256 + n for n, t in enumerate(tokens) if None in tokens.values()}
    config = {"eos_token": "<|endoftext|>", "chat_template": CHATML} | config
    for name, data in {"tokenizer": content, "tokenizer_config": config, **files}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


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
    ({}, {"start_token": START, "image_token": END}, {}, 21, "bc", {START, END}),
    ({START: None, END: None}, {"additional_special_tokens": [START, END]}, {}, 21, "bc", {START, END}),
    # A list changes no flag of an added token of the encoder.
    ({START: False, END: False}, {"additional_special_tokens": [START, END]}, {}, 21, f"{START}b{END}c",
     set()),
    # A name that no file gives an id.
    ({START: True, END: True}, {"pad_token": "<pad>"}, {}, 21, "bc", {START, END, "<pad>"}),
    # added_tokens.json is older than added_tokens_decoder.
    ({}, {"added_tokens_decoder": {}}, {"added_tokens": {START: 257, END: 258}}, 52, "bc", set()),
])
def test_tokens_of_any_file(tmp_path, added, config, files, count, text, control):
    tok = Tokenizer.load(folder_of(tmp_path, config, added, **files))
    ids = tok.chat(CHAT)
    assert len(ids) == count and tok.decode([257, ord("b"), 258, ord("c")]) == text
    assert tok.control.keys() == {"<|endoftext|>"} | control
    assert not control or tok.control.keys().isdisjoint(map(tok.decode, [[i] for i in tok.encode(END)]))


@pytest.mark.parametrize("config, special_map, eos", [
    ({"eos_token": END}, {"eos_token": "<|endoftext|>"}, "<|endoftext|>"),  # the config is older
    ({"eos_token": END, "added_tokens_decoder": {}}, {"eos_token": "<|endoftext|>"}, END),
    ({"eos_token": None, "added_tokens_decoder": {}}, {"eos_token": {"content": END}}, END),
])
def test_special_tokens_map_or_tokenizer_config(tmp_path, config, special_map, eos):
    folder = folder_of(tmp_path, config, {START: True, END: True}, special_tokens_map=special_map)
    tok = Tokenizer.load(folder)
    assert tok.special_tokens_map["eos_token"] == eos
    assert tok.stop_ids == {END: [258, 256], "<|endoftext|>": [256, 258]}[eos]


@pytest.mark.parametrize("config", [
    {"eos_token": "<sep>", "added_tokens_decoder": {}},
    {"added_tokens_decoder": {"530": {"content": "<sep>", "special": True}}},  # the encoder's id counts
])
def test_pieces_that_the_settings_make_special(sp, tmp_path, config):
    """A sentencepiece model may have them as text."""
    copy_files(sp, tmp_path)
    assert Tokenizer.load(sp).encode("<sep>", bos=False)[-1] == 3 and 3 not in Tokenizer.load(sp).control
    old = json.loads((sp / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(old | config))
    tok = Tokenizer.load(tmp_path)
    assert tok.control["<sep>"] == 3 and tok.stop_ids == ([3, 2] if "eos_token" in config else [2])
    ids = tok.encode("a<sep>b", bos=False)
    assert 3 not in ids and tok.decode([*ids, 3]) == "a<sep>b"
    assert tok.encode("a<sep>b", parse_special=True).count(3) == 1


def test_special_tokens_that_only_their_names_give_to_sentencepiece(sp, tmp_path):
    """They come after the last one. The text after them has one space, however it begins."""
    copy_files(sp, tmp_path)
    names = {"eos_token": END, "pad_token": "<pad>", "cls_token": {"content": ""},
             "additional_special_tokens": [START, "<sep>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tok = Tokenizer.load(tmp_path)
    assert {END: 520, "<pad>": 521, START: 522}.items() < tok.control.items() and tok.vocab_size == 523
    assert tok.stop_ids == [520, 2] and tok.control["<sep>"] == 3
    for text in ("the fox", " the fox"):
        ids = tok.encode(f"a {END}{text}", parse_special=True)
        assert ids == tok.encode("a ") + [520] + tok.encode("the fox", bos=False)


def test_ids_with_gaps(tmp_path):
    """Right values: tokenizers 0.23, which numbers added tokens itself."""
    alphabet = {c: i for i, c in enumerate(sorted(byte_alphabet()))}
    model = {
        "type": "BPE", "vocab": alphabet | {"he": 256, "ll": 300, "hell": 301, "hello": 310},
        "merges": ["h e", "l l", "he ll", "hell o"],
    }
    folder = folder_of(tmp_path, {"eos_token": "<|end|>"}, {"<|end|>": True, "<think>": False})
    content = json.loads((folder / "tokenizer.json").read_text())
    content |= {"model": model, "added_tokens": content["added_tokens"][1:]}
    content["pre_tokenizer"]["use_regex"] = True
    for i, token in zip((500, 510), content["added_tokens"]):
        token["id"] = i
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tok = Tokenizer.load(folder)
    assert tok.encode("hello <think> hell") == [310, 220, 261, 220, 301]
    assert tok.decode([310, 220, 261, 220, 301, 305]) == "hello <think> hell"
    assert (tok.vocab_size, tok.stop_ids) == (311, [260])
    stream = tok.stream()
    assert [stream.push([i]) for i in (310, 261, 301)] == ["hello", "<think>", "hell"]
    guide = Grammars(tok, 512, tok.stop_ids).guide('{"enum": ["hello"]}')
    guide.take(tok.encode('"hello"'))
    assert tok.encode('"hello"')[1] == 310 and guide.error is None


def vocab_json(folder, more: dict | None = None, **files: dict | None):
    """A folder with vocab.json and merges.txt. more: tokens. files: others, by name."""
    folder.mkdir()
    vocab = {c: i for i, c in enumerate(sorted(byte_alphabet()))} | {"he": 256, "ll": 257} | (more or {})
    for name, content in {"vocab": vocab, **files}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    return folder


@pytest.mark.parametrize("config, model", [
    ({"tokenizer_class": "Qwen2TokenizerFast"}, {}),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "qwen3_moe"}),
])
def test_vocab_json_and_merges(tmp_path, config, model):
    with pytest.raises(InputError, match=r"vocab.json: tokenizer_class None .* save the tokenizer as"):
        Tokenizer.load(vocab_json(tmp_path / "unknown"))
    (tmp_path / "unknown" / "merges.txt").unlink()
    assert Tokenizer.load(tmp_path / "unknown") is None  # of no use without merges
    decoder = special(i258="<|endoftext|>", i259=END, i260=START)
    config = config | {"eos_token": END, "added_tokens_decoder": decoder, "chat_template": CHATML}
    source, copy = vocab_json(tmp_path / "in", tokenizer_config=config, config=model), tmp_path / "out"
    copy.mkdir()
    assert copy_files(source, copy)
    shutil.rmtree(source)
    tok = Tokenizer.load(copy)
    assert tok.encode(f"hello {END}", parse_special=True) == [256, 257, 78, 220, 259]
    assert tok.encode("e\u0301 12") == tok.encode("\u00e9 12") and tok.encode("12") == [16, 17]
    assert tok.stop_ids == [259, 258] and tok.chat(CHAT)[0] == 260


@pytest.mark.parametrize("more, kind, config, id_, ids", [
    ({}, "qwen2", None, 258, [256, 257, 78]), ({"<|endoftext|>": 258}, "gpt2", None, 258, [256, 257, 78]),
    ({"<|endoftext|>": 258}, "qwen3", {"eos_token": END}, 258, [256, 257, 78]),
    ({}, "qwen2", {"eos_token": END, "added_tokens_decoder": special(i258=END)}, 259, [256, 257, 78]),
    ({}, "qwen2", {"add_prefix_space": True}, 258, [220, 256, 257, 78]),
])
def test_what_the_class_of_a_vocab_json_adds(tmp_path, more, kind, config, id_, ids):
    """The end of text is a control token of these classes, whether a file names it or not."""
    source = vocab_json(tmp_path / "in", more, config={"model_type": kind}, tokenizer_config=config)
    copy = tmp_path / "out"
    copy.mkdir()
    copy_files(source, copy)
    for tok in map(Tokenizer.load, (source, copy)):
        assert tok.control["<|endoftext|>"] == id_ and id_ in tok.stop_ids and tok.decode([id_]) == ""
        assert tok.encode("hello") == ids and tok.special_tokens_map["unk_token"] == "<|endoftext|>"
