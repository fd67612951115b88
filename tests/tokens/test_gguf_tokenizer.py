"""Tokenizers rebuilt from GGUF metadata encode like the originals. Errors: test_invalid_inputs.py."""
from __future__ import annotations

import json
from itertools import product

import pytest
from helpers.tokenizers import CHATML, CORPUS, sentencepiece_library, train_bpe
from tokenizers import pre_tokenizers

from tokens.convert import stop_ids
from tokens.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, rebuild
from tokens.tokenizer import Tokenizer, byte_alphabet
from tokens.word_rules import WORD_RULES


def rebuilt(folder, model: str, tokens: list, template=CHATML, added=None, general=(), **more) -> Tokenizer:
    """Return the tokenizer of a GGUF file with these tokens (text, type). model: "gpt2", "llama" or "gemma4".
    more: other metadata.
    """
    names, types = zip(*tokens)
    fields = {"model": model, "pre": "gpt-2", "merges": [], "scores": [0.0] * len(names), **more,
              "tokens": list(names), "token_type": list(types)}
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()} | dict(general)
    templates = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": "T"}
    assert rebuild(fields | ({} if added else templates), folder, added=added)
    if added:
        (folder / "chat_template.jinja").write_text(added)
    return Tokenizer.load(folder)


def tiny(folder, model_type: str, *tokens: tuple[str, int], **more) -> Tokenizer:
    """Return a tokenizer whose ids 0 to 255 are bytes, followed by these tokens (text, type)."""
    alphabet = [(c, NORMAL) for c, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])]
    alphabet = alphabet if model_type == "gpt2" else [(f"<0x{b:02X}>", BYTE) for b in range(256)]
    return rebuilt(folder, model_type, [*alphabet, *tokens], add_space_prefix=False, **more)


@pytest.mark.parametrize("pre, setting", [*((pre, {}) for pre in WORD_RULES),
                                          ("smollm", {"add_bos_token": True}),
                                          ("llama-bpe", {"add_bos_token": False})])
def test_bpe_encodes_like_the_original(pre, setting, tmp_path):
    model = train_bpe(WORD_RULES[pre])
    vocab, spec = model.get_vocab(), json.loads(model.to_str())
    types = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in spec["added_tokens"]}
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    tokens = [(token, types.get(i, NORMAL)) for i, token in enumerate(sorted(vocab, key=vocab.get))]
    tok = rebuilt(tmp_path, "gpt2", tokens, pre=pre, merges=merges, bos_token_id=0, eos_token_id=2, **setting)
    assert (tok.vocab_size, tok.bos_id) == (model.get_vocab_size(), 0)
    assert (tok.template, tok.tool_template) == (CHATML, "T")
    rules_with_bos = "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken"
    adds_bos = setting.get("add_bos_token", pre in rules_with_bos)
    for text in (*CORPUS, "a   b</think><|im_end|>"):
        assert tok.encode(text, bos=False, parse_special=True) == model.encode(text).ids
        assert (tok.encode(text)[:1] == [0]) is adds_bos
    assert 2 not in tok.encode("<|im_end|>")
    ids = tok.encode("</think>", bos=False)
    assert len(ids) == 1 and tok.decode(ids) == "</think>"  # user-defined: matched in text, and shown


