"""Tokenizers rebuilt from GGUF metadata encode as the originals. Errors: test_invalid_inputs.py."""
from __future__ import annotations

import json

import pytest
from helpers.tokenizers import CHATML, CORPUS, sentencepiece_library, train_bpe
from tokenizers import pre_tokenizers

from tokens.convert import stop_ids
from tokens.gguf_tokenizer import rebuild
from tokens.tokenizer import Tokenizer, byte_alphabet
from tokens.word_rules import WORD_RULES


def rebuilt(folder, kind: str, tokens: list, template=CHATML, added=None, general=(), **more) -> Tokenizer:
    """Return the tokenizer of a GGUF file with these tokens (text, type). more: other metadata."""
    names, types = zip(*tokens)
    fields = {"model": kind, "pre": "gpt-2", "merges": [], "scores": [0.0] * len(names), **more,
              "tokens": list(names), "token_type": list(types)}
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | dict(general)
    own = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": "T"}
    assert rebuild(fields | ({} if added else own), folder, added=added)
    if added:
        (folder / "chat_template.jinja").write_text(added)
    return Tokenizer.load(folder)


def tiny(folder, kind: str, *tokens: tuple[str, int], **more) -> Tokenizer:
    """Return a vocabulary of bytes with these ids, and more tokens after them."""
    alphabet = [(c, 1) for c, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])]
    alphabet = alphabet if kind == "gpt2" else [(f"<0x{b:02X}>", 6) for b in range(256)]
    return rebuilt(folder, kind, [*alphabet, *tokens], add_space_prefix=False, **more)


@pytest.mark.parametrize("pre, setting", [*((pre, {}) for pre in WORD_RULES),
                                          ("smollm", {"add_bos_token": True}),
                                          ("llama-bpe", {"add_bos_token": False})])
def test_bpe_encodes_as_the_original(pre, setting, tmp_path):
    model = train_bpe(WORD_RULES[pre])
    vocab, spec = model.get_vocab(), json.loads(model.to_str())
    kinds = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    tokens = [(token, kinds.get(i, 1)) for i, token in enumerate(sorted(vocab, key=vocab.get))]
    tok = rebuilt(tmp_path, "gpt2", tokens, pre=pre, merges=merges, bos_token_id=0, eos_token_id=2, **setting)
    assert (tok.vocab_size, tok.bos_id) == (model.get_vocab_size(), 0)
    assert (tok.template, tok.tool_template) == (CHATML, "T")
    llamas = "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken"
    adds_bos = setting.get("add_bos_token", pre in llamas)
    for text in (*CORPUS, "a   b</think><|im_end|>"):
        assert tok.encode(text, bos=False, parse_special=True) == model.encode(text).ids
        assert (tok.encode(text)[:1] == [0]) is adds_bos
    assert 2 not in tok.encode("<|im_end|>")
    thought = tok.encode("</think>", bos=False)
    assert len(thought) == 1 and tok.decode(thought) == "</think>"  # user-defined: matched in text, and shown


@pytest.mark.parametrize("pre, pieces, words", [
    ("gpt-2", 2, ["it", "'s", " 1234", "\n\n", " x"]), ("smollm", 2, ["a", " ", "1", "2", "3", "4"]),
    ("llama-bpe", 1, ["It", "'S", " ", "123", "45", "!!\n\n", " x"]),
    ("qwen2", 2, ["It", "'S", " ", "1", "2", "3", "(x"]),
    ("qwen35", 2, ["It", "'S", " ก็ก", " हिन्दी", " عَر", " ", "1", "2", "(x"]),
    ("seed-coder", 2, ["It", "'S", " ", "1", "2", "!!", "\n\n", " x"]),
    *((pre, 2, ["It", "'S", " ก", "็ก", " ", "123", "4", "!!\n\n", " x"]) for pre in ("dbrx", "smaug-bpe")),
    *((pre, 1, ["It", "'S", " ", "123", "4", "!!\n", " x"]) for pre in ("falcon3", "pixtral", "midm-2.0")),
    ("deepseek-llm", 2, ["It", "'", "S", " ", "ก็ก", "!\"", "\n", " x", "1", " Gr", "öß", "e", "中"]),
    ("deepseek-coder", 2, ["It", "'", "S", " ", "ก", "็", "ก", "!", "\n", " Größe", "1", "2", "中", "。"]),
    ("llama4", 1, ["it's", " WE'LL", " ก็ก", " hello", "World", " ", "123", "4", " a", "/\n/"]),
    ("tekken", 1, ["hello", "World", " HTTPServer", " ", "1", "2", " a", "/\n/"]),
    ("gpt-4o", 1, ["it's", " WE'LL", " hello", "World", " ", "123", "4", " a", "/\n/"]),
    ("deepseek-v3", 2, ["abc", " ", "123", "4", ".foo", "中文", "ab", "!c"]),
])
def test_words_are_split_as_each_family_does(pre, pieces, words, tmp_path):
    """Written down by hand from the families' rules, so that an edited pattern shows.

    pieces: of a word of the vocabulary that no merge makes.
    """
    spell = {b: c for c, b in byte_alphabet().items()}
    cut = pre_tokenizers.Sequence(WORD_RULES[pre].steps).pre_tokenize_str("".join(words))
    assert [word for word, _ in cut] == ["".join(spell[b] for b in word.encode()) for word in words]
    assert len(tiny(tmp_path, "gpt2", ("ab", 1), pre=pre).encode("ab")) == pieces


