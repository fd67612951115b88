"""The tokenizer of a checkpoint: encode, decode, stream, and render chat templates.

Control tokens spelled in chat messages are encoded as plain text, see `tokens.masking`.

Decoding is a table lookup of each id's bytes; control tokens have none. A stream is an incremental UTF-8
decoder: constant work per token.
"""
from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Collection, Iterable
from datetime import datetime
from functools import cache, cached_property, lru_cache
from pathlib import Path

import jinja2
import tokenizers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InputError, library_errors, one_line
from extensions import MASKED_CHAT, STOP_TEXTS, TOKENIZER_FILES, load
from tokens import files
from tokens.files import Template

# Texts are encoded one at a time; a thread pool would compete with decoding and breaks after a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class PromptTooLong(InputError):
    """A prompt does not fit in the context. The message gives its length."""


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the number of token ids that two sequences share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE (GPT-2, https://github.com/openai/gpt-2, encoder.py).

    Bytes of visible Latin-1 characters map to these, the others to U+0100 and up.
    """
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b]
    others = sorted({*range(256)} - {*visible})
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}


BYTES = byte_alphabet()


def piece_bytes(piece: str, byte_fallback: bool) -> bytes:
    """Return the bytes of a sentencepiece piece: b"\\xe2" for `<0xE2>` if `byte_fallback`."""
    if byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(files.SPACE, " ").encode()


class JsonBackend:
    """A tokenizer of the `tokenizers` library.

    size: one more than the highest id
    added: id -> `AddedToken`; those with `special` are control tokens
    special_tokens_map: "bos_token" -> "<s>", ...; the settings override it
    bos_id: the id of BOS, or None
    adds_bos: whether encoding prepends BOS by default
    strips_space: see `tokens.files.decoder_of`
    id_of: token -> its id, or None
    control: text -> id of every control token
    """

    def __init__(self, path: Path, settings: dict, model: tokenizers.Tokenizer | None = None):
        model = model or tokenizers.Tokenizer.from_file(str(path))
        self._without_special = model
        self.size, self.added = files.add_tokens(model, settings, path)
        model.no_truncation()  # some files have training settings
        model.no_padding()
        probe = model.encode("a")
        self.adds_bos = probe.special_tokens_mask[:1] == [1]
        self.bos_id = probe.ids[0] if self.adds_bos else None
        self._byte_level, self._byte_fallback, self.strips_space = files.decoder_of(model, path)
        self._with_special = self.copy()
        model.encode_special_tokens = True
        self.control = {t.content: i for i, t in self.added.items() if t.special and t.content}
        self.id_of, self._token_of = model.token_to_id, model.model.id_to_token
        self.special_tokens_map = {}

    def copy(self) -> tokenizers.Tokenizer:
        """Return a copy that parses special tokens and adds none. It shares the vocabulary."""
        model = self._without_special
        copy = tokenizers.Tokenizer(model.model)
        copy.normalizer, copy.pre_tokenizer = model.normalizer, model.pre_tokenizer
        copy.add_tokens([token for _, token in sorted(model.get_added_tokens_decoder().items())])
        return copy

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Return the ids of a text. parse_special: see `Tokenizer.encode`."""
        # The fast variant skips offsets, which would double the time and take 40 bytes per byte of text.
        model = self._with_special if parse_special else self._without_special
        return model.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def bytes_of(self, i: int) -> bytes:
        """Return the bytes of an id that is not in `added`, b"" for ids beyond the vocabulary."""
        token = self._token_of(i) or ""
        if self._byte_level:
            return bytes(BYTES[c] for c in token) if BYTES.keys() >= set(token) else token.encode()
        return piece_bytes(token, self._byte_fallback)


class Tokenizer:
    """The tokenizer of a checkpoint folder; make it with `Tokenizer.load`.

    vocab_size: one more than the highest id. Ids may be unused; a model's embedding may have more rows.
    bos_id: the id of BOS, or None.
    adds_bos: whether encoding prepends BOS to plain text.
    strips_space: whether encoding puts a space before the first word, which decoding removes.
    template, tool_template: the chat templates without and with tools, often the same.
    has_template: whether `chat` works.
    control: text -> id of every control token.
    special_tokens_map: "bos_token" -> "<s>", ...
    piece: id -> its bytes, b"" for control tokens and for ids past the vocabulary.

    It is immutable, so threads may share it; a `TextStream` must not be shared.
    """

    def __init__(self, folder: Path, encoder: str):
        self._file = folder / encoder
        with library_errors(f"{folder}: the tokenizer's files are damaged"):
            settings = files.tokenizer_settings(folder)
            with library_errors(f"{self._file}: cannot be read as a tokenizer"):
                open_backend = load(TOKENIZER_FILES[encoder]) if encoder in TOKENIZER_FILES else JsonBackend
                self._backend = backend = open_backend(self._file, settings)
            self._templates = files.read_templates(folder, settings)
            self.special_tokens_map = backend.special_tokens_map | files.special_tokens_map(settings)
            bos = self.special_tokens_map.get("bos_token")
            self.bos_id = backend.bos_id if bos is None else backend.id_of(bos)
        self.template, self.tool_template = (template.text for template in self._templates)
        self.has_template = self.template is not None
        self.adds_bos = self.bos_id is not None and bool(settings.get("add_bos_token", backend.adds_bos))
        self.strips_space = bool(backend.strips_space)
        self.control, self.vocab_size = backend.control, backend.size
        self.piece = cache(self._bytes_of)
        self._names = {i: text.encode() for text, i in self.control.items()}
        self._control_ends = {character for text in self.control for character in (text[0], text[-1])}

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """Return the tokenizer in this folder, None if it has none. Raises InputError if files are damaged.

        Cached until the files change.
        """
        folder = Path(folder)
        encoder = files.encoder_of(folder)
        if encoder is None:
            return None
        stats = [(folder / name).stat() for name in files.TOKENIZER_FILES if (folder / name).exists()]
        return _load(folder, encoder, tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats))

    def encode(self, text: str, bos: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text.

        bos: prepend BOS if `adds_bos`, unless the text starts with it.
        parse_special: parse control tokens in the text; for raw prompts and rendered chat templates.
        Raises InputError if the library fails.
        """
        text = text.encode("utf-8", "replace").decode()  # lone surrogates have no bytes
        with self.encoding_errors():
            ids = self._backend.encode(text, parse_special)
        return [self.bos_id, *ids] if bos and self.adds_bos and ids[:1] != [self.bos_id] else ids

    def encoding_errors(self):
        """Return a context that turns errors of the library into an InputError."""
        return library_errors(f"{self._file.name}: cannot encode this text")

    def chat(self, messages: list[dict], **variables) -> list[int]:
        """Apply the chat template and return the token ids, ending with the generation prompt.

        messages: {"role", "content"} dictionaries, see `tokens.messages.normalize`. variables: passed to the
        template, such as `enable_thinking`, or `add_generation_prompt=False` if the last message is an
        answer. BOS is added only by the template. With `continue_final_message=True`, or "prefix": true in
        the last message, the text ends after that message. Control tokens in messages and variables are
        encoded as text. Raises InputError if there is no template, it rejects the messages, or a content is
        not text.
        """
        if variables or not all(map(self._is_plain, messages)):
            return self._masked_chat.encode(messages, variables)
        return self.encode(self.render(messages), bos=False, parse_special=True)

    def _is_plain(self, message: dict) -> bool:
        """Return whether a message needs neither normalization nor masking of control tokens."""
        if message.keys() != PLAIN_KEYS or message["role"] not in ROLES:
            return False
        content = message["content"]
        return type(content) is str and content.isascii() and self._control_ends.isdisjoint(content)

    @cached_property
    def _masked_chat(self):
        return load(MASKED_CHAT)(self, self._backend)

    def render(self, messages: list[dict], **variables) -> str:
        """Return the text of a conversation, including control tokens. Raises InputError like `chat`."""
        if self.template is None:
            raise InputError("this checkpoint has no chat template; pass the prompt as plain text")
        template = self._templates[bool(variables.get("tools"))]
        return render_template(template, messages, self.special_tokens_map | variables)

    def decode(self, ids: Iterable[int], shown: Collection[int] = ()) -> str:
        """Return the text of some ids; invalid UTF-8 becomes U+FFFD. shown: see `stream`."""
        stream = self.stream(shown)
        return stream.push(ids) + stream.flush()

    def stream(self, shown: Collection[int] = (), continues: bool = False) -> TextStream:
        """Return an incremental decoder, see `TextStream`."""
        return TextStream(self, shown, continues)

    def output_stream(self, sampling, shown: Collection[int] = (), continues: bool = False):
        """Return a `TextStream`, or a `tokens.stops.StopStream` if there are stop strings or limits."""
        stream, stops, limits = self.stream(shown, continues), sampling.stop, sampling.limits
        return load(STOP_TEXTS).StopStream(stream, stops, limits) if stops or limits else stream

    def piece_or_name(self, i: int) -> bytes:
        """Return the bytes of an id, or the name of a control token."""
        return self._names.get(i) or self.piece(i)

    def _bytes_of(self, i: int) -> bytes:
        token = self._backend.added.get(i)
        if token is None:
            return self._backend.bytes_of(i)
        return b"" if token.special else token.content.encode()


class TextStream:
    """Incremental decoder: push ids, get the text that they complete.

    The concatenated texts of all pushes and of the flush equal `Tokenizer.decode`. control, piece: see
    `Tokenizer`. shown: ids of control tokens to show by name. continues: the output continues a text, so
    keep its leading space.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = (), continues: bool = False):
        self.control, self._tokenizer, self._shown = tokenizer.control, tokenizer, shown
        # Remove the space that encoding puts before the first word.
        self._strip = tokenizer.strips_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(self, i: int) -> bytes:
        """Return the bytes of an id, or the name of a shown control token."""
        return self._tokenizer.piece_or_name(i) if i in self._shown else self._tokenizer.piece(i)

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete. A character waits for its missing bytes."""
        data = b"".join(map(self.piece, ids))
        if data and self._strip:
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def emit(self, ids: list[int]) -> tuple[str, int, str | int | None]:
        """Return the text that ids complete, the number of ids used, and the stop string or stop id that was
        found: None here, see `tokens.stops.StopStream`.
        """
        return self.push(ids), len(ids), None

    def flush(self) -> str:
        """Return the end of the text: U+FFFD for an incomplete character, otherwise ""."""
        return self._utf8.decode(b"", final=True)


@lru_cache(maxsize=8)
def _load(folder: Path, encoder: str, stats: tuple) -> Tokenizer:
    return Tokenizer(folder, encoder)


# -- chat templates: rendered in this process, in jinja's immutable sandbox, without a time limit -----------


PLAIN_KEYS, ROLES = {"role", "content"}, ("system", "user", "assistant")

def render_template(template: Template, messages: list[dict], variables: dict) -> str:
    """Return the text of a conversation. Raises InputError if the template is invalid or rejects it."""
    # Templates read these variables, so they must be defined.
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
    """`{% generation %}`: marks the assistant's tokens for training, as in transformers. No effect here."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    tags = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=tags)
    environment.filters["tojson"] = _tojson  # jinja's default escapes <, > and &
    environment.globals.update(raise_exception=_raise, strftime_now=lambda fmt: datetime.now().strftime(fmt))
    return environment.from_string(template)


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)
