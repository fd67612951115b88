"""Convert tokenizers: copy files, read vocab.json, choose a chat template.

`chat_templates/` has templates for models published without one. They render the strings of FastChat's
conversation templates (`vicuna_v1.1` and `llama-2`, https://github.com/lm-sys/FastChat), which the papers'
evaluations use, except that FastChat adds a space after Llama 2's `[/INST]`, which no training data has.
"""
from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import tokenizers

from common.errors import InputError, read_json, read_text
from tokens import files
from tokens.tokenizer import JsonBackend, Tokenizer
from tokens.word_rules import WORD_RULES, byte_level_bpe

WORD_RULE_OF_CLASS = {"qwen2": "qwen2", "qwen3": "qwen2", "gpt2": "gpt-2"}  # part of the class name -> rule
# Tokens that end a turn or a text in any model. GGUF files and some repositories declare only one EOS id, but
# a chat model may also emit the base model's EOS; without that id, generation would not stop.
END_OF_MESSAGE, END_OF_ANSWER = "<|end|>", "<|return|>"  # models with both end the reasoning with <|end|>
END_TOKENS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", END_OF_MESSAGE, "<|eot|>",
    "<|EOT|>", "<|eos|>", "<|end_of_turn|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>",
    "<turn|>", "<end_of_utterance>", "<EOT>", "\u2581<EOT>", "<eot>", "<eos>", "</s>", "[EOT]", "[EOS]",
    END_OF_ANSWER, "<|call|>", "<|calls|>", "<|flush|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
_FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {name: (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("vicuna", "llama2")}
# Pattern of the published model name -> template.
PUBLISHED_NAMES = {r"vicuna": "vicuna", r"llama-?2-\d+b-chat": "llama2"}


def find_template(choice: str, *names: str) -> str | None:
    """Return the template to add to a checkpoint that has none; None to add none.

    choice: "auto" goes by the names (of the source, of its config), "none" adds none; any other is a key of
    `TEMPLATES` or a file. Raises InputError if the file cannot be read.
    """
    if choice == "none":
        return None
    if choice == "auto":
        matching = (TEMPLATES[template] for pattern, template in PUBLISHED_NAMES.items()
                    if any(re.search(pattern, name, re.IGNORECASE) for name in names))
        return next(matching, None)
    return TEMPLATES[choice] if choice in TEMPLATES else read_text(choice, what="--template")


def open_vocab(path: Path, settings: dict) -> JsonBackend:
    """Read a vocab.json and its merges.txt."""
    return JsonBackend(path, settings, _vocab_model(path, settings))


def _vocab_model(path: Path, settings: dict) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocab.json and its merges.txt.

    The pre-tokenization rule depends on the tokenizer's class or the model type. Raises InputError if it is
    not in `WORD_RULE_OF_CLASS`, and the library's errors.
    """
    config = path.with_name("config.json")
    name = settings.get("tokenizer_class")
    class_and_type = f"{name} {(read_json(config) if config.exists() else {}).get('model_type')}".lower()
    rule = next((rule for name, rule in WORD_RULE_OF_CLASS.items() if name in class_and_type), None)
    if rule is None:
        raise InputError(f"{path}: tokenizer_class {name!r} is not supported (Qwen2Tokenizer and"
                         " GPT2Tokenizer are); save the tokenizer as tokenizer.json")
    vocab, merges = tokenizers.models.BPE.read_file(str(path), str(path.with_name(files.MERGES)))
    model = byte_level_bpe(vocab, merges, WORD_RULES[rule], settings.get("add_prefix_space", False))
    model.add_special_tokens([token for token in {*files.VOCAB_JSON_DEFAULTS.values()} if token in vocab])
    return model


def copy_files(source: Path, target: Path) -> bool:
    """Copy the tokenizer files of one folder to another. Returns False if there are none.

    Raises InputError, and copies nothing, if they do not load.
    """
    if Tokenizer.load(source) is None:
        return False
    for name in files.COPIED:
        if files.has(source, name):
            shutil.copyfile(source / name, target / Path(name).name)
    if (encoder := source / files.encoder_of(source)).name == "vocab.json":
        _vocab_model(encoder, files.tokenizer_settings(source)).save(str(target / "tokenizer.json"))
        config = target / "tokenizer_config.json"
        settings = read_json(config) if config.exists() else {}
        config.write_text(json.dumps(files.VOCAB_JSON_DEFAULTS | settings))
    return True


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of control tokens that end generation, the EOS token's first."""
    eos, control = tokenizer.special_tokens_map.get("eos_token"), tokenizer.control
    names = [eos, *END_TOKENS]
    if END_OF_ANSWER in control and eos != END_OF_MESSAGE:
        names.remove(END_OF_MESSAGE)
    return [*dict.fromkeys(control[name] for name in names if name in control)]
