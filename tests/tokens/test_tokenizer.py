"""The tokenizer: encoding and decoding equal the libraries', streams equal decoding, damage is one line."""
from __future__ import annotations

import json
import random
import re
from functools import partial

import pytest
import tokenizers
from helpers.tokenizers import CORPUS, changed_json, json_library, sentencepiece_library
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from common.errors import InputError
from tokens.tokenizer import Tokenizer, TooLong, copy_files

# ---- encoding equals the libraries ----

def test_json_encodes_as_the_library(bpe):
    tok, library = Tokenizer.load(bpe), json_library(bpe)
    assert (tok.vocab_size, tok.bos_id, tok.has_template) == (library.get_vocab_size(), 0, True)
    for text in (*CORPUS, "".join(CORPUS), "", "a   b</think>c"):
        assert tok.encode(text) == library.encode(text).ids
        assert tok.encode(text, bos=False) == library.encode(text, add_special_tokens=False).ids
    rendered = "<|im_start|>user\n 12  <|im_end|>\n" + CORPUS[3] + "<|im_end|><|endoftext|>"
    for text in (rendered, "<|endoftext|>x"):
        expected = library.encode(text, add_special_tokens=False).ids
        assert tok.encode(text, bos=False, parse_special=True) == expected
    assert tok.encode("<|endoftext|>x", parse_special=True) == expected  # BOS is written already
    assert tok.encode("x", parse_special=True)[0] == 0


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_json_of_sentencepiece_kind_encodes_as_the_library(tmp_path, scheme):
    """Metaspace treats the first piece of a text and those after control tokens differently, and flags of
    added tokens eat spaces.
    """
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
    model.add_special_tokens([AddedToken("<|r|>", rstrip=True), AddedToken("<|l|>", lstrip=True)])
    model.add_special_tokens([AddedToken("word", single_word=True), "<|r|>>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tok = Tokenizer.load(tmp_path)
    for text in (
        "<s>The fox</s> dog<s> x", "a <|r|>  b  <|l|> c", "word sword word", "a<|r|>>b<|r|> >", *CORPUS
    ):
        ids = model.encode(text, add_special_tokens=False).ids
        assert tok.encode(text, bos=False, parse_special=True) == ids
    for text in CORPUS:
        assert tok.decode(tok.encode(text)) == text == model.decode(tok.encode(text))


def test_sentencepiece_encodes_as_the_library(sp):
    tok, library = Tokenizer.load(sp), sentencepiece_library(sp)
    assert (tok.vocab_size, tok.bos_id) == (522, 1)
    for text in (*CORPUS, "", "a<sep>b", "<s></s><unk><0x41>"):
        assert tok.encode(text) == [1, *library.encode(text)]
    assert tok.encode("a</think>b") == [1, *library.encode("a"), 521, *library.encode("b")]
    text = "<s>[INST] hi [/INST] yes </s><s>go<|tool|>"
    pieces = [1, *library.encode("[INST] hi [/INST] yes "), 2, 1, *library.encode("go"), 520]
    assert tok.encode(text, parse_special=True) == pieces


def with_settings(folder, copy, **settings) -> Tokenizer:
    copy_files(folder, copy)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return Tokenizer.load(copy)


LLAMA = {"tokenizer_class": "LlamaTokenizer"}


@pytest.mark.parametrize("settings, bos, first, later", [
    ({}, True, "▁", "▁"), ({"legacy": False}, True, "▁", ""), ({"add_prefix_space": False}, True, "", ""),
    ({"tokenizer_class": "LlamaTokenizerFast", "legacy": None}, False, "▁", ""),
    ({**LLAMA, "add_bos_token": True}, True, "▁", ""), ({**LLAMA, "legacy": True}, False, "▁", "▁"),
    ({"tokenizer_class": "CodeLlamaTokenizer", "legacy": True}, True, "▁", ""),
], ids=str)
def test_settings_of_sentencepiece(sp, tmp_path, settings, bos, first, later):
    """Whether a text starts with BOS and a space, and whether a space follows a control token.

    Right values of LlamaTokenizer: transformers 5.23, also where its file lacks settings.
    """
    library, tok = sentencepiece_library(sp), with_settings(sp, tmp_path, **settings)
    ids = tok.encode("fox</s>fox", parse_special=True)
    assert (ids[0] == 1) is bos
    ids, at = ids[bos:], ids.index(2) - bos
    spelled = ["".join(map(library.id_to_piece, part)) for part in (ids[:at], ids[at + 1 :])]
    assert spelled == [f"{first}fox", f"{later}fox"]
    assert tok.decode(tok.encode(" fox")) == " fox"


@pytest.mark.parametrize("kind, setting", [("bpe", True), ("bpe", False), ("sp", True), ("sp", False)])
def test_add_bos_token_has_the_last_word(kind, request, tmp_path, setting):
    tok = with_settings(request.getfixturevalue(kind), tmp_path, add_bos_token=setting)
    assert (tok.encode("fox")[0] == tok.bos_id) is setting


# ---- sizes ----

@pytest.mark.parametrize("text", [
    "The quick brown fox 123. ", " ", "\n", "中文字", "e\u0301", "\0", "K\u212a", "<|endoftext|>",
])
@pytest.mark.parametrize("kind", ["bpe", "sp"])
def test_a_prompt_is_refused_only_if_it_cannot_fit(kind, request, text):
    tok, long = Tokenizer.load(request.getfixturevalue(kind)), text * 400
    chat = [{"role": "user", "content": long}]
    for ask in (partial(tok.encode, long, bos=False, parse_special=True), partial(tok.chat, chat)):
        ids = ask()
        assert ask(at_most=len(ids)) == ids
        for room in (1, len(ids) // 2, len(ids) - 1):
            try:
                assert ask(at_most=room) == ids
            except TooLong as e:
                assert "has at least" in str(e)


def test_a_prompt_of_megabytes_is_refused_without_the_work(bpe):
    with pytest.raises(TooLong, match=r"has at least [\d,]+ tokens \(1,\d+,\d+ characters\)"):
        Tokenizer.load(bpe).chat([{"role": "user", "content": "<" * 10**6}], at_most=2047)


# ---- decoding and streaming ----

def test_decode_equals_the_libraries(bpe, sp):
    tok, library = Tokenizer.load(bpe), json_library(bpe)
    for text in CORPUS:
        assert tok.decode(tok.encode(text)) == library.decode(tok.encode(text)) == text
    rng = random.Random(1)  # also where the bytes are no UTF-8
    for _ in range(200):
        ids = [rng.randrange(tok.vocab_size) for _ in range(40)]
        assert tok.decode(ids) == library.decode(ids)
    assert tok.decode([1, *tok.encode("fox", bos=False), 2, tok.vocab_size]) == "fox"
    tok, library = Tokenizer.load(sp), sentencepiece_library(sp)
    for text in CORPUS:
        assert tok.decode(tok.encode(text)) == library.decode(tok.encode(text)) == text
    assert tok.decode([1, *tok.encode("fox"), 2, 0, 520, 10**6]) == "fox"
    assert tok.decode(tok.encode("a\udc80b")) == "a?b" and tok.decode(tok.encode("  the")) == "  the"


@pytest.mark.parametrize("kind", ["bpe", "sp"])
def test_stream_equals_decode(kind, request):
    """Random ids split UTF-8 characters everywhere; real text splits emoji over several tokens."""
    tok = Tokenizer.load(request.getfixturevalue(kind))
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
            assert text.startswith(streamed)  # so a U+FFFD in a piece is one of the text
            waiting = tok.decode(ids[:i]).removeprefix(streamed)
            assert not waiting.strip("\ufffd")  # nothing waits but the bytes of one character
            split += bool(waiting)
        assert streamed + stream.flush() == text
    assert split > 100  # the samples did hold characters split between pushes


# ---- files ----

def test_copy_and_load(bpe, tmp_path):
    for name in ("empty", "copy"):
        (tmp_path / name).mkdir()
    assert Tokenizer.load(tmp_path / "empty") is None and Tokenizer.load(tmp_path / "nowhere") is None
    assert not copy_files(tmp_path / "empty", tmp_path / "copy") and not list((tmp_path / "copy").iterdir())
    assert copy_files(bpe, tmp_path / "copy")
    copy = Tokenizer.load(tmp_path / "copy")
    assert copy.encode("fox") == Tokenizer.load(bpe).encode("fox") and copy.same_ids(Tokenizer.load(bpe))
    assert Tokenizer.load(tmp_path / "copy") is copy
    (tmp_path / "copy" / "chat_template.jinja").write_text("other")
    assert Tokenizer.load(tmp_path / "copy").template == "other" and copy.template != "other"


JSON, MODEL, CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
DECODER = "is neither byte-level nor sentencepiece's"
# No such token: the library panics.
WITHOUT = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}, "single": [
    {"SpecialToken": {"id": "x", "type_id": 0}}]}
WORDPIECE = {"type": "WordPiece", "prefix": "#", "cleanup": True}
def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("name, change, words", [
    (JSON, "{", "cannot be read as a tokenizer"),
    (MODEL, "not a model", "cannot be read as a sentencepiece model"),
    (JSON, {"post_processor": WITHOUT}, "cannot be read as a tokenizer (no entry found"),
    (JSON, {"decoder": WORDPIECE}, f"decoder WordPiece {DECODER}"),
    (CONFIG, '{"added_tokens_decoder": {"a": 1}}', "the tokenizer's files are damaged"),
])
def test_damage_is_one_line(bpe, tmp_path, name, change, words):
    if name != MODEL:
        copy_files(bpe, tmp_path)
    file = tmp_path / name
    file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=re.escape(words)) as e:
        Tokenizer.load(tmp_path)
    assert str(e.value).isprintable() and str(tmp_path) in str(e.value)


def test_a_panic_of_the_library_is_one_line_and_others_are_encoded(bpe, tmp_path):
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [split("(a+)+$"), spelling]}
    tok = Tokenizer.load(changed_json(bpe, tmp_path, pre_tokenizer=steps))
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot encode this text \(Onig: Regex search"):
        tok.encode("a" * 40 + "b" + "a" * 3000)
    assert tok.decode(tok.encode("hello")) == "hello"
