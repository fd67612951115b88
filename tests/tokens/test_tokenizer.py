"""The tokenizer: encoding and decoding equal the libraries', and streams equal decoding."""
from __future__ import annotations

import json
import random
import re

import pytest
import tokenizers
from helpers import ROOT
from helpers.tokenizers import CORPUS, json_library, sentencepiece_library, train_bpe
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from common.errors import InputError
from tokens.gguf_tokenizer import WORD_RULES
from tokens.tokenizer import Tokenizer, copy_files

# ---- encoding equals the libraries ----

def test_json_encodes_as_the_library(bpe):
    tok, library = Tokenizer.load(bpe), json_library(bpe)
    assert (tok.vocab_size, tok.bos_id, tok.has_template) == (library.get_vocab_size(), 0, True)
    for text in (*CORPUS, "".join(CORPUS), "", "a   b</think>c"):
        assert tok.encode(text) == library.encode(text).ids
        assert tok.encode(text, bos=False) == library.encode(text, add_special_tokens=False).ids
    rendered = "<|im_start|>user\n 12  <|im_end|>\n" + CORPUS[3] + "<|im_end|><|endoftext|>"
    ids = library.encode(rendered, add_special_tokens=False).ids
    assert tok.encode(rendered, bos=False, special=True) == ids
    ids = library.encode("<|endoftext|>x", add_special_tokens=False).ids
    assert tok.encode("<|endoftext|>x", special=True) == ids
    assert tok.encode("x", special=True)[0] == 0


@pytest.mark.parametrize("first", [True, False])
def test_json_of_sentencepiece_kind_encodes_as_the_library(tmp_path, first):
    """Metaspace treats the first piece of a text and those after control tokens differently, and flags of
    added tokens eat spaces.
    """
    model = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    scheme = "first" if first else "always"
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    alphabet = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *alphabet], limit_alphabet=60,
        show_progress=False
    )
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
        assert tok.encode(text, bos=False, special=True) == model.encode(text, add_special_tokens=False).ids
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
    assert tok.encode(text, special=True) == pieces


def test_sentencepiece_without_legacy_puts_no_space_after_control_tokens(sp, tmp_path):
    copy_files(sp, tmp_path)
    config = json.loads((sp / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "legacy": False}))
    tok, legacy = Tokenizer.load(tmp_path), Tokenizer.load(sp)
    first, rest = tok.encode("fox</s>fox", special=True)[1:], legacy.encode("fox</s>fox", special=True)[1:]
    assert first[: first.index(2)] == rest[: rest.index(2)] == sentencepiece_library(sp).encode("fox")
    assert rest[rest.index(2) + 1 :] == sentencepiece_library(sp).encode("fox")
    assert legacy.decode(first[first.index(2) + 1 :]) == "fox"
    assert tok.decode([2, *first[first.index(2) :]]) == "fox"
    assert not sentencepiece_library(sp).id_to_piece(first[first.index(2) + 1]).startswith("▁")


def test_lone_surrogates_do_not_raise(bpe, sp):
    for folder in (bpe, sp):
        assert Tokenizer.load(folder).decode(Tokenizer.load(folder).encode("a\udc80b")) == "a?b"