@pytest.mark.parametrize("unknown", [{}, {"unknown_token_id": 0}], ids=("typed", "named"))
@pytest.mark.parametrize("prefix", [{}, {"add_space_prefix": False}], ids=("space", "none"))
def test_sentencepiece_encodes_as_the_original(sp, tmp_path, prefix, unknown):
    """Gemma's <unk> has type CONTROL, and is named by the metadata."""
    library = sentencepiece_library(sp)
    kinds = dict.fromkeys(range(library.get_piece_size()), 1) | {0: 3 if unknown else 2, 1: 3, 2: 3}
    kinds |= {i: 6 for i in kinds if library.is_byte(i)} | {library.piece_to_id("<sep>"): 4}
    tok = rebuilt(tmp_path, "llama", [(library.id_to_piece(i), kind) for i, kind in kinds.items()],
                  scores=[library.get_score(i) for i in kinds], **prefix, **unknown)
    for text in (*CORPUS, "a<sep>b <s>"):
        assert prefix or tok.encode(text) == [1, *library.encode(text)]
        assert tok.decode(tok.encode(text)) == text
    assert tok.strips_space is (not prefix)


def test_user_defined_runs_of_spaces(tmp_path):
    tok = tiny(tmp_path, "llama", ("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁", 1), ("   ", 4), ("x", 1),
               bos_token_id=257, eos_token_id=258, add_bos_token=False)
    assert tok.encode("x   x x") == [261, 260, 261, 259, 261] and tok.decode([261, 260, 261]) == "x   x"


def test_merges_over_whole_texts(tmp_path):
    """As in Gemma 4, whose metadata has no pre-tokenizer."""
    tokens = ("<unk>", 2), ("<bos>", 3), ("▁", 1), ("a", 1), ("\n", 1), ("▁a", 1), ("\n\n", 1), ("a\n\n", 1)
    tok = tiny(tmp_path, "gemma4", *tokens, merges=["▁ a", "\n \n", "a \n\n"], pre=None, bos_token_id=257)
    assert tok.encode("a\n\n a é") == [257, 263, 261, 258, 0xC3, 0xA9]
    assert tok.decode([263, 261, 258, 0xC3, 0xA9]) == "a\n\n a é"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma4"])
@pytest.mark.parametrize("type_", range(7))
def test_end_and_turn_tokens_are_control_tokens_whatever_their_type(kind, type_, tmp_path):
    names = "<|im_start|>", "<|im_end|>", "<|mine|>", "<|eot_id|>", "[INST]", "STOP", "<think>", "<|other|>"
    types = [type_] * 6 + [1 if type_ in (2, 6) else type_] * 2  # a text is no byte
    tok = tiny(tmp_path, kind, ("<unk>", 2), ("<s>", 3), ("</s>", 3), *zip(names, types), ("[PAD1]", 5),
               template=CHATML.replace("'<|im_start|>'", "'<|mine|>[INST]<think>'"),
               bos_token_id=257, eos_token_id=258, eot_token_id=264, add_bos_token=False)
    visible = {"<think>", "<|other|>"} if type_ == 3 else set()
    assert tok.control.keys() - {"<unk>", "<s>", "</s>"} == {*names[:6]} | visible
    assert {*stop_ids(tok)} == {258, 260, 262}
    assert tok.decode([72, *range(259, 265), 267, 105]) == "Hi"
    assert tok.decode([265, 266]) == ("" if type_ in (3, 5) else "<think><|other|>")
    typed = tok.chat([{"role": "user", "content": "x<|im_end|>[INST]<|mine|>y"}])
    assert [typed.count(i) for i in (260, 261, 263)] == [1, 1, 1]  # what the template writes


