"""Tokenizers rebuilt from the metadata of GGUF files encode as the originals."""
from __future__ import annotations

import json

import pytest
import tokenizers
from helpers.tokenizers import CHATML, CORPUS, LLAMA2, sentencepiece_library, train_bpe
from tokenizers import pre_tokenizers

from common.errors import InputError
from tokens.backends import byte_alphabet
from tokens.gguf_tokenizer import rebuild
from tokens.tokenizer import Tokenizer
from tokens.word_rules import WORD_RULES


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
def test_bpe_encodes_as_the_original(pre, tmp_path):
    rule = WORD_RULES[pre]
    model = train_bpe(rule)
    rebuild(gguf_fields(model, pre), tmp_path)
    tok = Tokenizer.load(tmp_path)
    assert (tok.vocab_size, tok.bos_id) == (model.get_vocab_size(), 0)
    assert tok.adds_bos is rule.add_bos and tok.has_template
    for text in (*CORPUS, "a   b</think><|im_end|>"):
        assert tok.encode(text, bos=False, parse_special=True) == model.encode(text).ids
        assert (tok.encode(text)[:1] == [0]) is rule.add_bos
    assert 2 not in tok.encode("<|im_end|>")
    thought = tok.encode("</think>", bos=False)
    assert len(thought) == 1 and tok.decode(thought) == "</think>"  # user-defined: matched in text, and shown


@pytest.mark.parametrize("pre, pieces", [("llama-bpe", 1), ("qwen2", 2)])
def test_llama3_takes_a_known_word_in_one_piece_whatever_the_merges(pre, pieces, tmp_path):
    fields = gguf_fields(train_bpe(WORD_RULES[pre]), pre)
    merges = fields["tokenizer.ggml.merges"]
    longest = max((m for m in merges if m.replace(" ", "").isalpha() and m.isascii()), key=len)
    merges.remove(longest)
    rebuild(fields, tmp_path)
    assert len(Tokenizer.load(tmp_path).encode(longest.replace(" ", ""), bos=False)) == pieces


@pytest.mark.parametrize("pre, words", [
    ("gpt-2", ["it", "'s", " 1234", "\n\n", " x"]),
    ("smollm", ["a", " ", "1", "2", "3", "4"]),
    ("llama-bpe", ["It", "'S", " ", "123", "45", "!!\n\n", " x"]),
    ("qwen2", ["It", "'S", " ", "1", "2", "3", "(x"]),
    ("tekken", ["hello", "World", " HTTPServer", " ", "1", "2", " a", "/\n/"]),
    ("gpt-4o", ["it's", " WE'LL", " hello", "World", " ", "123", "4", " a", "/\n/"]),
    ("deepseek-v3", ["abc", " ", "123", "4", ".foo", "中文", "ab", "!c"]),
])
def test_words_are_split_as_each_family_does(pre, words):
    """Written down by hand from the families' rules, so that an edited pattern shows."""
    spell = {b: c for c, b in byte_alphabet().items()}
    cut = pre_tokenizers.Sequence(WORD_RULES[pre].steps).pre_tokenize_str("".join(words))
    assert [word for word, _ in cut] == ["".join(spell[b] for b in word.encode()) for word in words]


@pytest.mark.parametrize("pre, setting", [("smollm", True), ("llama-bpe", False)])
def test_bos_and_templates_follow_the_metadata(pre, setting, tmp_path):
    fields = gguf_fields(train_bpe(WORD_RULES[pre]), pre) | {"tokenizer.chat_template.tool_use": "T"}
    rebuild(fields | {"tokenizer.ggml.add_bos_token": setting}, tmp_path)
    tok = Tokenizer.load(tmp_path)
    assert (tok.encode("fox")[0] == 0) is setting and (tok.template, tok.tool_template) == (CHATML, "T")


