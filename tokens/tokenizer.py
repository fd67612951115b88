"""The tokenizer of a checkpoint: text to token ids and back, and the ids of a conversation.

Encoding is done by the libraries, in a process of its own: the files of a checkpoint may hold patterns and
templates that never end, and a library may end its process (see `tokens.guard`).

Decoding is a table. Every id stands for some bytes, a control token for none. A text is the concatenation of
its bytes read as UTF-8. So a stream of ids needs only an incremental UTF-8 decoder: constant work per token,
and nothing is decoded twice.
"""
from __future__ import annotations

import codecs
import shutil
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from pathlib import Path

from common.errors import InputError
from tokens.files import FILES, GGUF_ADVICE, file_of, has
from tokens.guard import GUARD, Guarded
from tokens.messages import texts_of
from tokens.spelling import TooLong, spelled

MUCH = 1 << 20  # characters


def copy_files(source: Path, target: Path) -> bool:
    """Copy the tokenizer files of one folder to another.

    Returns False, and copies nothing, if the folder has no tokenizer. Raises InputError if its files do not
    load.
    """
    if not file_of(source):
        return False
    Tokenizer.load(source)  # better now than at the first prompt
    for name in FILES:
        if has(source, name) and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    return True


def from_gguf(fields: dict, folder: str | Path, where: str = "GGUF") -> None:
    """Write the tokenizer's files of a GGUF into a folder, see `tokens.gguf_tokenizer: rebuild`.

    fields: metadata key -> plain value. where: the file, for errors. Raises InputError if they are damaged,
    or of a kind that cannot be rebuilt faithfully.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    own = {key: value for key, value in fields.items() if key.startswith("tokenizer.")}
    size = GUARD.rebuild(own, Path(folder), where)
    try:
        found = Tokenizer.load(folder).vocab_size
    except InputError as e:  # which names a file that will not be there
        raise InputError(f"{where}: its tokenizer: {str(e).replace(f'{folder}/', '')}") from None
    if found != size:
        raise InputError(f"{where}: its tokenizer has repeated tokens and cannot be rebuilt; {GGUF_ADVICE}")


class Tokenizer:
    """The tokenizer of a checkpoint folder; make it with `Tokenizer.load`.

    vocab_size: how many ids stand for something; a model's embedding may have more rows.
    highest: the highest id.
    bos_id: the id of BOS, None if there is no such token.
    adds_bos: whether plain text starts with BOS.
    strips_space: whether encoding puts a space before the first word, which decoding takes away.
    template: the chat template; has_template: whether `chat` works.
    control: text -> id of every control token.
    """

    def __init__(self, guarded: Guarded):
        facts = guarded.facts
        self._guarded, self.template = guarded, facts["template"]
        self.special_tokens_map = facts["special_tokens_map"]
        self.vocab_size, self.has_template = facts["size"], self.template is not None
        self.bos_id, self.adds_bos, self.strips_space = (
            facts[name] for name in ("bos_id", "adds_bos", "strips_space")
        )
        self._added = {i: b"" if special else text.encode() for i, text, special in facts["added"]}
        self.highest = max(self.vocab_size - 1, *self._added, 0)
        self.control = {text: i for i, text, special in facts["added"] if special and text}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer in this folder, None if it has none. Raises InputError if its files are damaged."""
        if not file_of(Path(folder)):
            return None
        return cls(GUARD.load(Path(folder)))

    def encode(
        self, text: str, bos: bool = True, special: bool = False, at_most: int | None = None
    ) -> list[int]:
        """Token ids of a text.

        bos: put BOS in front, if the model wants one and the text does not start with it.
        special: control tokens spelled out in the text count as such; true for a rendered chat template.
        at_most: raise `tokens.spelling.TooLong` before the work is done if there are certainly more. Raises
        InputError if the tokenizer fails.
        """
        self._check_length([text], at_most)
        return self._guarded.ask("encode", text=text, bos=bos, special=special, at_most=at_most)

    @cached_property
    def piece(self) -> Callable[[int], bytes]:
        """The bytes an id stands for: none for control tokens and for ids past the vocabulary."""
        spelling, tokens = self._guarded.facts["spelling"], self._guarded.facts["tokens"]

        @cache
        def piece(i: int) -> bytes:
            if i in self._added:
                return self._added[i]
            return spelled(spelling, tokens[i]) if 0 <= i < len(tokens) else b""
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

    def chat(self, messages: list[dict], at_most: int | None = None, **variables) -> list[int]:
        """Token ids of a conversation ({"role", "content"} dicts) up to where the assistant begins to speak.

        BOS is there if the template writes it. `variables` are handed to the template, such as
        `enable_thinking`, or `add_generation_prompt=False` for a conversation that ends with an answer. What
        the messages contain never becomes a control token. at_most: see `encode`. Raises InputError if there
        is no template, the template refuses the messages, or it does too much (see `tokens.bounds`).
        """
        self._check_length(texts_of(messages), at_most)
        return self._guarded.ask("chat", messages=messages, variables=variables, at_most=at_most)

    def _check_length(self, texts: Iterable[str], at_most: int | None) -> None:
        """Raise TooLong if texts are too long for `at_most` tokens, were they all the longest there is.

        Nothing is read for that. A template may leave a part out, so there has to be much of it.
        """
        size = sum(map(len, texts))
        if at_most is not None and size > MUCH and size > at_most * self._longest:
            fewest = -(-size // self._longest)
            raise TooLong(f"has at least {fewest:,} tokens ({size:,} characters)")

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token; few prompts ask for it."""
        spellings = self._guarded.facts["tokens"], (text for _, text, _ in self._guarded.facts["added"])
        return max((len(text) for texts in spellings for text in texts), default=1)

    def render(self, messages: list[dict], **variables) -> str:
        """The text of a conversation, control tokens spelled out. Raises InputError as `chat` does."""
        return self._guarded.ask("render", messages=messages, variables=variables)


class TextStream:
    """Ids in, text out, as early as it is certain.

    The texts of all pushes and of the flush, joined, equal `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._piece = tokenizer.piece
        self._strip = tokenizer.strips_space  # the space that encoding put before the first word
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
