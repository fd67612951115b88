"""Chat templates: choosing, reading and rendering one, and hiding the control tokens that a user typed.

`chat_templates/` has templates for models whose files carry none. They render the strings of FastChat's
conversation templates (`vicuna_v1.1` and `llama-2`, https://github.com/lm-sys/FastChat), which the papers'
evaluations use. FastChat's script for Llama 2 adds a space after `[/INST]`. Ours does not, because no
training text has it.

A template runs in this process, in jinja's immutable sandbox. We trust the user's checkpoints not to run
for ever.
"""
from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InputError, one_line
from common.files import read_json, read_text
from tokens.files import TEMPLATE_FILES, TOOL_TEMPLATES, has

_FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {name: (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("vicuna", "llama2")}
# Pattern of the name under which a model is published: its template.
PUBLISHED_NAMES = {r"vicuna": "vicuna", r"llama-?2-\d+b-chat": "llama2"}
JOINED = 64  # longest control token, in characters, whose end is searched for at the start of a text


def find_template(choice: str, *names: str) -> str | None:
    """Return the template to add to a checkpoint that has none; None to add none.

    choice: "auto" goes by the names (of the source, of its config), "none" adds none, else one of
    `TEMPLATES` or a file. Raises InputError on any other choice.
    """
    if choice == "none":
        return None
    if choice == "auto":
        known = (TEMPLATES[template] for pattern, template in PUBLISHED_NAMES.items()
                 if any(re.search(pattern, name, re.IGNORECASE) for name in names))
        return next(known, None)
    return TEMPLATES[choice] if choice in TEMPLATES else read_text(choice, what="--template")


class Template(NamedTuple):
    """A chat template, None if there is none, and the file that it stands in."""

    text: str | None
    file: Path


def read_templates(folder: Path, settings: dict) -> tuple[Template, Template]:
    """Return the chat templates of a folder without and with tools; they are one if it has only one.

    settings: of `tokens.files: tokenizer_settings`. Raises InputError if a file is damaged.
    """
    own = next((name for name in TEMPLATE_FILES if has(folder, name)), None)
    file = folder / (own or "tokenizer_config.json")
    if file.suffix == ".jinja":
        found = read_text(file)
    else:
        found = (read_json(file) if own else settings).get("chat_template")
    # [{"name": "default", "template": ...}, {"name": "tool_use", ...}], or an object of the same
    named = {x["name"]: x["template"] for x in found} if isinstance(found, list) else found
    by_name = named if isinstance(named, dict) else {"default": named}
    text = by_name.get("default", next(iter(by_name.values()), None))
    for_tools = Template(by_name.get("tool_use", text), file)
    for name in TOOL_TEMPLATES:
        if has(folder, name):
            for_tools = Template(read_text(folder / name), folder / name)
    return (for_tools if text is None else Template(text, file)), for_tools


def render_template(template: Template, messages: list[dict], variables: dict) -> str:
    """Return the text of a conversation. Raises InputError if the template is damaged or refuses it."""
    # Templates test for tools and documents, so these must be defined.
    context = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    try:
        return _compile(template.text).render({**context, "messages": messages})
    except Exception as e:  # a template can raise anything
        raise InputError(f"{template.file}: chat template: {one_line(e)}") from None


class _Generation(Extension):
    """`{% generation %}`: some templates mark the assistant's words with it, for training. No effect here."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson  # jinja's own escapes <, > and & for HTML
    environment.globals.update(raise_exception=_raise, strftime_now=lambda fmt: datetime.now().strftime(fmt))
    return environment.from_string(template)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)


class ControlTokenMask:
    """Hides control tokens in messages from the search for the control tokens of the template.

    A private character replaces the first character of a control token in a text, of the start of one at the
    text's end, and of the end of one at its start. Templates trim, split and test the messages. A single
    character survives that, and the original takes its place again after the search. A template that takes
    words out of the middle of a text, or writes it in other letters, can still make a control token.
    """

    def __init__(self, control: Collection[str], template: str):
        self._control, self._longest = tuple(control), max(map(len, control), default=0)
        self._ends = {t[i:] for t in control if len(t) <= JOINED for i in range(1, len(t))}
        self._hidden = sorted({text[0] for texts in (control, self._ends) for text in texts})
        self._used = set(template).union(*control)
        # Sorted, tokens that start alike stand together: the regular expression tests their start once.
        groups = ("|".join(map(re.escape, words)) for _, words in groupby(sorted(control), lambda t: t[0]))
        self._pattern = re.compile("(?=" + ("|".join(f"(?:{words})" for words in groups) or "(?!)") + ")")

    def hide(self, given: object) -> tuple[object, dict[int, str]]:
        """Return `given`, lists and dictionaries of texts, with masks, and the table that takes them away.

        The table is for `str.translate`.
        """
        used = self._used.union(*_texts_of(given))
        # From the last private character of Unicode down.
        free = (chr(c) for c in range(0x10FFFD, 0xE000, -1) if chr(c) not in used)
        masks = {hidden: next(free) for hidden in self._hidden}

        def masked(value):
            if isinstance(value, dict):
                return {masked(key): masked(v) for key, v in value.items()}
            if isinstance(value, (list, tuple)):
                return [masked(v) for v in value]
            return self._hide_in(value, masks) if isinstance(value, str) else value

        return masked(given), {ord(mask): hidden for hidden, mask in masks.items()}

    def _hide_in(self, text: str, masks: dict[str, str]) -> str:
        places = {found.start() for found in self._pattern.finditer(text)}
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for at in range(max(0, end - self._longest), end):
            if text[at] in masks and any(t.startswith(text[at:end]) for t in self._control):
                places.add(at)
        if any(text[begin:to] in self._ends for to in range(begin + 1, min(end, begin + JOINED) + 1)):
            places.add(begin)
        parts, done = [], 0  # one character takes the place of one: positions stay
        for at in sorted(places):
            parts += text[done:at], masks[text[at]]
            done = at + 1
        return "".join((*parts, text[done:]))


def _texts_of(value: object) -> Iterator[str]:
    """Yield every text in lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts_of(item)
