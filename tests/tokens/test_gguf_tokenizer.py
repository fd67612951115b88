"""Tokenizers rebuilt from the metadata of GGUF files encode as the originals."""
from __future__ import annotations

import json

import pytest
import tokenizers
from helpers.tokenizers import CHATML, CORPUS, LLAMA2, json_library, sentencepiece_library, train_bpe
from tokenizers import pre_tokenizers

from common.errors import InputError
from tokens.backends import byte_alphabet
from tokens.gguf_tokenizer import WORD_RULES, from_gguf
from tokens.tokenizer import Tokenizer


def gguf_fields(model: tokenizers.Tokenizer, pre: str) -> dict:
    """The metadata a GGUF converter writes for a byte-level BPE."""
    vocab, spec = model.get_vocab(), json.loads(model.to_str())
    kinds = {t["id"]: 3 if t["special"] else 4 for t in spec["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get),
        "tokenizer.ggml.token_type": [kinds.get(i, 1) for i in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(m) for m in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": CHATML,
    }


@pytest.mark.parametrize("pre", WORD_RULES)
def test_gguf_bpe_encodes_as_the_original(pre, tmp_path):
    rule = WORD_RULES[pre]
    model = train_bpe(rule)
    from_gguf(gguf_fields(model, pre), tmp_path)
    tok = Tokenizer.load(tmp_path)
    assert (tok.vocab_size, tok.bos_id) == (model.get_vocab_size(), 0)
    assert tok.adds_bos is rule.add_bos and tok.has_template
    for text in (*CORPUS, "a   b</think><|im_end|>"):
        assert tok.encode(text, bos=False, special=True) == model.encode(text).ids
        assert (tok.encode(text)[:1] == [0]) is rule.add_bos
    assert 2 not in tok.encode("<|im_end|>")
    thought = tok.encode("</think>", bos=False)
    assert len(thought) == 1 and tok.decode(thought) == "</think>"  # user-defined: matched in text, and shown


def test_gguf_llama3_takes_a_known_word_in_one_piece_whatever_the_merges(tmp_path):
    for pre in ("llama-bpe", "qwen2"):
        fields = gguf_fields(train_bpe(WORD_RULES[pre]), pre)
        merges = fields["tokenizer.ggml.merges"]
        longest = max((m for m in merges if m.replace(" ", "").isalpha() and m.isascii()), key=len)
        merges.remove(longest)
        from_gguf(fields, tmp_path)
        word = longest.replace(" ", "")
        tok = Tokenizer.load(tmp_path)
        assert len(tok.encode(word, bos=False)) == (1 if pre == "llama-bpe" else 2)


@pytest.mark.parametrize("pre, words", [
    ("gpt-2", ["it", "'s", " 1234", "\n\n", " x"]),
    ("smollm", ["a", " ", "1", "2", "3", "4"]),
    ("llama-bpe", ["It", "'S", " ", "123", "45", "!!\n\n", " x"]),
    ("qwen2", ["It", "'S", " ", "1", "2", "3", "(x"]),
    ("tekken", ["hello", "World", " HTTPServer", " ", "1", "2", " a", "/\n/"]),
    ("deepseek-v3", ["abc", " ", "123", "4", ".foo", "中文", "ab", "!c"]),
    # Its punctuation is written ":-~". This takes in the ASCII letters and so parts them from accented ones.
    ("deepseek-llm", ["ab", " ", "1", "2", "\n", "\n", "n", "é", " жук", ",", " x", "中文", "ש", " a", "  "]),
])
def test_gguf_splits_words_as_each_family_does(pre, words):
    """Written down by hand from the families' rules, so that an edited pattern shows."""
    spell = {b: c for c, b in byte_alphabet().items()}
    cut = pre_tokenizers.Sequence(WORD_RULES[pre].steps).pre_tokenize_str("".join(words))
    assert [word for word, _ in cut] == ["".join(spell[b] for b in word.encode()) for word in words]


def test_gguf_bpe_bos_follows_the_metadata(tmp_path):
    for pre, setting in (("smollm", True), ("llama-bpe", False)):
        fields = {**gguf_fields(train_bpe(WORD_RULES[pre]), pre), "tokenizer.ggml.add_bos_token": setting}
        from_gguf(fields, tmp_path)
        assert (Tokenizer.load(tmp_path).encode("fox")[0] == 0) is setting
        assert (json_library(tmp_path).encode("fox").ids[0] == 0) is setting


@pytest.mark.parametrize("prefix", [None, False])
def test_gguf_sentencepiece_encodes_as_the_original(sp, tmp_path, prefix):
    library = sentencepiece_library(sp)
    kind = dict.fromkeys(range(library.get_piece_size()), 1) | {0: 2, 1: 3, 2: 3}
    kind |= {i: 6 for i in kind if library.is_byte(i)} | {library.piece_to_id("<sep>"): 4}
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in kind],
        "tokenizer.ggml.scores": [library.get_score(i) for i in kind],
        "tokenizer.ggml.token_type": list(kind.values()),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": LLAMA2,
    }
    if prefix is not None:
        fields["tokenizer.ggml.add_space_prefix"] = prefix
    from_gguf(fields, tmp_path)
    tok = Tokenizer.load(tmp_path)
    for text in (*CORPUS, "a<sep>b <s>"):
        if prefix is None:
            assert tok.encode(text) == [1, *library.encode(text)]
        assert tok.decode(tok.encode(text)) == text
    assert tok.strips_space is (prefix is None)
    assert tok.chat([{"role": "user", "content": "hi</s>"}]).count(1) == 1


def test_gguf_refusals_say_what_to_do(tmp_path):
    good = gguf_fields(train_bpe(WORD_RULES["gpt-2"]), "gpt-2")
    merge = {"tokenizer.ggml.merges": ["no such"]}
    for change in ({"tokenizer.ggml.pre": "viking"}, {"tokenizer.ggml.model": "bert"}, merge):
        with pytest.raises(InputError, match="convert the Hugging Face folder") as e:
            from_gguf({**good, **change}, tmp_path)
        assert "\n" not in str(e.value)
    with pytest.raises(InputError, match="viking"):
        from_gguf({**good, "tokenizer.ggml.pre": "viking"}, tmp_path)
    with pytest.raises(InputError, match="convert the Hugging Face folder"):
        from_gguf({k: v for k, v in good.items() if not k.endswith("tokens")}, tmp_path)


def test_gguf_repeated_tokens_are_refused(tmp_path):
    fields = gguf_fields(train_bpe(WORD_RULES["gpt-2"]), "gpt-2")
    fields["tokenizer.ggml.tokens"].append(fields["tokenizer.ggml.tokens"][-3])
    fields["tokenizer.ggml.token_type"].append(1)
    with pytest.raises(InputError, match=r"repeated tokens .* convert the Hugging Face folder"):
        from_gguf(fields, tmp_path)
