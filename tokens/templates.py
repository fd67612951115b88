"""Chat templates of models whose files carry none, and the choice of one when a target is converted.

The strings are those of FastChat's conversation templates `vicuna_v1.1` and `llama-2`, which the papers'
evaluations use (their Llama-2 script appends one more space after `[/INST]`; we do not, no training text has
it).
"""
from __future__ import annotations

import re
from pathlib import Path

from common.errors import InputError

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
LLAMA2_SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe.  "
    "Your answers should not include any harmful, unethical, racist, sexist, toxic, dangerous, or illegal content. "
    "Please ensure that your responses are socially unbiased and positive in nature.\n\n"
    "If a question does not make any sense, or is not factually coherent, explain why instead of answering something not correct. "
    "If you don't know the answer to a question, please don't share false information."
)


def _split_system(default: str) -> str:
    """Jinja: `system` and `turns`, taken off the messages."""
    quoted = default.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return (
        "{%- if messages and messages[0].role == 'system' -%}{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}"
        f"{{%- else -%}}{{%- set system = '{quoted}' -%}}{{%- set turns = messages -%}}{{%- endif -%}}"
    )


TEMPLATES = {
    "vicuna": _split_system(VICUNA_SYSTEM)
    + "{{- bos_token + system -}}{%- for m in turns -%}"
    "{%- if m.role == 'user' -%}{{- ('' if not loop.first else ' ' if system else '') + 'USER: ' + m.content + ' ASSISTANT:' -}}"
    "{%- else -%}{{- ' ' + m.content + eos_token -}}{%- endif -%}{%- endfor -%}",
    "llama2": _split_system(LLAMA2_SYSTEM)
    + "{%- for m in turns -%}{%- if m.role == 'user' -%}"
    "{{- bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system else '') -}}"
    "{{- m.content + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + m.content + ' ' + eos_token -}}{%- endif -%}{%- endfor -%}",
}
# Names under which the models are published.
NAMED = {r"vicuna": "vicuna", r"llama-?2-\d+b-chat": "llama2"}


def find_template(choice: str, *names: str) -> str | None:
    """The template to add to a checkpoint that has none.

    choice: "auto" goes by the names (of the source, of its config), "none" adds none, else one of `TEMPLATES`
    or a file. Raises InputError if it is none of these.
    """
    if choice == "none":
        return None
    if choice == "auto":
        return next(
            (
                TEMPLATES[t] for pattern,
                t in NAMED.items() for n in names if re.search(pattern, n, re.IGNORECASE)
            ), None
        )
    if choice in TEMPLATES:
        return TEMPLATES[choice]
    try:
        return Path(choice).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(
            f"--template {choice}: none of auto, none, {', '.join(TEMPLATES)} or a readable file ({e})"
        ) from None
