"""Encoding and decoding equal those of the libraries; streamed text equals decoded text."""
from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from helpers.tokenizers import CHATML, CORPUS, json_library, sentencepiece_library, write_byte_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from drafters.draft_model import same_ids
from tokens.convert import copy_files, stop_ids
from tokens.tokenizer import Tokenizer, byte_alphabet


def test_json_equals_the_library(bpe):
    tok, library = Tokenizer.load(bpe), json_library(bpe)
    assert (tok.vocab_size, tok.bos_id, tok.has_template) == (library.get_vocab_size(), 0, True)
    for text in (*CORPUS, "".join(CORPUS), "", "a   b</think>c"):
        ids = tok.encode(text)
        assert ids == library.encode(text).ids and tok.decode(ids) == text
        assert tok.encode(text, bos=False) == library.encode(text, add_special_tokens=False).ids
    rendered = "<|im_start|>user\n 12  <|im_end|>\n" + CORPUS[3] + "<|im_end|><|endoftext|>"
    for text in (rendered, "<|endoftext|>x"):
        expected = library.encode(text, add_special_tokens=False).ids
        assert tok.encode(text, bos=False, parse_special=True) == expected
    assert tok.encode("<|endoftext|>x", parse_special=True) == expected  # the text already starts with BOS
    rng = random.Random(1)  # also with invalid UTF-8
    for _ in range(200):
        ids = [rng.randrange(tok.vocab_size) for _ in range(40)]
        assert tok.decode(ids) == library.decode(ids)
    assert tok.decode([1, *tok.encode("fox", bos=False), 2, tok.vocab_size]) == "fox"


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_json_with_metaspace_equals_the_library(tmp_path, scheme):
    """Metaspace's prepend_scheme decides where a space is inserted: first, or also after control tokens."""
    model = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    alphabet = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *alphabet], limit_alphabet=60,
        show_progress=False)
    model.train_from_iterator(CORPUS, trainer)
    spec = json.loads(model.to_str())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    model = tokenizers.Tokenizer.from_str(json.dumps(spec))
    model.save(str(tmp_path / "tokenizer.json"))
    tok, text = Tokenizer.load(tmp_path), "<s>The fox</s> dog<s> x"
    assert tok.encode(text, bos=False, parse_special=True) == model.encode(text, add_special_tokens=False).ids
    for text in CORPUS:
        ids = tok.encode(text)
        assert ids == model.encode(text).ids and tok.decode(ids) == text == model.decode(ids)


