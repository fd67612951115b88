"""Encode chats so that control tokens in messages stay plain text.

`ControlTokenMask` hides them while the template is rendered. If the unmasked text has more control tokens
than the masked one, only those of the template are encoded as special tokens (`SpanEncoder`).
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

MAX_SPLIT = 64  # characters; the end of a longer control token is not hidden at a message's start
Span = tuple[int, int, int]  # start, end, id of a token in a text


class AddedTokenFinder:
    """Finds added tokens in a text as `tokenizers` does. ids: text -> id of the tokens to find."""

    def __init__(self, tokens: Iterable[AddedToken], ids: dict[str, int], normalizer=None):
        # The text between two added tokens is one unknown token.
        self._model = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._model.normalizer = normalizer
        self._model.add_tokens([*tokens])
        known = {i: token.content for i, token in self._model.get_added_tokens_decoder().items()}
        self._found = {i: (content, ids[content]) for i, content in known.items() if content in ids}

    def find(self, text: str, normalized: bool = True) -> list[Span]:
        """Return (start, end, id) of each token; the span includes white space that it strips.

        normalized: also spellings that match a token only after the normalizer has changed them.
        """
        found = self._model.encode(text)
        spans = ((*span, *self._found[i]) for span, i in zip(found.offsets, found.ids) if i in self._found)
        return [(a, b, i) for a, b, content, i in spans if normalized or content in text[a:b]]


class SpanEncoder:
    """Encodes a text in which only some spans are special tokens, with the tokenizer of a `JsonBackend`.

    finder: finds control tokens.
    """

    def __init__(self, backend: JsonBackend):
        self._model, nonce = backend.copy(), secrets.token_hex(8)
        self.finder = AddedTokenFinder(backend.added.values(), backend.control, self._model.normalizer)
        self._placeholders = {i: f"\ue000{nonce}:{i}\ue001" for i in backend.control.values()}
        self._model.add_tokens([AddedToken(text, normalized=False) for text in self._placeholders.values()])
        self._originals = {self._model.token_to_id(text): i for i, text in self._placeholders.items()}
        self._model.encode_special_tokens = True

    def encode_at(self, text: str, spans: list[Span]) -> list[int]:
        """Return the ids. A placeholder that occurs in no text replaces each span."""
        starts = [0, *(end for _, end, _ in spans)]
        pairs = zip(starts, spans)
        cut = "".join(text[start:begin] + self._placeholders[i] for start, (begin, _, i) in pairs)
        ids = self._model.encode_batch_fast([cut + text[starts[-1] :]], add_special_tokens=False)[0].ids
        return [self._originals.get(i, i) for i in ids]


class MaskedChat:
    """Encodes chats with a tokenizer and its backend."""

    def __init__(self, tokenizer: Tokenizer, backend):
        templates = f"{tokenizer.template}{tokenizer.tool_template}"
        self._tokenizer, self._mask = tokenizer, ControlTokenMask(tokenizer.control, templates)
        self._encoder = backend if hasattr(backend, "encode_at") else SpanEncoder(backend)

    def encode(self, messages: list[dict], variables: dict) -> list[int]:
        """As `Tokenizer.chat`."""
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
