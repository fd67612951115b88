"""Render chat templates; mask control tokens that a user typed.

A template runs in this process, in jinja's immutable sandbox. We trust the user's checkpoints not to loop
forever.
"""
from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from datetime import datetime
from functools import lru_cache
from itertools import groupby

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InputError, one_line
from tokens.files import Template

PLAIN_KEYS, ROLES = {"role", "content"}, ("system", "user", "assistant")
MAX_SPLIT = 64  # maximum length of control tokens whose ends are hidden at a message's start


def normalize_messages(messages: list[dict], variables: dict) -> tuple[list[dict], dict]:
    """Return messages and variables as templates take them. Plain messages skip `tokens.messages`."""
    is_plain = (m.keys() == PLAIN_KEYS and m["role"] in ROLES and type(m["content"]) is str for m in messages)
    if all(is_plain) and "continue_final_message" not in variables:
        return messages, variables
    from tokens.messages import ready_with

    return ready_with(messages, variables)


def render_template(template: Template, messages: list[dict], variables: dict) -> str:
    """Return the text of a conversation. Raises InputError if the template is damaged or refuses it."""
    # Templates test for tools and documents, so these must be defined.
    context = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    try:
        compiled = _compile(template.text)
        if "continue_final_message" in context or any(m.get("content", "") is None for m in messages):
            from tokens.messages import render

            return render(compiled, context, messages)
        return compiled.render({**context, "messages": messages})
    except Exception as e:  # a template can raise anything
        raise InputError(f"{template.file.name}: chat template: {one_line(e)}") from None


class _Generation(Extension):
    """`{% generation %}`: some templates mark the assistant's words with it, for training. No effect here."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    tags = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=tags)
    environment.filters["tojson"] = _tojson  # jinja's own escapes <, > and & for HTML
    environment.globals.update(raise_exception=_raise, strftime_now=lambda fmt: datetime.now().strftime(fmt))
    return environment.from_string(template)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)


class ControlTokenMask:
    """Hides control tokens in messages from the search for the control tokens of the template.

    In a message, a private-use character replaces the first character of each control token, also of one that
    is split at the message's start or end. Templates trim, split and test messages: a single character
    survives that, and is put back after the search. A template that cuts words out of a message, or changes
    their case, can still make a control token.
    """

    def __init__(self, control: Collection[str], template: str):
        self._control, self._longest = tuple(control), max(map(len, control), default=0)
        self._ends = {t[i:] for t in control if len(t) <= MAX_SPLIT for i in range(1, len(t))}
        self._hidden = sorted({text[0] for texts in (control, self._ends) for text in texts})
        self._used = set(template).union(*control)
        # Grouped by first character, so that the regular expression tests it once.
        groups = ("|".join(map(re.escape, words)) for _, words in groupby(sorted(control), lambda t: t[0]))
        self._pattern = re.compile("(?=" + ("|".join(f"(?:{words})" for words in groups) or "(?!)") + ")")

    def hide(self, given: object) -> tuple[object, dict[int, str]]:
        """Return `given`, nested lists and dictionaries, with masked texts, and the table that unmasks them.

        The table is for `str.translate`.
        """
        used = self._used.union(*_texts_of(given))
        # From the last private character of Unicode down.
        free = (chr(c) for c in range(0x10FFFD, 0xE000, -1) if chr(c) not in used)
        masks = {hidden: next(free) for hidden in self._hidden}

        def masked(value):
            if hasattr(value, "changed"):  # `tokens.messages.Arguments`
                return value.changed(masked)
            if isinstance(value, dict):
                return {masked(key): masked(v) for key, v in value.items()}
            if isinstance(value, (list, tuple)):
                return [masked(v) for v in value]
            return self._hide_in(value, masks) if isinstance(value, str) else value

        return masked(given), {ord(mask): hidden for hidden, mask in masks.items()}

    def _hide_in(self, text: str, masks: dict[str, str]) -> str:
        positions = {found.start() for found in self._pattern.finditer(text)}
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for at in range(max(0, end - self._longest), end):
            if text[at] in masks and any(t.startswith(text[at:end]) for t in self._control):
                positions.add(at)
        if any(text[begin:to] in self._ends for to in range(begin + 1, min(end, begin + MAX_SPLIT) + 1)):
            positions.add(begin)
        parts, done = [], 0  # one character replaces one: positions stay
        for at in sorted(positions):
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