FLAGS = "special", "lstrip", "rstrip", "single_word", "normalized"
NORMALIZERS = None, normalizers.NFC(), normalizers.Lowercase(), normalizers.Sequence(
    [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


@pytest.mark.parametrize("seed", range(40))
def test_flags_of_added_tokens_equal_the_library(seed, tmp_path):
    """Overlapping tokens with random flags, in prompts, plain text, and a template around a message."""
    rng, folder = random.Random(seed), tmp_path
    vocab = {t: i for i, t in enumerate(("<unk>", "▁", *(f"<0x{b:02X}>" for b in range(256)), *"<>|adorwy"))}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    library.normalizer, library.decoder = NORMALIZERS[seed % 4], decoders.Replace("▁", " ")
    contents = ["<s>", "<s>>", "<<s>", "<S>", "s>", "<|a|>", "<|a|>\n", " <s>", "|a|", "word", "wordy", "or"]
    added = [AddedToken(text, **{flag: rng.random() < 0.4 for flag in FLAGS})
             for text in rng.sample(contents, 6)]
    library.add_special_tokens([AddedToken("<e>"), *(token for token in added if token.special)])
    library.add_tokens([token for token in added if not token.special])
    library.save(str(folder / "tokenizer.json"))
    content = "".join(rng.choices(contents, k=2)).replace("{", "")
    (folder / "chat_template.jinja").write_text(f"{content} {{{{ messages[0].content }}}} {content}<e>w")
    tok = Tokenizer.load(folder)
    for _ in range(20):
        text = "".join(rng.choices([*contents, " ", "\n", "q", "e\u0301", "_", "\u0301", "\u3000"], k=6))
        for library.encode_special_tokens in (True, False):
            ids = library.encode(text, add_special_tokens=False).ids
            assert tok.encode(text, bos=False, parse_special=not library.encode_special_tokens) == ids
        chat = [{"role": "user", "content": "".join(rng.choices("q9\n w", k=3))}]
        assert tok.chat(chat) == library.encode(tok.render(chat), add_special_tokens=False).ids


def test_sentencepiece_equals_the_library(sp, byte_tokenizer):
    tok, library = Tokenizer.load(sp), sentencepiece_library(sp)
    assert (tok.vocab_size, tok.bos_id) == (522, 1)
    for text in (*CORPUS, "", "a<sep>b", "<s></s><unk><0x41>"):
        ids = tok.encode(text)
        assert ids == [1, *library.encode(text)] and tok.decode(ids) == library.decode(ids) == text
    assert tok.encode("a</think>b") == [1, *library.encode("a"), 521, *library.encode("b")]
    text = "<s>[INST] hi [/INST] yes </s><s>go<|tool|>"
    pieces = [1, *library.encode("[INST] hi [/INST] yes "), 2, 1, *library.encode("go"), 520]
    assert tok.encode(text, parse_special=True) == pieces
    assert tok.decode([1, *tok.encode("fox"), 2, 0, 520, 10**6]) == "fox"
    assert tok.decode(tok.encode("a\udc80b")) == "a?b" and tok.decode(tok.encode("  the")) == "  the"
    assert tok.stream(continues=True).push(tok.encode("fox")) == " fox" and not same_ids(tok, byte_tokenizer)


LLAMA = {"tokenizer_class": "LlamaTokenizer"}


@pytest.mark.parametrize("settings, bos, first, later", [
    ({}, True, "▁", "▁"), ({"legacy": False}, True, "▁", ""), ({"add_prefix_space": False}, True, "", ""),
    ({"tokenizer_class": "LlamaTokenizerFast", "legacy": None}, False, "▁", ""),
    ({**LLAMA, "add_bos_token": True}, True, "▁", ""), ({**LLAMA, "legacy": True}, False, "▁", "▁"),
    ({"tokenizer_class": "CodeLlamaTokenizer", "add_bos_token": False, "legacy": True}, False, "▁", ""),
], ids=str)
def test_settings_of_sentencepiece_equal_transformers(sp, tmp_path, settings, bos, first, later):
    """Whether a text starts with BOS and a space, and whether a space follows a control token. Expected: as
    LlamaTokenizer in transformers 5.23, including its defaults.
    """
    copy_files(sp, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **settings}))
    library, tok = sentencepiece_library(sp), Tokenizer.load(tmp_path)
    ids = tok.encode("fox</s>fox", parse_special=True)
    assert (ids[0] == 1) is bos
    ids, eos = ids[bos:], ids.index(2) - bos
    pieces = ["".join(map(library.id_to_piece, part)) for part in (ids[:eos], ids[eos + 1 :])]
    assert pieces == [f"{first}fox", f"{later}fox"]
    assert tok.decode(tok.encode(" fox")) == " fox"


@pytest.mark.parametrize("fixture", ["bpe", "sp"])
def test_stream_equals_decode(fixture, request):
    """Random ids split UTF-8 characters anywhere; real text has emoji of several tokens."""
    tok = Tokenizer.load(request.getfixturevalue(fixture))
    rng = random.Random(0)
    samples = [tok.encode(text, bos=False) for text in CORPUS]
    samples += [[rng.randrange(tok.vocab_size) for _ in range(60)] for _ in range(120)]
    split = 0
    for ids in samples:
        text, stream, streamed, i = tok.decode(ids), tok.stream(), "", 0
        while i < len(ids):
            step = rng.choice((0, 1, 1, 1, 2, 5))
            streamed += stream.push(ids[i : i + step])
            i += step
            assert text.startswith(streamed)  # a U+FFFD is streamed only if decode has it
            waiting = tok.decode(ids[:i]).removeprefix(streamed)
            assert not waiting.strip("\ufffd")  # only an incomplete character is held back
            split += bool(waiting)
        assert streamed + stream.flush() == text
    assert split > 100  # characters were split between pushes