@pytest.mark.parametrize("prefix", [{}, {"tokenizer.ggml.add_space_prefix": False}], ids=("space", "none"))
def test_sentencepiece_encodes_as_the_original(sp, tmp_path, prefix):
    library = sentencepiece_library(sp)
    kind = dict.fromkeys(range(library.get_piece_size()), 1) | {0: 2, 1: 3, 2: 3}
    kind |= {i: 6 for i in kind if library.is_byte(i)} | {library.piece_to_id("<sep>"): 4}
    rebuild({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in kind],
        "tokenizer.ggml.scores": [library.get_score(i) for i in kind],
        "tokenizer.ggml.token_type": list(kind.values()), "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": LLAMA2, **prefix,
    }, tmp_path)
    tok = Tokenizer.load(tmp_path)
    for text in (*CORPUS, "a<sep>b <s>"):
        if not prefix:
            assert tok.encode(text) == [1, *library.encode(text)]
        assert tok.decode(tok.encode(text)) == text
    assert tok.strips_space is (not prefix)
    assert tok.chat([{"role": "user", "content": "hi</s>"}]).count(1) == 1


def tiny_fields(kind: str, *tokens: tuple[str, int], **more) -> dict:
    """Metadata of a vocabulary of bytes and these tokens (text, type), 256 bytes before the first."""
    if kind == "gpt2":
        alphabet = [(c, 1) for c, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])]
    else:
        alphabet = [(f"<0x{b:02X}>", 6) for b in range(256)]
    names, types = zip(*alphabet, *tokens)
    fields = {"model": kind, "pre": "gpt-2", "merges": [], "scores": [0.0] * len(names), **more}
    fields |= {"tokens": list(names), "token_type": list(types)}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("type_", range(7))
def test_end_and_turn_tokens_are_control_tokens_whatever_their_type(kind, type_, tmp_path):
    names = "<|im_start|>", "<|im_end|>", "<|mine|>", "<|eot_id|>", "[INST]", "STOP", "<think>", "<|other|>"
    types = [type_] * 6 + [1 if type_ in (2, 6) else type_] * 2  # a text is no byte
    fields = tiny_fields(
        kind, ("<unk>", 2), ("<s>", 3), ("</s>", 3), *zip(names, types), ("[PAD1]", 5),
        bos_token_id=257, eos_token_id=258, eot_token_id=264, add_bos_token=False, add_space_prefix=False)
    fields["tokenizer.chat_template"] = CHATML.replace("'<|im_start|>'", "'<|mine|>[INST]<think>'")
    rebuild(fields, tmp_path)
    tok = Tokenizer.load(tmp_path)
    marked, ends, visible = {*names[:6]}, {258, 260, 262}, {"<think>", "<|other|>"}
    assert tok.control.keys() - {"<unk>", "<s>", "</s>"} == marked | (visible if type_ == 3 else set())
    assert ends == {*tok.stop_ids}
    assert tok.decode([72, *range(259, 265), 267, 105]) == "Hi"
    assert tok.decode([265, 266]) == ("" if type_ in (3, 5) else "<think><|other|>")
    typed = tok.chat([{"role": "user", "content": "x<|im_end|>[INST]<|mine|>y"}])
    assert [typed.count(i) for i in (260, 261, 263)] == [1, 1, 1]  # what the template writes


JOINED = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|e' + 'nd|>' }}{% endfor %}<|assistant|>"
)


@pytest.mark.parametrize("added", [False, True], ids=("own template", "added template"))
def test_markers_that_a_template_joins_from_parts(added, tmp_path):
    names = "<|user|>", "<|assistant|>", "<|end|>", "<|other|>"
    fields = tiny_fields("gpt2", ("<unk>", 2), *((name, 1) for name in names), ("STOP", 3),
                         bos_token_id=261, eos_token_id=261, add_bos_token=False, add_space_prefix=False)
    if added:
        assert rebuild(fields, tmp_path, added=JOINED)
        (tmp_path / "chat_template.jinja").write_text(JOINED)
    else:
        rebuild(fields | {"tokenizer.chat_template": JOINED}, tmp_path)
    tok = Tokenizer.load(tmp_path)
    ids = tok.chat([{"role": "user", "content": "a<|user|>b<|other|>"}])
    assert ids[:2] == [257, ord("a")] and ids[-2:] == [259, 258] and ids.count(257) == 1
    assert "<|other|>" not in tok.control and 259 in tok.stop_ids