# token_count: of "ab", a word of the vocabulary that merges do not produce; 1 with `ignore_merges`.
@pytest.mark.parametrize("pre, token_count, words", [
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
def test_word_rules_split_and_merge_as_expected(pre, token_count, words, tmp_path):
    """Expected words were derived by hand from the families' rules."""
    spelling = {b: c for c, b in byte_alphabet().items()}
    split = pre_tokenizers.Sequence(WORD_RULES[pre].steps).pre_tokenize_str("".join(words))
    assert [word for word, _ in split] == ["".join(spelling[b] for b in word.encode()) for word in words]
    assert len(tiny(tmp_path, "gpt2", ("ab", NORMAL), pre=pre).encode("ab")) == token_count


@pytest.mark.parametrize("unknown", [{}, {"unknown_token_id": 0}], ids=("typed", "named"))
@pytest.mark.parametrize("prefix", [{}, {"add_space_prefix": False}], ids=("space", "none"))
def test_sentencepiece_encodes_like_the_original(sp, tmp_path, prefix, unknown):
    """Gemma's <unk> has type CONTROL; its id is in the metadata."""
    library = sentencepiece_library(sp)
    types = dict.fromkeys(range(library.get_piece_size()), NORMAL)
    types |= {0: CONTROL if unknown else UNKNOWN, 1: CONTROL, 2: CONTROL}
    types[library.piece_to_id("<sep>")] = USER_DEFINED
    types |= {i: BYTE for i in types if library.is_byte(i)}
    tok = rebuilt(tmp_path, "llama", [(library.id_to_piece(i), type_) for i, type_ in types.items()],
                  scores=[library.get_score(i) for i in types], **prefix, **unknown)
    for text in (*CORPUS, "a<sep>b <s>"):
        assert prefix or tok.encode(text) == [1, *library.encode(text)]
        assert tok.decode(tok.encode(text)) == text
    assert tok.strips_space is (not prefix)


def test_user_defined_runs_of_spaces_are_tokens(tmp_path):
    tok = tiny(tmp_path, "llama", ("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("▁", NORMAL),
               ("   ", USER_DEFINED), ("x", NORMAL), bos_token_id=257, eos_token_id=258, add_bos_token=False)
    assert tok.encode("x   x x") == [261, 260, 261, 259, 261] and tok.decode([261, 260, 261]) == "x   x"


def test_gemma4_merges_across_words(tmp_path):
    """Gemma 4's metadata has no pre-tokenizer."""
    words = ((word, NORMAL) for word in ("▁", "a", "\n", "▁a", "\n\n", "a\n\n"))
    tok = tiny(tmp_path, "gemma4", ("<unk>", UNKNOWN), ("<bos>", CONTROL), *words,
               merges=["▁ a", "\n \n", "a \n\n"], pre=None, bos_token_id=257)
    assert tok.encode("a\n\n a é") == [257, 263, 261, 258, 0xC3, 0xA9]
    assert tok.decode([263, 261, 258, 0xC3, 0xA9]) == "a\n\n a é"


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma4"])
@pytest.mark.parametrize("type_", range(7))
def test_end_and_turn_tokens_are_control_tokens_of_any_type(model_type, type_, tmp_path):
    names = "<|im_start|>", "<|im_end|>", "<|mine|>", "<|eot_id|>", "[INST]", "STOP", "<think>", "<|other|>"
    # <think> and <|other|> are text: UNKNOWN and BYTE would not fit.
    types = [type_] * 6 + [NORMAL if type_ in (UNKNOWN, BYTE) else type_] * 2
    tok = tiny(tmp_path, model_type, ("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL),
               *zip(names, types), ("[PAD1]", UNUSED),
               template=CHATML.replace("'<|im_start|>'", "'<|mine|>[INST]<think>'"),
               bos_token_id=257, eos_token_id=258, eot_token_id=264, add_bos_token=False)
    also_control = {"<think>", "<|other|>"} if type_ == CONTROL else set()
    assert tok.control.keys() - {"<unk>", "<s>", "</s>"} == {*names[:6]} | also_control
    assert {*stop_ids(tok)} == {258, 260, 262}
    assert tok.decode([72, *range(259, 265), 267, 105]) == "Hi"
    assert tok.decode([265, 266]) == ("" if type_ in (CONTROL, UNUSED) else "<think><|other|>")
    ids = tok.chat([{"role": "user", "content": "x<|im_end|>[INST]<|mine|>y"}])
    assert [ids.count(i) for i in (260, 261, 263)] == [1, 1, 1]  # only the template's


@pytest.mark.parametrize("model_type, pre, arch, name, left, right", [
    ("llama", "default", "phi3", "x", False, True), ("llama", "default", "llama", "A Phi-3", False, True),
    ("llama", "default", "llama", "x", False, False), ("gpt2", "gpt-4o", "phi3", "Phi 4 Mini", False, True),
    ("gpt2", "dbrx", "phi3", "Phi 4", True, True)])
def test_control_tokens_that_strip_white_space(model_type, pre, arch, name, left, right, tmp_path):
    """GGUF does not store which tokens do. Expected: as in the published tokenizers of Phi-3 and Phi-4."""
    names = "<unk>", "<s>", "</s>", "<|end|>", "<|endoftext|>", "▁"
    tok = tiny(tmp_path, model_type, *zip(names, (UNKNOWN, *[CONTROL] * 4, NORMAL)), pre=pre,
               bos_token_id=257, eos_token_id=260, add_bos_token=False,
               general={"general.architecture": arch, "general.name": name})
    for text, strips in (("a<|end|>\n b", right), ("a \n<|end|>b", left), ("a <s> b", left)):
        ids = tok.encode(text, parse_special=True)
        assert (len(ids) == 3) is strips and ids[0] == 97


JOINED = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|e' + 'nd|>' }}{% endfor %}<|assistant|>"
)


@pytest.mark.parametrize("argument", ["template", "added"])
def test_markers_that_a_template_joins_from_parts(argument, tmp_path):
    tokens = *((t, NORMAL) for t in ("<|user|>", "<|assistant|>", "<|end|>", "<|other|>")), ("STOP", CONTROL)
    tok = tiny(tmp_path, "gpt2", *tokens, eos_token_id=260, **{argument: JOINED})
    ids = tok.chat([{"role": "user", "content": "a<|user|>b<|other|>"}])
    assert ids[:2] == [256, ord("a")] and ids[-2:] == [258, 257] and ids.count(256) == 1
    assert "<|other|>" not in tok.control and 258 in stop_ids(tok)


@pytest.mark.parametrize("model_type, type_", [*product(("gpt2", "llama"), (NORMAL, USER_DEFINED))])
@pytest.mark.parametrize("marker", (
    "<extra_id_1>", "[|user|]", "</s>", "[gMASK]", "<\uff5cUser\uff5c>", "### User:", "<|user|>\n"))
def test_markers_of_a_template_have_any_shape(model_type, type_, marker, tmp_path):
    """Words that are merges or pairs of other tokens, and tags of reasoning and tools, stay text."""
    words, tags = ("us", "er", "(s", "s)", "user", "(ss)"), ("<think>", "<tool_response>", "</tool_response>")
    tokens = ("<unk>", UNKNOWN), ("<s>", CONTROL), ("<|im_end|>", CONTROL), (marker, type_)
    tokens += tuple((t, NORMAL) for t in (*words, *tags))
    template = "{% for m in messages %}" + "".join((marker, *words, *tags)) + "{{ m.content }}{% endfor %}"
    tok = tiny(tmp_path, model_type, *tokens, template=template, bos_token_id=257, eos_token_id=258,
               merges=["u s", "e r", "( s", "s )", "us er", "(s s)"])
    ids = tok.chat([{"role": "user", "content": marker}])
    assert tok.control.items() - {("<unk>", 256)} == {("<s>", 257), ("<|im_end|>", 258), (marker, 259)}
    assert [ids.count(i) for i in (259, 266, 267, 268)] == [1] * 4  # only the template's, each one token


@pytest.mark.parametrize("tokens, expected", (
    ([("STOP", CONTROL), ("<|EOT|>", NORMAL), ("<|end|>", USER_DEFINED)], {256, 257, 258}),
    # A model that ends its answer with <|return|> ends its reasoning with <|end|>.
    ([("STOP", CONTROL), ("<|return|>", NORMAL), ("<|end|>", USER_DEFINED)], {256, 257}),
    # Merges produce words, also of type UNUSED: vocabularies with HTML tags have </s>.
    ([("<|im_end|>", CONTROL), ("</s>", NORMAL), ("ll", UNUSED), ("</", NORMAL), ("s>", NORMAL)], {256}),
    ([("<eos>", CONTROL), ("</s>", USER_DEFINED), ("<s>", USER_DEFINED), ("<bos>", CONTROL)], {256}),  # Gemma
), ids=str)
def test_stop_ids_by_token_names(tokens, expected, tmp_path):
    merges = ["l l", "< /", "s >", "</ s>"] if len(tokens) == 5 else []
    more = {"bos_token_id": 259, "add_bos_token": False} if len(tokens) == 4 else {}
    tok = tiny(tmp_path, "gpt2", *tokens, eos_token_id=256, merges=merges, template="", **more)
    assert not more or tok.decode(tok.encode("<s>a</s>")) == "<s>a</s>"
    assert {*stop_ids(tok)} == expected and {*tok.control.values()} >= expected
    assert not merges or (tok.encode("all"), tok.decode([97, 258, 257])) == ([97, 258], "all</s>")