# -- files that contradict each other (expected: as in transformers 5.23) ------------------------------------


START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
EOS_MAP = {"special_tokens_map": {"eos_token": END}}


def special(**tokens: str) -> dict:
    """Return an added_tokens_decoder of special tokens; i257="x": token x has id 257."""
    return {name[1:]: {"content": token, "special": True} for name, token in tokens.items()}


def write_json(folder: Path, **files: dict | None) -> Path:
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def folder_of(folder: Path, config: dict, added: dict[str, bool | None], **files: dict) -> Path:
    """Write a tokenizer whose ids 0 to 255 are bytes. added: added tokens of tokenizer.json, and whether they
    are special; None: part of the vocabulary. config: tokenizer_config.json. files: other JSON files.
    """
    write_byte_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    tokens = {TEXT_END: True} | added
    content["added_tokens"] = [
        content["added_tokens"][0] | {"id": 256 + n, "content": token, "special": special}
        for n, (token, special) in enumerate(tokens.items()) if special is not None]
    content["model"]["vocab"] |= {t: 256 + n for n, t in enumerate(tokens) if None in tokens.values()}
    config = {"eos_token": TEXT_END, "chat_template": CHATML} | config
    return write_json(folder, tokenizer=content, tokenizer_config=config, **files)


@pytest.mark.parametrize("added, config, files, count, text, control", [
    # A token is special if any file makes it so.
    ({START: False, END: False}, {"added_tokens_decoder": special(i257=START, i258=END)}, {}, 21, "bc",
     {START, END}),
    ({START: False, END: False}, {"eos_token": END, "added_tokens_decoder": {"258": {"content": END}}}, {},
     21, f"{START}bc", {END}),
    # Tokens that only the settings have: with their id, or after the last token.
    ({}, {"additional_special_tokens": [START, {"content": END}]}, {}, 21, "bc", {START, END}),
    ({}, {"extra_special_tokens": {"start": START, "end": END}}, {}, 21, "bc", {START, END}),
    ({}, {}, {"added_tokens": {START: 257, END: 258}}, 21, f"{START}b{END}c", set()),
    ({}, {}, {"added_tokens": {START: 257, END: 258},
              "special_tokens_map": {"eos_token": END, "additional_special_tokens": [START]}},
     21, "bc", {START, END}),
    # Names under any key make tokens special, and so do lists; also tokens of the vocabulary.
    ({START: None, END: None}, {"start_token": START, "image_token": END}, {}, 21, "bc", {START, END}),
    ({START: None, END: None}, {"additional_special_tokens": [START, END]}, {}, 21, "bc", {START, END}),
    # A list does not change flags of added tokens of tokenizer.json.
    ({START: False, END: False}, {"additional_special_tokens": [START, END]}, {}, 21, f"{START}b{END}c",
     set()),
    # A token without an id in any file.
    ({START: True, END: True}, {"pad_token": "<pad>"}, {}, 21, "bc", {START, END, "<pad>"}),
    # added_tokens.json is older than added_tokens_decoder, and tokenizer_config.json without the latter is
    # older than special_tokens_map.json.
    ({}, {"added_tokens_decoder": {}}, {"added_tokens": {START: 257, END: 258}, **EOS_MAP}, 52, "bc", set()),
    ({}, {"eos_token": None, "added_tokens_decoder": {}}, EOS_MAP, 43, "bc", {END}),
    ({}, {"eos_token": "<x>"}, EOS_MAP, 43, "bc", {END}),
])
def test_special_tokens_of_every_file(tmp_path, added, config, files, count, text, control):
    tok = Tokenizer.load(folder_of(tmp_path, config, added, **files))
    ids = tok.chat([{"role": "user", "content": "hi"}])
    assert len(ids) == count and tok.decode([257, ord("b"), 258, ord("c")]) == text
    assert tok.control.keys() == {TEXT_END} | control
    assert not control or tok.control.keys().isdisjoint(map(tok.decode, [[i] for i in tok.encode(END)]))


