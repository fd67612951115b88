"""Chat templates: reading one, rendering it, and hiding the control tokens that a user typed."""
from __future__ import annotations

import json
import re
from collections.abc import Collection
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import jinja2
from jinja2.ext import Extension

from common.cli import one_line
from common.errors import InputError
from common.files import read_json, read_text
from tokens.bounds import BoundedEnvironment, Bounds, template_error
from tokens.files import TOKENIZER_CONFIG, has
from tokens.messages import texts_of

LONGEST = 4 << 20  # of a template
JOINED = 64  # characters, at most, of a control token whose end is looked for where a text begins


def read_template(folder: Path, config: dict) -> tuple[str | None, Path]:
    """The chat template of a checkpoint's folder, None if it has none, and the file that it is in.

    config: its tokenizer_config.json, which has been judged. Raises OSError or InputError if it is damaged.
    """
    file = folder / "chat_template.jinja"
    if has(folder, file.name):
        return read_text(file, LONGEST), file
    file = folder / "chat_template.json"
    if has(folder, file.name):
        config = TOKENIZER_CONFIG.require(read_json(file), file)
    else:
        file = folder / "tokenizer_config.json"
    template = config.get("chat_template")
    if isinstance(template, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", next(iter(by_name.values()), None))
    if template is not None and len(template) > LONGEST:
        raise InputError(f"{file}: chat_template has {len(template):,} characters, at most {LONGEST:,}")
    return template, file


def render_template(template: str, messages: list[dict], variables: dict, where: str | Path) -> str:
    """The text of a conversation. where: the file that the template is in, for errors.

    Raises InputError if the template is damaged, refuses the messages, or does too much: `tokens.bounds`.
    """
    # Templates test for tools and documents, so they must be there.
    context = {"tools": None, "documents": None, "add_generation_prompt": True, **variables}
    try:
        compiled = _compile(template)
        compiled.environment.bounds = Bounds(sum(map(len, texts_of([messages, variables]))))
        return compiled.render({**context, "messages": messages})
    except Exception as e:  # a template is a program of the checkpoint's author: it can raise anything
        raise InputError(f"{where}: chat template: {one_line(template_error(e))}") from None


class ControlTokens:
    """How texts may hold control tokens, or parts of them: what `ControlTokenMask` looks for.

    first: characters that are hidden. ends: what a token ends with, without its beginning.
    """

    def __init__(self, control: Collection[str]):
        self.all, self.longest = tuple(control), max(map(len, control), default=0)
        self.ends = {t[i:] for t in control if len(t) <= JOINED for i in range(1, len(t))}
        self.first = sorted({text[0] for texts in (control, self.ends) for text in texts})
        self.characters = set().union(*control)
        # Sorted, those that begin alike stand together: what they share is looked at once.
        groups = ("|".join(map(re.escape, words)) for _, words in groupby(sorted(control), lambda t: t[0]))
        self.pattern = re.compile("(?=" + ("|".join(f"(?:{words})" for words in groups) or "(?!)") + ")")


class ControlTokenMask:
    """Hides control tokens in messages from the search for the control tokens of the template.

    Where a text holds a control token, or ends in what could be the beginning of one, the character that the
    token starts with is replaced by a private one while the template is rendered and control tokens are
    searched for; so is the first character of a text that begins with the end of one. Templates trim, split
    and test the messages. A single character survives that, and `restore` puts the original in its place.
    What a template itself makes of a text, by taking words out of its middle or by writing it in other
    letters, is the template's.

    given: all that the template is given.
    """

    def __init__(self, control: ControlTokens, given: object, template: str | None):
        used = control.characters.union(template or "", *texts_of(given))
        # From the last private character of Unicode down.
        free = (chr(c) for c in range(0x10FFFD, 0xE000, -1) if chr(c) not in used)
        self._control, self._masks = control, {first: next(free) for first in control.first}

    def hide(self, value):
        """`value` (a text, or lists and dictionaries of texts) with its control tokens masked."""
        if isinstance(value, dict):
            return {self.hide(key): self.hide(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(v) for v in value]
        if not isinstance(value, str):
            return value
        control, end = self._control, len(value.rstrip())
        places = {found.start() for found in control.pattern.finditer(value)}
        for at in range(max(0, end - control.longest), end):
            if value[at] in self._masks and any(t.startswith(value[at:end]) for t in control.all):
                places.add(at)
        begin = len(value) - len(value.lstrip())
        if any(value[begin:to] in control.ends for to in range(begin + 1, min(end, begin + JOINED) + 1)):
            places.add(begin)
        # One character takes the place of one: positions stay.
        parts, done = [], 0
        for at in sorted(places):
            parts += value[done:at], self._masks[value[at]]
            done = at + 1
        return "".join((*parts, value[done:]))

    def restore(self, text: str) -> str:
        """A rendered text as it is without masks."""
        return text.translate({ord(mask): first for first, mask in self._masks.items()})


class _Generation(Extension):
    """`{% generation %}`: some templates mark the assistant's words with it, for training. No effect here."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.add_filters(tojson=_tojson)  # jinja's own escapes <, > and & for HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)