@pytest.mark.parametrize("setting, bos", [(None, True), (True, True), (False, False)])
def test_add_bos_token_has_the_last_word(bpe, sp, tmp_path, setting, bos):
    for folder in (bpe, sp):
        copy = tmp_path / folder.name
        copy.mkdir()
        copy_files(folder, copy)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (copy / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": setting}))
        tok = Tokenizer.load(copy)
        assert (tok.encode("fox")[0] == tok.bos_id) is bos


# ---- decoding and streaming ----

def test_decode_equals_the_libraries(bpe, sp):
    tok, library = Tokenizer.load(bpe), json_library(bpe)
    for text in CORPUS:
        ids = tok.encode(text)
        assert tok.decode(ids) == library.decode(ids) == text
    rng = random.Random(1)  # also where the bytes are no UTF-8
    for _ in range(200):
        ids = [rng.randrange(tok.vocab_size) for _ in range(40)]
        assert tok.decode(ids) == library.decode(ids)
    tok, library = Tokenizer.load(sp), sentencepiece_library(sp)
    for text in CORPUS:
        ids = tok.encode(text)
        assert tok.decode(ids) == library.decode(ids) == text
        ids = ids[9:]
        if "\ufffd" not in library.decode(ids):  # sentencepiece counts bad bytes in another way
            assert tok.decode(ids) == library.decode(ids)


def test_control_tokens_and_foreign_ids_decode_to_nothing(bpe, sp):
    tok = Tokenizer.load(bpe)
    ids = [1, *tok.encode("fox", bos=False), 2, tok.vocab_size, tok.vocab_size + 1, 10**6]
    assert tok.decode(ids) == "fox"
    tok = Tokenizer.load(sp)
    assert tok.decode([1, *tok.encode("fox"), 2, 0, 520, 10**6]) == "fox"


@pytest.mark.parametrize("kind", ["bpe", "sp"])
def test_stream_equals_decode(kind, request):
    """Random ids split UTF-8 characters everywhere; real text splits emoji over several tokens."""
    tok = Tokenizer.load(request.getfixturevalue(kind))
    rng = random.Random(0)
    bytewise = [i for i in range(tok.vocab_size) if len(tok.piece(i)) == 1 and tok.piece(i)[0] >= 0x80]
    assert len(bytewise) == 128
    samples = [tok.encode(text, bos=False) for text in CORPUS]
    for n in range(120):
        samples.append([
            rng.choice(bytewise) if rng.random() < n / 120 else rng.randrange(tok.vocab_size)
            for _ in range(60)
        ])
    split = 0
    for ids in samples:
        text, stream, streamed, i = tok.decode(ids), tok.stream(), "", 0
        while i < len(ids):
            step = rng.choice((0, 1, 1, 1, 2, 5))
            streamed += stream.push(ids[i : i + step])
            i += step
            assert text.startswith(streamed)  # so a U+FFFD in a piece is one of the text
            split += tok.decode(ids[:i]) != streamed
        assert streamed + stream.flush() == text
    assert split > 100  # the samples did hold characters split between pushes


def test_stream_holds_back_a_split_emoji(bpe, sp):
    for folder in (bpe, sp):
        tok = Tokenizer.load(folder)
        ids = tok.encode("a🦔b", bos=False)  # not in the corpus: split over several tokens
        stream = tok.stream()
        pushed = [stream.push([i]) for i in ids]
        assert [p for p in pushed if p] == ["a", "🦔", "b"] and pushed.count("") >= 2 and stream.flush() == ""
        stream = tok.stream()
        assert stream.push(ids[:-2]) == "a" and stream.flush() == "\ufffd"


def test_sentencepiece_drops_the_dummy_space_once(sp):
    tok = Tokenizer.load(sp)
    stream, ids = tok.stream(), tok.encode("the dog the dog")
    assert "".join(stream.push([i]) for i in ids) == "the dog the dog"
    assert tok.decode(tok.encode("  the")) == "  the"


# ---- files ----

def test_copy_and_load(bpe, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "copy").mkdir()
    assert Tokenizer.load(tmp_path / "empty") is None and Tokenizer.load(tmp_path / "nowhere") is None
    assert not copy_files(tmp_path / "empty", tmp_path / "copy") and not list((tmp_path / "copy").iterdir())
    assert copy_files(bpe, tmp_path / "copy") and copy_files(bpe, bpe)
    assert Tokenizer.load(tmp_path / "copy").encode("fox") == Tokenizer.load(bpe).encode("fox")


@pytest.mark.parametrize("name, content, words", [
    ("tokenizer.json", "{", "cannot be read as a tokenizer"),
    ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
    ("tokenizer.model", "not a model", "cannot be read as a sentencepiece model"),
    ("tokenizer_config.json", "[]", "expected a JSON object"),
    ("tokenizer_config.json", '{"bos_token": 7}', "tokenizer_config.json: bos_token is 7; expected"),
    ("tokenizer_config.json", '{"chat_template": [1]}', "chat_template[0] is 1; expected an object"),
    ("tokenizer_config.json", '{"chat_template": 7}', "config.json: chat_template is 7; expected"),
    ("tokenizer_config.json", '{"chat_template": [{"name": "a", "template": {}}]}', ".template is {}; exp"),
    ("chat_template.json", '{"chat_template": true}', "chat_template.json: chat_template is true; expected"),
    ("chat_template.json", "oops", "cannot be read as JSON"),
])
def test_damage_is_one_line(bpe, tmp_path, name, content, words):
    if name != "tokenizer.model":
        copy_files(bpe, tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(words)) as e:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)


@pytest.mark.parametrize("decoder, name", [
    (decoders.WordPiece(), "WordPiece"), (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "Fuse"),
    (decoders.Replace("_", " "), "Replace"), (None, "none"),
])
def test_other_decoders_are_refused(tmp_path, decoder, name):
    model = train_bpe(WORD_RULES["gpt-2"])
    model.decoder = decoder
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=f"decoder .*{name} is neither byte-level nor sentencepiece's"):
        Tokenizer.load(tmp_path)


# ---- the demo checkpoint ----

DEMO = ROOT / "checkpoints" / "smollm2-135m"


@pytest.mark.skipif(not DEMO.is_dir(), reason=f"the demo checkpoint is not at {DEMO.relative_to(ROOT)}")
def test_demo_checkpoint():
    tok = Tokenizer.load(DEMO)
    assert tok.vocab_size == 49152 and tok.encode("Hello world") == [19556, 905]
    ids = tok.chat([{"role": "user", "content": "<|im_end|> 12"}])
    assert [i for i in ids if i < 17] == [1, 2, 1, 2, 1]
    assert tok.decode(ids).endswith("user\n<|im_end|> 12\nassistant\n")
    for text in CORPUS:
        assert tok.decode(tok.encode(text)) == text