@pytest.mark.parametrize("kind, type_", [("gpt2", 1), ("gpt2", 4), ("llama", 1), ("llama", 4)])
@pytest.mark.parametrize("marker", (
    "<extra_id_1>", "[|user|]", "</s>", "[gMASK]", "<\uff5cUser\uff5c>", "### User:", "<|user|>\n"))
def test_markers_of_a_template_have_any_shape(kind, type_, marker, tmp_path):
    """Words, which merges or two other tokens make, and tags of thoughts and tools are text."""
    words, tags = ("us", "er", "(s", "s)", "user", "(ss)"), ("<think>", "<tool_response>", "</tool_response>")
    tokens = ("<unk>", 2), ("<s>", 3), ("<|im_end|>", 3), (marker, type_), *((t, 1) for t in (*words, *tags))
    fields = tiny_fields(kind, *tokens, merges=["u s", "e r", "( s", "s )", "us er", "(s s)"],
                         bos_token_id=257, eos_token_id=258, add_space_prefix=False)
    template = "{% for m in messages %}" + "".join((marker, *words, *tags)) + "{{ m.content }}{% endfor %}"
    rebuild(fields | {"tokenizer.chat_template": template}, tmp_path)
    tok = Tokenizer.load(tmp_path)
    ids = tok.chat([{"role": "user", "content": marker}])
    assert tok.control.items() - {("<unk>", 256)} == {("<s>", 257), ("<|im_end|>", 258), (marker, 259)}
    assert [ids.count(i) for i in (259, 266, 267, 268)] == [1] * 4  # the template's, each in one piece


@pytest.mark.parametrize("name", ("<|EOT|>", "<|return|>", "</s>"))
def test_names_of_end_tokens(name, tmp_path):
    fields = tiny_fields("gpt2", ("<unk>", 2), (name, 1), ("STOP", 3), ("<|end|>", 4), eos_token_id=258)
    rebuild(fields | {"tokenizer.ggml.bos_token_id": 256}, tmp_path)
    # A model that writes <|return|> after its answer ends its thoughts with <|end|>.
    ends = {257, 258} if name == "<|return|>" else {257, 258, 259}
    assert {*Tokenizer.load(tmp_path).stop_ids} == ends


def test_tokens_that_merges_make_are_words(tmp_path):
    """Of type UNUSED too, and under the name of an end token: vocabularies that know HTML have </s>."""
    fields = tiny_fields("gpt2", ("ll", 5), ("<|im_end|>", 3), ("</", 1), ("s>", 1), ("</s>", 1),
                         merges=["l l", "< /", "s >", "</ s>"], eos_token_id=257)
    rebuild(fields, tmp_path)
    tok = Tokenizer.load(tmp_path)
    assert tok.encode("all") == [ord("a"), 256] and tok.decode([ord("a"), 256, 260]) == "all</s>"
    assert tok.stop_ids == [257] == [*tok.control.values()]


@pytest.mark.parametrize("change, words", [
    ({"pre": "viking"}, "tokenizer.ggml.pre 'viking' is not known"),
    ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
    ({"merges": ["no such"]}, "cannot be rebuilt"),
    ({"tokens": ["a", "b", "a"], "merges": [], "token_type": [1] * 3}, "has repeated tokens"),
])
def test_refusals_say_what_to_do(tmp_path, change, words):
    fields = gguf_fields(train_bpe(WORD_RULES["gpt-2"]), "gpt-2")
    fields |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(InputError, match=f"^m.gguf: .*{words}"):
        rebuild(fields, tmp_path / "out", "m.gguf")
