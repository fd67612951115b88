"""The tokenizer of a checkpoint: text to token ids and back, and the ids of a conversation.

Two facts explain the code.

Decoding is a table. Every id stands for some bytes, a control token for none. A text is the concatenation of
its bytes read as UTF-8. So a stream of ids needs only an incremental UTF-8 decoder: constant work per token,
and nothing is decoded twice.

Control tokens never come out of a user's text. The libraries are told not to look for them. In a rendered
chat template we find them ourselves; those that the messages contain are hidden then (`ControlTokenMask`).
"""
from __future__ import annotations

import codecs
import re
import shutil
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from pathlib import Path

from tokenizers import AddedToken

from common.cli import one_line
from common.errors import InputError
from common.files import read_json
from tokens.backends import Backend, JsonBackend, SentencePieceBackend, special_tokens_map
from tokens.chat_template import ControlTokenMask, read_template, render_template

# The first that exists is used.
ENCODERS = {"tokenizer.json": JsonBackend, "tokenizer.model": SentencePieceBackend}
FILES = (
    *ENCODERS, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
)


def copy_files(source: Path, target: Path) -> bool:
    """Copy the tokenizer files of one folder to another.

    Returns False, and copies nothing, if the folder has no tokenizer. Raises InputError if its files do not
    load.
    """
    if not any((source / name).is_file() for name in ENCODERS):
        return False
    Tokenizer.load(source)  # better now than at the first prompt
    for name in FILES:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    return True


class Tokenizer:
    """The tokenizer of a checkpoint folder; make it with `Tokenizer.load`.

    vocab_size: how many ids stand for something; a model's embedding may have more rows.
    bos_id: the id of BOS, None if there is no such token.
    adds_bos: whether plain text starts with BOS.
    has_template: whether `chat` works.
    control: text -> id of every control token.
    """

    def __init__(self, backend: Backend, config: dict, template: str | None):
        self.backend, self.template = backend, template
        self.special_tokens_map = backend.special_tokens_map | special_tokens_map(config)
        self.vocab_size, self.has_template = backend.size, template is not None
        self.control = {token.content: i for i, token in backend.added.items() if token.special}
        bos = self.special_tokens_map.get("bos_token")
        self.bos_id = backend.bos_id if bos is None else backend.id_of(bos)
        add_bos = config.get("add_bos_token")
        self.adds_bos = self.bos_id is not None and (backend.adds_bos if add_bos is None else bool(add_bos))

        # What is cut out of a text before the backend sees it: a pattern, and the ids of its tokens. The
        # pattern for rendered templates has all added tokens, because the leftmost and longest match wins
        # whatever its kind. A match without an id is left to the backend, which finds it by itself.
        unmatched = {token.content: i for i, token in backend.added.items() if i in backend.unmatched}
        self._cut_rendered = _pattern(backend.added.values()), self.control | unmatched
        self._cut_plain = _pattern(t for t in backend.added.values() if t.content in unmatched), unmatched

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer in this folder, None if it has none. Raises InputError if its files are damaged."""
        folder, config = Path(folder), {}
        encoder = next((name for name in ENCODERS if (folder / name).is_file()), None)
        if encoder is None:
            return None
        for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second has the last word
            if (folder / name).is_file():
                config |= {k: v for k, v in read_json(folder / name).items() if v is not None}
        try:
            return cls(ENCODERS[encoder](folder / encoder, config), config, read_template(folder, config))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OSError) as e:
            raise InputError(f"{folder}: the tokenizer's files are damaged ({one_line(e)})") from None

    def encode(self, text: str, bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text.

        bos: put BOS in front, if the model wants one and the text does not start with it.
        special: control tokens spelled out in the text count as such; true for a rendered chat template.
        """
        ids = self.backend.encode(self._cut(text, special))
        return [self.bos_id, *ids] if bos and self.adds_bos and ids[:1] != [self.bos_id] else ids

    @cached_property
    def piece(self) -> Callable[[int], bytes]:
        """The bytes an id stands for: none for control tokens and for ids past the vocabulary."""
        @cache
        def piece(i: int) -> bytes:
            added = self.backend.added.get(i)
            if added:
                return b"" if added.special else added.content.encode()
            return self.backend.bytes_of(i) if 0 <= i < self.vocab_size else b""
        return piece

    def same_ids(self, other: Tokenizer) -> bool:
        """Whether every id stands for the same bytes, or the same control token, in both."""
        sizes = self.vocab_size == other.vocab_size and self.control == other.control
        return sizes and all(self.piece(i) == other.piece(i) for i in range(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. Control tokens are skipped; bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream()
        return stream.push(ids) + stream.flush()

    def stream(self) -> TextStream:
        """A decoder that takes ids as they come."""
        return TextStream(self)

    def chat(self, messages: list[dict], **variables) -> list[int]:
        """Token ids of a conversation ({"role", "content"} dicts) up to where the assistant begins to speak.

        BOS is there if the template writes it. `variables` are handed to the template, such as
        `enable_thinking`, or `add_generation_prompt=False` for a conversation that ends with an answer. What
        the messages contain never becomes a control token. Raises InputError if there is no template or the
        template refuses the messages.
        """
        mask = ControlTokenMask(self.control, messages, self.template)
        parts = self._cut(self.render(mask.hide(messages), **variables), special=True)
        return self.backend.encode([p if isinstance(p, int) else mask.restore(p) for p in parts])

    def render(self, messages: list[dict], **variables) -> str:
        """The text of a conversation, control tokens spelled out. Raises InputError as `chat` does."""
        if self.template is None:
            raise InputError("this checkpoint has no chat template; pass the prompt as plain text")
        return render_template(self.template, messages, self.special_tokens_map | variables)

    def _cut(self, text: str, special: bool) -> list[str | int]:
        """Cut a text at the tokens we match ourselves: str for the text between them, int for their ids."""
        # Lone surrogates, from a terminal or from JSON, have no bytes.
        text = text.encode("utf-8", "replace").decode()
        pattern, ids = self._cut_rendered if special else self._cut_plain
        parts, start = [], 0
        for m in pattern.finditer(text):
            # The pattern may have taken in spaces (lstrip, rstrip).
            token = ids.get(m[0], ids.get(m[0].strip()))
            if token is not None:
                parts += [text[start : m.start()], token]
                start = m.end()
        return [p for p in (*parts, text[start:]) if p != ""]


class TextStream:
    """Ids in, text out, as early as it is certain.

    The texts of all pushes and of the flush, joined, equal `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._piece = tokenizer.piece
        self._strip = tokenizer.backend.strips_space  # the space that encoding put before the first word
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete. A character waits for its missing bytes."""
        data = b"".join(map(self._piece, ids))
        if data and self._strip:
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The text that still waits: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern:
    """Matches any of these tokens, the longest first; nothing if there are none."""
    def pattern_of(token: AddedToken) -> str:
        text = re.escape(token.content)
        word = rf"(?<!\w){text}(?!\w)" if token.single_word else text
        return r"\s*" * token.lstrip + word + r"\s*" * token.rstrip
    longest_first = sorted(tokens, key=lambda token: -len(token.content))
    return re.compile("|".join(map(pattern_of, longest_first)) or r"(?!)")
