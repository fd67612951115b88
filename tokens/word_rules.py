"""Byte-level BPE: the rules that cut a text into words before the merges run, and tokenizers made with them.

GGUF keeps only the *name* of the rule, and a folder with vocab.json and merges.txt only the class of the
tokenizer. `WORD_RULES` says what each name stands for, as llama.cpp does
(https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp). A wrong rule gives other ids without any error,
so a name that is not listed is refused.
"""
from __future__ import annotations

from typing import NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

# Words of Llama 3, Qwen 2 and Tekken. They differ in letters and in how many digits stay together.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# DeepSeek LLM spells out the letters that have case. Escaped: several change under Unicode normalisation.
_CASED = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-"
    "\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-"
    "\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-"
    "\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943")

_GPT2 = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _split(*patterns: str, single_digits: bool = False) -> list:
    """Return steps that cut at every match of each pattern in turn, and at digits, then spell the bytes."""
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    cuts += [pre_tokenizers.Digits(individual_digits=True)] * single_digits
    return [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


class WordRule(NamedTuple):
    """A way to cut a text into words before the merges run.

    steps: pre-tokenizers, in order.
    nfc: whether the text is brought to Unicode's normal form C first.
    ignore_merges: whether a word of the vocabulary is taken in one piece, whatever the merges say.
    add_bos: whether a text starts with BOS unless the file says otherwise.
    """

    steps: list
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


WORD_RULES = {
    **dict.fromkeys(("gpt-2", "default"), WordRule(_GPT2)),
    "smollm": WordRule([pre_tokenizers.Digits(individual_digits=True), *_GPT2]),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), WordRule(_split(_LLAMA3), ignore_merges=True, add_bos=True)),
    "tekken": WordRule(_split(_TEKKEN), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WordRule(_split(_QWEN2), nfc=True)),
    "deepseek-llm": WordRule(_split(
        r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", single_digits=True)),
    "deepseek-v3": WordRule(_split(
        r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")),
}


def byte_level_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], rule: WordRule, prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Make a tokenizer. Its merges are spelled in the byte alphabet. Raises the library's errors.

    prefix_space: put a space before a text that begins with none.
    """
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    model.normalizer, (*cuts, spell) = normalizers.NFC() if rule.nfc else None, rule.steps
    if prefix_space:
        spell = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=spell.use_regex)
    model.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])
    model.decoder = decoders.ByteLevel()
    return model
