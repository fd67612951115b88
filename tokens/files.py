"""The files of a tokenizer in a checkpoint's folder."""
from __future__ import annotations

GGUF_ADVICE = "convert the Hugging Face folder instead"  # of a GGUF whose tokenizer cannot be rebuilt
ENCODERS = ("tokenizer.json", "tokenizer.model")  # the first that exists is used
FILES = (
    *ENCODERS, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
)
