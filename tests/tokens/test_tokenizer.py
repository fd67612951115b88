"""The tokenizer: encoding and decoding equal the libraries', and streams equal decoding."""
from __future__ import annotations

import json
import random

import pytest
import tokenizers
from helpers.tokenizers import CORPUS, json_library, sentencepiece_library
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from drafters.draft_model import same_ids
from tokens.convert import copy_files
from tokens.tokenizer import Tokenizer


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
    """Metaspace treats the first piece of a text and those after control tokens differently."""
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
def test_flags_of_added_tokens_mean_what_they_mean_to_the_library(seed, tmp_path):
    """Tokens that overlap, with random flags, in prompts, in texts and in a template around a message."""
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
