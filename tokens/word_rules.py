"""Pre-tokenization rules of byte-level BPE, and tokenizers built with them.

GGUF stores only the *name* of the rule, and a folder with vocab.json and merges.txt only the class of the
tokenizer. word_rules.json maps names to rules, as llama.cpp does (src/llama-vocab.cpp). A wrong rule would
silently give different ids, so unknown names are rejected.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers


class WordRule(NamedTuple):
    """How a text is split into words before merging.

    steps: pre-tokenizers, in order; the last maps bytes to characters. []: see `GEMMA4`.
    nfc: normalize the text to Unicode NFC first.
    ignore_merges: a word in the vocabulary is one token, regardless of merges.
    add_bos: default of add_bos_token.
    """

    steps: list
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _rules() -> dict[str, WordRule]:
    """Read word_rules.json. cuts: patterns to split by. digits: split digits. words: GPT-2's pattern."""
    rules = {}
    for names, row in json.loads(Path(__file__).with_suffix(".json").read_text()).items():
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.pop("cuts", ())]
        if row.pop("digits", False):
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=row.pop("words", False)))
        rules |= dict.fromkeys(names.split(), WordRule(steps, **row))
    return rules


WORD_RULES = _rules()
GEMMA4 = WordRule([], add_bos=True)  # no pre-tokenization; characters instead of bytes, with ▁ for a space


def byte_level_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], rule: WordRule, prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Build a tokenizer. Merges are in the byte alphabet, except `GEMMA4`'s. Raises the library's errors.

    prefix_space: put a space before a text that does not start with one.
    """
    if not rule.steps:
        bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        model = tokenizers.Tokenizer(bpe)
        model.normalizer = normalizers.Replace(" ", "▁")
        model.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return model
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    model.normalizer, (*cuts, byte_level) = normalizers.NFC() if rule.nfc else None, rule.steps
    if prefix_space:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=byte_level.use_regex)
    model.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    model.decoder = decoders.ByteLevel()
    return model
