"""Pre-tokenization rules of byte-level BPE, and tokenizers built with them.

GGUF stores only the *name* of the rule, and a folder with vocab.json and merges.txt only the class of the
tokenizer. `WORD_RULES` maps names to rules, as llama.cpp does (src/llama-vocab.cpp). A wrong rule would
silently give different ids, so unknown names are rejected.
"""
from __future__ import annotations

from typing import NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

# Words of Llama 3, Qwen, Tekken and GPT-4o. They differ in letters and in how many digits stay together.
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_SEED_CODER = _QWEN2.replace(r"\s\p{L}\p{N}]+[\r\n]*", r"\s\p{L}\p{N}\r\n]+")
# DeepSeek: letters with cases, of the scripts that had them in Unicode 11; Chinese, Japanese and Korean.
_CASED = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U0001dfff]]")
_MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _cased(ending: str, digits: str) -> str:
    """Return the pattern of words that end where small letters do, with this ending."""
    begin, large, small = (
        r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
    words = rf"{begin}{large}*{small}+{ending}|{begin}{large}+{small}*{ending}|{digits}"
    return words + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_GPT2 = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
_DIGITS = pre_tokenizers.Digits(individual_digits=True)


def _split(*patterns: str, digits: bool = False) -> list:
    """Return steps that cut at every match of each pattern in turn, and at digits, then spell the bytes."""
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns] + [_DIGITS] * digits
    return [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


class WordRule(NamedTuple):
    """A way to cut a text into words before the merges run.

    steps: pre-tokenizers, in order; the last spells bytes. []: see `GEMMA4`.
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
    **dict.fromkeys(("smollm", "starcoder", "refact"), WordRule([_DIGITS, *_GPT2])),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
                    WordRule(_split(_LLAMA3), ignore_merges=True, add_bos=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), WordRule(_split(_LLAMA3))),
    "tekken": WordRule(_split(_cased("", r"\p{N}")), ignore_merges=True, add_bos=True),
    **dict.fromkeys(  # gpt-oss, too
        ("gpt-4o", "llama4"), WordRule(_split(_cased(_SHORT + "?", r"\p{N}{1,3}")), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), WordRule(_split(_QWEN2), nfc=True)),
    "qwen35": WordRule(_split(_QWEN35), nfc=True),
    "seed-coder": WordRule(_split(_SEED_CODER)),
    "deepseek-llm": WordRule(
        _split(r"[\r\n]", rf"\s?{_CASED}+", rf"\s?{_MARKS}", r"\s+$", _CJK, digits=True)),
    "deepseek-coder": WordRule(_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, digits=True)),
    "deepseek-v3": WordRule(_split(
        r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")),
}


GEMMA4 = WordRule([], add_bos=True)  # merges run over whole texts, in characters, with ▁ for a space


def byte_level_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], rule: WordRule, prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Make a tokenizer. Merges are in the byte alphabet (but `GEMMA4`'s). Raises the library's errors.

    prefix_space: put a space before a text that begins with none.
    """
    if not rule.steps:
        bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        model = tokenizers.Tokenizer(bpe)
        model.normalizer = normalizers.Replace(" ", "▁")
        model.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return model
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    model.normalizer, (*cuts, spell) = normalizers.NFC() if rule.nfc else None, rule.steps
    if prefix_space:
        spell = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=spell.use_regex)
    model.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell])
    model.decoder = decoders.ByteLevel()
    return model
