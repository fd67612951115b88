"""Text to token ids with the libraries: what runs in the process that `tokens.guard` watches.

Control tokens never come out of a user's text. The libraries are told not to look for them. In a rendered
chat template we find them ourselves; those that the messages contain are hidden then (`ControlTokenMask`).
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken

from common.cli import one_line
from common.errors import InputError
from common.files import read_json
from tokens.backends import Backend, JsonBackend, SentencePieceBackend, special_tokens_map
from tokens.chat_template import ControlTokenMask, ControlTokens, read_template, render_template
from tokens.files import FILES, TOKENIZER_CONFIG, file_of, has
from tokens.spelling import Shape, TooLong

LONGEST = 256 << 20  # bytes of a file
LONGEST_TOKEN = 4096  # characters of an added token, which are searched for in all texts
BACKENDS = {"tokenizer.json": JsonBackend, "tokenizer.model": SentencePieceBackend}


class Encoder:
    """The tokenizer of a checkpoint folder, as its libraries run it; make it with `Encoder.load`.

    template: the chat template, None if there is none. bos_id, adds_bos, control: see `tokens.tokenizer`.
    """

    def __init__(self, backend: Backend, config: dict, template: str | None, template_file: Path):
        self.backend, self.template, self._template_file = backend, template, template_file
        self.special_tokens_map = backend.special_tokens_map | special_tokens_map(config)
        added = {i: token for i, token in backend.added.items() if token.content}
        self.control = {token.content: i for i, token in added.items() if token.special}
        bos = self.special_tokens_map.get("bos_token")
        self.bos_id = backend.bos_id if bos is None else backend.id_of(bos)
        add_bos = config.get("add_bos_token")
        self.adds_bos = self.bos_id is not None and (backend.adds_bos if add_bos is None else bool(add_bos))

        # What is cut out of a text before the backend sees it: a pattern, and the ids of its tokens. The
        # pattern for rendered templates has all added tokens, because the leftmost and longest match wins
        # whatever its kind. A match without an id is left to the backend, which finds it by itself.
        unmatched = {token.content: i for i, token in added.items() if i in backend.unmatched}
        self._lstrip = {token.content for token in added.values() if token.lstrip}
        self._cut_rendered = _pattern(added.values()), self.control | unmatched
        self._cut_plain = _pattern(t for t in added.values() if t.content in unmatched), unmatched

    @classmethod
    def load(cls, folder: str | Path) -> Encoder | None:
        """The tokenizer in this folder, None if it has none. Raises InputError if its files are damaged."""
        folder, config = Path(folder), {}
        encoder = file_of(folder)
        if encoder is None:
            return None
        for name in FILES:
            if has(folder, name) and (size := (folder / name).stat().st_size) > LONGEST:
                raise InputError(f"{folder / name}: has {size:,} bytes, at most {LONGEST:,} are read")
        for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second has the last word
            if has(folder, name):
                told = TOKENIZER_CONFIG.require(read_json(folder / name), folder / name)
                config |= {k: v for k, v in told.items() if v is not None}
        try:
            backend = BACKENDS[encoder](folder / encoder, config)
            for i, token in backend.added.items():
                if len(token.content) > LONGEST_TOKEN:
                    raise InputError(
                        f"{folder / encoder}: added token {i} has {len(token.content):,} characters; expected"
                        f" at most {LONGEST_TOKEN:,}"
                    )
            return cls(backend, config, *read_template(folder, config))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OSError) as e:
            raise InputError(f"{folder}: the tokenizer's files are damaged ({one_line(e)})") from None

    def describe(self) -> dict:
        """All that `tokens.tokenizer.Tokenizer` has to know, as JSON."""
        spelling, tokens = self.backend.vocabulary()
        return {
            "size": self.backend.size, "bos_id": self.bos_id, "adds_bos": self.adds_bos,
            "strips_space": bool(self.backend.strips_space), "template": self.template,
            "special_tokens_map": self.special_tokens_map, "spelling": spelling, "tokens": tokens,
            "added": [[i, token.content, bool(token.special)] for i, token in self.backend.added.items()],
        }

    def encode(
        self, text: str, bos: bool = True, special: bool = False, at_most: int | None = None
    ) -> list[int]:
        """Token ids of a text. Arguments and errors as for `tokens.tokenizer.Tokenizer.encode`."""
        parts = self._cut(text, special)
        self._check_size(parts, at_most)
        ids = self.backend.encode(parts)
        return [self.bos_id, *ids] if bos and self.adds_bos and ids[:1] != [self.bos_id] else ids

    def chat(
        self, messages: list[dict], variables: dict, at_most: int | None, doing: Callable[[str], None]
    ) -> list[int]:
        """Token ids of a conversation. doing: is told what begins. Errors as for `Tokenizer.chat`."""
        doing("the chat template")
        mask = ControlTokenMask(self._control_tokens, [messages, variables], self.template)
        rendered = self.render(mask.hide(messages), mask.hide(variables))
        doing("the tokenizer")
        parts = [p if isinstance(p, int) else mask.restore(p) for p in self._cut(rendered, special=True)]
        self._check_size(parts, at_most)
        return self.backend.encode(parts)

    def render(self, messages: list[dict], variables: dict) -> str:
        """The text of a conversation, control tokens spelled out. Raises InputError as `Tokenizer.chat`."""
        if self.template is None:
            raise InputError("this checkpoint has no chat template; pass the prompt as plain text")
        names = self.special_tokens_map | variables
        return render_template(self.template, messages, names, self._template_file)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.control)

    @cached_property
    def _shape(self) -> Shape | None:
        return self.backend.shape()

    def _check_size(self, parts: list[str | int], at_most: int | None) -> None:
        """Raise TooLong if a text has certainly more than `at_most` tokens, before it is cut into them."""
        texts = [part for part in parts if isinstance(part, str)]
        size = sum(map(len, texts))
        if at_most is None or size <= at_most or self._shape is None:
            return
        fewest = len(parts) - len(texts) + sum(map(self._shape.fewest, texts))
        if fewest > at_most:
            raise TooLong(f"has at least {fewest:,} tokens ({size:,} characters)")

    def _cut(self, text: str, special: bool) -> list[str | int]:
        """Cut a text at the tokens we match ourselves: str for the text between them, int for their ids."""
        # Lone surrogates, from a terminal or from JSON, have no bytes.
        text = text.encode("utf-8", "replace").decode()
        pattern, ids = self._cut_rendered if special else self._cut_plain
        parts, start = [], 0
        for m in pattern.finditer(text):
            # The pattern may have taken in spaces (rstrip).
            content = m[0] if m[0] in ids else m[0].rstrip()
            token = ids.get(content)
            if token is not None:
                before = text[start : m.start()]
                parts += [before.rstrip() if content in self._lstrip else before, token]
                start = m.end()
        return [p for p in (*parts, text[start:]) if p != ""]


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern:
    """Matches any of these tokens, the longest first; nothing if there are none."""
    def pattern_of(token: AddedToken) -> str:
        text = re.escape(token.content)
        word = rf"(?<!\w){text}(?!\w)" if token.single_word else text
        return word + r"\s*" * token.rstrip  # spaces before it are looked for backwards, where there is one
    longest_first = sorted(tokens, key=lambda token: -len(token.content))
    return re.compile("|".join(map(pattern_of, longest_first)) or r"(?!)")