@pytest.mark.parametrize("files, new, stops", [
    ({"tokenizer_config": {"eos_token": "<sep>", "added_tokens_decoder": {}}}, {}, [3, 2]),
    # tokenizer.model has priority for ids.
    ({"tokenizer_config": {"added_tokens_decoder": special(i530="<sep>")}}, {}, [2]),
    # New tokens come after the last one.
    ({"special_tokens_map": {"eos_token": END, "pad_token": "<pad>", "cls_token": {"content": ""},
                             "additional_special_tokens": [START, "<sep>"]}, "tokenizer_config": {}},
     {END: 520, "<pad>": 521, START: 522}, [520, 2]),
])
def test_settings_make_sentencepiece_tokens_special(sp, tmp_path, files, new, stops):
    """tokenizer.model may have them as normal text."""
    copy_files(sp, tmp_path)
    assert Tokenizer.load(sp).encode("<sep>", bos=False)[-1] == 3 and 3 not in Tokenizer.load(sp).control
    tok = Tokenizer.load(write_json(tmp_path, **files))
    assert new.items() < tok.control.items() and tok.vocab_size == 520 + len(new)
    assert tok.control["<sep>"] == 3 and stop_ids(tok) == stops
    ids = tok.encode("a<sep>b", bos=False)
    assert 3 not in ids and tok.decode([*ids, 3]) == "a<sep>b"
    for text in ("the fox", " the fox"):
        ids = tok.encode(f"a <sep>{text}", parse_special=True)
        assert ids == tok.encode("a ") + [3] + tok.encode("the fox", bos=False)


def test_ids_with_gaps(tmp_path):
    """Expected: as in tokenizers 0.23, which renumbers added tokens."""
    folder = folder_of(tmp_path, {"eos_token": "<|end|>"}, {"<|end|>": True, "<think>": False})
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"he": 256, "ll": 300, "hell": 301, "hello": 310}
    content["model"]["merges"] = ["h e", "l l", "he ll", "hell o"]
    end, think = content["added_tokens"][1:]
    content["added_tokens"] = [end | {"id": 500}, think | {"id": 510}]
    tok = Tokenizer.load(write_json(folder, tokenizer=content))
    assert tok.encode("hello<think> hell") == [310, 261, 32, 301]
    assert tok.decode([310, 261, 32, 301, 305]) == "hello<think> hell"
    assert (tok.vocab_size, stop_ids(tok)) == (311, [260])


@pytest.mark.parametrize("more, model, config, eos_id, ids", [
    ({}, {"model_type": "qwen2"}, None, 258, [256, 257, 78]),
    ({TEXT_END: 258}, {"model_type": "gpt2"}, None, 258, [256, 257, 78]),
    ({TEXT_END: 258}, {"model_type": "qwen3_moe"}, {"tokenizer_class": "Other"}, 258, [256, 257, 78]),
    ({}, None, {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": END,
                "added_tokens_decoder": special(i258=END)}, 259, [256, 257, 78]),
    ({}, {"model_type": "qwen2"}, {"add_prefix_space": True}, 258, [220, 256, 257, 78]),
])
def test_vocab_json_and_merges(tmp_path, more, model, config, eos_id, ids):
    """For these tokenizer classes the end-of-text token is a control token even if no file says so."""
    source, copy = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    copy.mkdir()
    vocab = {c: i for i, c in enumerate(sorted(byte_alphabet()))} | {"he": 256, "ll": 257} | more
    write_json(source, vocab=vocab, config=model, tokenizer_config=config)
    assert Tokenizer.load(source) is None  # incomplete without merges.txt
    (source / "merges.txt").write_text("#version: 0.2\nh e\nl l\n")
    assert copy_files(source, copy)
    for tok in map(Tokenizer.load, (source, copy)):
        assert tok.control[TEXT_END] == eos_id and eos_id in stop_ids(tok) and tok.decode([eos_id]) == ""
        assert tok.encode("hello") == ids and tok.special_tokens_map["unk_token"] == TEXT_END
        assert (tok.encode("e\u0301 12") == tok.encode("\u00e9 12")) is (model != {"model_type": "gpt2"})
        assert tok.encode(f"o{TEXT_END}", parse_special=True)[-1] == eos_id
