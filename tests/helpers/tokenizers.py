"""Tokenizers for tests: the byte tokenizer of the golden models, and tiny ones trained on `CORPUS`."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from tokens.convert import copy_files
from tokens.tokenizer import Tokenizer, byte_alphabet
from tokens.word_rules import WordRule

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's asleep. "
    "1234567 + 89 = 1234656\n",
    "def f(x):\n    if x < 10:\n\t\treturn '<' * x  # less\n\n\n    return [i for i in range(x)]\n",
    "Zażółć gęślą jaźń. Größe, naïve, façade, cafe\u0301 — “quoted” … ½ Ωmega \u2126\n",
    "Съешь же ещё этих мягких французских булок. Καλημέρα κόσμε. שלום עולם مرحبا بالعالم ١٢٣\n",
    "我能吞下玻璃而不伤身体。いろはにほへと ちりぬるを。 한국어 키스의 고유조건은 हिन्दी में ภาษาไทย\n",
    "emoji 🎉🚀 👩‍👩‍👧‍👦 🇩🇪 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 tabs\t\tand   spaces   \r\nend of line  \n",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user\nand assistant') }}{% endif %}{% endfor %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_byte_tokenizer(folder: Path) -> None:
    """Write the tokenizer of the golden target: ids 0..255 are bytes, 256 is <bos>, 257 <eos>."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    template += "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}a:{% endif %}"
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def train_bpe(rule: WordRule) -> tokenizers.Tokenizer:
    """Train a byte-level BPE with the pre-tokenizer of `rule`, three control tokens and two added tokens."""
    model = tokenizers.Tokenizer(models.BPE())
    model.normalizer = normalizers.NFC() if rule.nfc else None
    model.pre_tokenizer, model.decoder = pre_tokenizers.Sequence(rule.steps), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(CORPUS, trainer)
    model.add_tokens([AddedToken("</think>", normalized=False), AddedToken("   ", normalized=False)])
    return model


def json_library(folder: Path) -> tokenizers.Tokenizer:
    """Load a folder's tokenizer.json with the `tokenizers` library."""
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.no_truncation()
    model.no_padding()
    return model


def sentencepiece_library(folder: Path):
    """Load a folder's tokenizer.model with the `sentencepiece` library."""
    library = pytest.importorskip("sentencepiece")
    return library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def changed_json(source: Path, folder: Path, *added: dict, **changes) -> Path:
    """Copy a tokenizer to an empty folder, with more added tokens and other values in tokenizer.json."""
    copy_files(source, folder)
    content = json.loads((folder / "tokenizer.json").read_text()) | changes
    template = content["added_tokens"][0]
    first = max(1 + max(token["id"] for token in content["added_tokens"]), len(content["model"]["vocab"]))
    content["added_tokens"] += [{**template, "id": first + i, **token} for i, token in enumerate(added)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def with_template(source: Path, folder: Path, template: str) -> Tokenizer:
    """Copy a tokenizer with another chat template to an empty folder."""
    copy_files(source, folder)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)
