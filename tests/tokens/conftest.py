"""Three tiny tokenizers: byte-level BPE and sentencepiece, trained on `CORPUS`, and one of bytes."""
from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from helpers.tokenizers import CHATML, CORPUS, LLAMA2, train_bpe, write_byte_tokenizer
from tokenizers import processors

from tokens.tokenizer import Tokenizer
from tokens.word_rules import WORD_RULES


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> Path:
    """A folder with tokenizer.json: ChatML, BOS from the post-processor; its truncation and padding must be
    ignored.
    """
    folder = tmp_path_factory.mktemp("bpe")
    model = train_bpe(WORD_RULES["smollm"])
    model.post_processor = processors.TemplateProcessing(
        single=["<|endoftext|>", "$A"], pair=None, special_tokens=[("<|endoftext|>", 0)])
    model.enable_truncation(5)
    model.enable_padding(length=7)
    model.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    """A tokenizer whose ids 0 to 255 are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def sp(tmp_path_factory) -> Path:
    """A folder with tokenizer.model, like Llama 2, and two tokens in `added_tokens_decoder`."""
    spm = pytest.importorskip("sentencepiece")
    folder, file = tmp_path_factory.mktemp("sp"), io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=file, model_type="bpe", vocab_size=520,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.98, user_defined_symbols=["<sep>"], allow_whitespace_only_pieces=True,
        minloglevel=2)
    (folder / "tokenizer.model").write_bytes(file.getvalue())
    added = {
        "520": {"content": "<|tool|>", "special": True}, "521": {"content": "</think>", "special": False}
    }
    config = {"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": added, "chat_template": LLAMA2}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
