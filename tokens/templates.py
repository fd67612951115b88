"""Chat templates for models whose files carry none, and the choice of one when a target is converted.

The templates are in `chat_templates/`. They render the strings of FastChat's conversation templates
(`vicuna_v1.1` and `llama-2`, https://github.com/lm-sys/FastChat), which the papers' evaluations use. Their
script for Llama 2 adds a space after `[/INST]`. Ours does not, because no training text has it.
"""
from __future__ import annotations

import re
from pathlib import Path

from common.errors import InputError
from common.files import read_text

LONGEST = 4 << 20  # bytes of a template
FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {name: (FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("vicuna", "llama2")}
# Pattern of the name under which a model is published: its template.
PUBLISHED_NAMES = {r"vicuna": "vicuna", r"llama-?2-\d+b-chat": "llama2"}


def find_template(choice: str, *names: str) -> str | None:
    """The template to add to a checkpoint that has none; None to add none.

    choice: "auto" goes by the names (of the source, of its config), "none" adds none, else one of `TEMPLATES`
    or a file. Raises InputError if it is none of these.
    """
    if choice == "none":
        return None
    if choice == "auto":
        for pattern, template in PUBLISHED_NAMES.items():
            if any(re.search(pattern, name, re.IGNORECASE) for name in names):
                return TEMPLATES[template]
        return None
    if choice in TEMPLATES:
        return TEMPLATES[choice]
    try:
        return read_text(choice, LONGEST)
    except InputError as e:
        raise InputError(
            f"--template {choice}: none of auto, none, {', '.join(TEMPLATES)} or a readable file ({e})"
        ) from None
