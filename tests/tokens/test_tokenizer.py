"""The tokenizer: encoding and decoding equal the libraries', and streams equal decoding."""
from __future__ import annotations

import contextlib
import json
import random
from functools import partial

import pytest
import tokenizers
from helpers.tokenizers import CORPUS, json_library, sentencepiece_library
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from tokens.convert import copy_files
from tokens.tokenizer import Tokenizer, TooLong


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
    assert tok.encode("<|endoftext|>x", parse_special=True) == expected  # BOS is written already
    rng = random.Random(1)  # also where the bytes are no UTF-8
    for _ in range(200):
        ids = [rng.randrange(tok.vocab_size) for _ in range(40)]
        assert tok.decode(ids) == library.decode(ids)
    assert tok.decode([1, *tok.encode("fox", bos=False), 2, tok.vocab_size]) == "fox"


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_json_of_sentencepiece_kind_equals_the_library(tmp_path, scheme):
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
    for text in ("<s>The fox</s> dog<s> x", "a <|r|>  b  <|l|> c", "word sword word", "a<|r|>>b<|r|> >"):
        ids = model.encode(text, add_special_tokens=False).ids
        assert tok.encode(text, bos=False, parse_special=True) == ids
    for text in CORPUS:
        ids = tok.encode(text)
        assert ids == model.encode(text).ids and tok.decode(ids) == text == model.decode(ids)


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
    assert tok.stream(continues=True).push(tok.encode("fox")) == " fox" and not tok.same_ids(byte_tokenizer)


LLAMA = {"tokenizer_class": "LlamaTokenizer"}


@pytest.mark.parametrize("settings, bos, first, later", [
    ({}, True, "▁", "▁"), ({"legacy": False}, True, "▁", ""), ({"add_prefix_space": False}, True, "", ""),
    ({"tokenizer_class": "LlamaTokenizerFast", "legacy": None}, False, "▁", ""),
    ({**LLAMA, "add_bos_token": True}, True, "▁", ""), ({**LLAMA, "legacy": True}, False, "▁", "▁"),
    ({"tokenizer_class": "CodeLlamaTokenizer", "add_bos_token": False, "legacy": True}, False, "▁", ""),
], ids=str)
def test_settings_of_sentencepiece(sp, tmp_path, settings, bos, first, later):
    """Whether a text starts with BOS and a space, and whether a space follows a control token.

    Right values of LlamaTokenizer: transformers 5.23, also where its file lacks settings.
    """
    copy_files(sp, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **settings}))
    library, tok = sentencepiece_library(sp), Tokenizer.load(tmp_path)
    ids = tok.encode("fox</s>fox", parse_special=True)
    assert (ids[0] == 1) is bos
    ids, at = ids[bos:], ids.index(2) - bos
    spelled = ["".join(map(library.id_to_piece, part)) for part in (ids[:at], ids[at + 1 :])]
    assert spelled == [f"{first}fox", f"{later}fox"]
    assert tok.decode(tok.encode(" fox")) == " fox"


@pytest.mark.parametrize("kind", ["bpe", "sp"])
def test_a_prompt_is_refused_only_if_it_cannot_fit(kind, request):
    """That it is: test_hostile.py."""
    tok = Tokenizer.load(request.getfixturevalue(kind))
    for text in ("The fox 123. ", "\n", "<|tool|>", "中文字", "e\u0301", "\0", "K\u212a", "<|endoftext|>"):
        chat = [{"role": "user", "content": text * 400}]
        for ask in (partial(tok.encode, text * 400, bos=False, parse_special=True), partial(tok.chat, chat)):
            ids = ask()
            assert ask(at_most=len(ids)) == ids
            with contextlib.suppress(TooLong):
                assert ask(at_most=len(ids) - 1) == ids


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