@pytest.mark.parametrize("kind, pre, arch, name, left, right", [
    ("llama", "default", "phi3", "x", False, True), ("llama", "default", "llama", "A Phi-3", False, True),
    ("llama", "default", "llama", "x", False, False), ("gpt2", "gpt-4o", "phi3", "Phi 4 Mini", False, True),
    ("gpt2", "dbrx", "phi3", "Phi 4", True, True)])
def test_control_tokens_that_strip_white_space(kind, pre, arch, name, left, right, tmp_path):
    """GGUF does not say which do. Expected: the published tokenizers of Phi-3 and Phi-4."""
    names = "<unk>", "<s>", "</s>", "<|end|>", "<|endoftext|>", "▁"
    tok = tiny(tmp_path, kind, *zip(names, (2, 3, 3, 3, 3, 1)), pre=pre, bos_token_id=257, eos_token_id=260,
               add_bos_token=False, general={"general.architecture": arch, "general.name": name})
    for text, strips in (("a<|end|>\n b", right), ("a \n<|end|>b", left), ("a <s> b", left)):
        ids = tok.encode(text, parse_special=True)
        assert (len(ids) == 3) is strips and ids[0] == 97


JOINED = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|e' + 'nd|>' }}{% endfor %}<|assistant|>"
)


@pytest.mark.parametrize("given", ["template", "added"])
def test_markers_that_a_template_joins_from_parts(given, tmp_path):
    tokens = ("<|user|>", 1), ("<|assistant|>", 1), ("<|end|>", 1), ("<|other|>", 1), ("STOP", 3)
    tok = tiny(tmp_path, "gpt2", *tokens, eos_token_id=260, **{given: JOINED})
    ids = tok.chat([{"role": "user", "content": "a<|user|>b<|other|>"}])
    assert ids[:2] == [256, ord("a")] and ids[-2:] == [258, 257] and ids.count(256) == 1
    assert "<|other|>" not in tok.control and 258 in stop_ids(tok)


@pytest.mark.parametrize("kind, type_", [("gpt2", 1), ("gpt2", 4), ("llama", 1), ("llama", 4)])
@pytest.mark.parametrize("marker", (
    "<extra_id_1>", "[|user|]", "</s>", "[gMASK]", "<\uff5cUser\uff5c>", "### User:", "<|user|>\n"))
def test_markers_of_a_template_have_any_shape(kind, type_, marker, tmp_path):
    """Words that are merges or pairs of other tokens, and tags for reasoning and tools, stay text."""
    words, tags = ("us", "er", "(s", "s)", "user", "(ss)"), ("<think>", "<tool_response>", "</tool_response>")
    tokens = ("<unk>", 2), ("<s>", 3), ("<|im_end|>", 3), (marker, type_), *((t, 1) for t in (*words, *tags))
    template = "{% for m in messages %}" + "".join((marker, *words, *tags)) + "{{ m.content }}{% endfor %}"
    tok = tiny(tmp_path, kind, *tokens, template=template, bos_token_id=257, eos_token_id=258,
               merges=["u s", "e r", "( s", "s )", "us er", "(s s)"])
    ids = tok.chat([{"role": "user", "content": marker}])
    assert tok.control.items() - {("<unk>", 256)} == {("<s>", 257), ("<|im_end|>", 258), (marker, 259)}
    assert [ids.count(i) for i in (259, 266, 267, 268)] == [1] * 4  # the template's, each in one piece


@pytest.mark.parametrize("tokens, ends", (
    ([("STOP", 3), ("<|EOT|>", 1), ("<|end|>", 4)], {256, 257, 258}),
    # A model that writes <|return|> after its answer ends its thoughts with <|end|>.
    ([("STOP", 3), ("<|return|>", 1), ("<|end|>", 4)], {256, 257}),
    # Merges make words, of type UNUSED too: vocabularies that know HTML have </s>.
    ([("<|im_end|>", 3), ("</s>", 1), ("ll", 5), ("</", 1), ("s>", 1)], {256}),
    ([("<eos>", 3), ("</s>", 4), ("<s>", 4), ("<bos>", 3)], {256}),  # Gemma's
), ids=str)
def test_names_of_end_tokens(tokens, ends, tmp_path):
    merges = ["l l", "< /", "s >", "</ s>"] if len(tokens) == 5 else []
    more = {"bos_token_id": 259, "add_bos_token": False} if len(tokens) == 4 else {}
    tok = tiny(tmp_path, "gpt2", *tokens, eos_token_id=256, merges=merges, template="", **more)
    assert not more or tok.decode(tok.encode("<s>a</s>")) == "<s>a</s>"
    assert {*stop_ids(tok)} == ends and {*tok.control.values()} >= ends
    assert not merges or (tok.encode("all"), tok.decode([97, 258, 257])) == ([97, 258], "all</s>")
