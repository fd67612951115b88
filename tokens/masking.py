"""Encode chats so that control tokens in messages stay plain text.

`ControlTokenMask` hides them while the template is rendered. If the text without masks has more control
tokens than the masked one, only those of the template are encoded as special tokens (`SpanEncoder`).
"""
from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, models

from tokens.messages import normalize_chat

if TYPE_CHECKING:
    from tokens.tokenizer import JsonBackend, Tokenizer

# In characters. At a message's start, ends of control tokens longer than this are not hidden.
MAX_SPLIT = 64
Span = tuple[int, int, int]  # start, end, id of a token in a text


class AddedTokenFinder:
    """Finds added tokens in a text as `tokenizers` does. ids: text -> id of the tokens to find."""

    def __init__(self, tokens: Iterable[AddedToken], ids: dict[str, int], normalizer=None):
        # The text between two added tokens is one unknown token.
        self._tokenizer = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._tokenizer.normalizer = normalizer
        self._tokenizer.add_tokens([*tokens])
        contents = {i: token.content for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._found = {i: (content, ids[content]) for i, content in contents.items() if content in ids}

    def find(self, text: str, normalized: bool = True) -> list[Span]:
        """Return (start, end, id) of each token; the span includes white space that it strips.

        normalized: include texts that equal a token only after normalization.
        """
        found = self._tokenizer.encode(text)
        spans = ((*span, *self._found[i]) for span, i in zip(found.offsets, found.ids) if i in self._found)
        return [(a, b, i) for a, b, content, i in spans if normalized or content in text[a:b]]


class SpanEncoder:
    """Encodes a text in which only some spans are special tokens, with the tokenizer of a `JsonBackend`.

    finder: an `AddedTokenFinder` of control tokens.
    """

    def __init__(self, backend: JsonBackend):
        self._tokenizer = tokenizer = backend.copy()
        self.finder = AddedTokenFinder(backend.added.values(), backend.control, tokenizer.normalizer)
        nonce = secrets.token_hex(8)
        self._placeholders = {i: f"\ue000{nonce}:{i}\ue001" for i in backend.control.values()}
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in self._placeholders.values()])
        self._originals = {tokenizer.token_to_id(text): i for i, text in self._placeholders.items()}
        tokenizer.encode_special_tokens = True

    def encode_at(self, text: str, spans: list[Span]) -> list[int]:
        """Return the ids. Each span is encoded as a placeholder that occurs in no text."""
        replaced, done = "", 0
        for start, end, i in spans:
            replaced, done = replaced + text[done:start] + self._placeholders[i], end
        ids = self._tokenizer.encode_batch_fast([replaced + text[done:]], add_special_tokens=False)[0].ids
        return [self._originals.get(i, i) for i in ids]


class MaskedChat:
    """Encodes chats with a tokenizer and its backend."""

    def __init__(self, tokenizer: Tokenizer, backend):
        templates = f"{tokenizer.template}{tokenizer.tool_template}"
        self._tokenizer, self._mask = tokenizer, ControlTokenMask(tokenizer.control, templates)
        self._encoder = backend if hasattr(backend, "encode_at") else SpanEncoder(backend)

    def encode(self, messages: list[dict], variables: dict) -> list[int]:
        """See `Tokenizer.chat`."""
        tokenizer, find = self._tokenizer, self._encoder.finder.find
        (messages, variables), originals = self._mask.hide(normalize_chat(messages, variables))
        rendered = tokenizer.render(messages, **variables).encode("utf-8", "replace").decode()
        text = rendered.translate(originals)
        with tokenizer.encoding_errors():
            spans = find(rendered, normalized=False)
            if {*find(text)} <= {*spans}:
                return tokenizer.encode(text, bos=False, parse_special=True)
            return self._encoder.encode_at(text, spans)  # messages spell control tokens


class ControlTokenMask:
    """Hides control tokens in messages from the search for the control tokens of the template.

    In a message, a private-use character replaces the first character of each control token, also of parts at
    the message's start or end, which the template may complete. A single character survives trimming and
    splitting by templates; it is restored after the search. A template that removes parts of a message, or
    changes their case, can still produce a control token.
    """

    def __init__(self, control: Collection[str], template: str):
        self._control, self._longest = tuple(control), max(map(len, control), default=0)
        self._ends = {t[i:] for t in control if len(t) <= MAX_SPLIT for i in range(1, len(t))}
        self._hidden = sorted({text[0] for texts in (control, self._ends) for text in texts})
        self._used = set(template).union(*control)
        # Grouped by first character, so that the regular expression tests it once.
        groups = ("|".join(map(re.escape, group)) for _, group in groupby(sorted(control), lambda t: t[0]))
        self._pattern = re.compile("(?=" + ("|".join(f"(?:{group})" for group in groups) or "(?!)") + ")")

    def hide(self, value: object) -> tuple[object, dict[int, str]]:
        """Return `value`, nested lists and dictionaries, with masked texts, and the table that restores them.

        The table is for `str.translate`.
        """
        used = self._used.union(*_texts_of(value))
        # Private-use characters, from the last one (U+10FFFD) down.
        unused = (chr(c) for c in range(0x10FFFD, 0xE000, -1) if chr(c) not in used)
        masks = {hidden: next(unused) for hidden in self._hidden}

        def mask(item):
            if hasattr(item, "changed"):  # `tokens.messages.Arguments`
                return item.changed(mask)
            if isinstance(item, dict):
                return {mask(key): mask(v) for key, v in item.items()}
            if isinstance(item, (list, tuple)):
                return [mask(v) for v in item]
            return self._hide_in(item, masks) if isinstance(item, str) else item

        return mask(value), {ord(private): hidden for hidden, private in masks.items()}

    def _hide_in(self, text: str, masks: dict[str, str]) -> str:
        positions = {found.start() for found in self._pattern.finditer(text)}
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for at in range(max(0, end - self._longest), end):
            if text[at] in masks and any(t.startswith(text[at:end]) for t in self._control):
                positions.add(at)
        if any(text[start:to] in self._ends for to in range(start + 1, min(end, start + MAX_SPLIT) + 1)):
            positions.add(start)
        parts, done = [], 0  # positions stay valid: each character becomes one character
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
