"""Check the lengths of prompts before a model's weights are read."""
from __future__ import annotations

from checkpoint.load import is_converted, read_config
from engine.request import check_prompt, encode
from tokens.tokenizer import Tokenizer


def check(o, prompts: list[str | list[int]]) -> None:
    """Raise InputError if a prompt does not fit in a converted model's context. o: options of generate.py."""
    if not is_converted(o.checkpoint):
        return
    config, tokenizer = read_config(o.checkpoint, "target"), Tokenizer.load(o.checkpoint)
    lengths = min(o.max_seq_len or config["max_seq_len"], config["max_seq_len"]), config["max_seq_len"]
    for i, prompt in enumerate(prompts, 1):
        name = f"prompt {i}" if len(prompts) > 1 else "the prompt"
        ids = encode(tokenizer, prompt, raw=o.raw, system=o.system, max_lengths=lengths, name=name,
                     parse_special=o.parse_special)
        check_prompt(ids, name, lengths, config["vocab_size"])
