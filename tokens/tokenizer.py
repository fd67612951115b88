"""The tokenizer of a checkpoint: encode, decode, stream, and render chat templates.

Control tokens spelled in chat messages are encoded as plain text: `ControlTokenMask` hides them while the
template is rendered. If the unmasked text has more control tokens than the masked one, only those of the
template are encoded as special tokens (`JsonBackend.encode_at`).

Decoding is a table lookup: each id has its bytes, a control token none. A stream needs only an incremental
UTF-8 decoder: constant work per token.
"""
from __future__ import annotations

import codecs
import json
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from functools import cache, cached_property, lru_cache
from itertools import groupby
from pathlib import Path

import jinja2
import tokenizers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, models

from common.errors import InputError, library_errors, one_line
from extensions import STOP_TEXTS, TOKENIZER_FILES, load
from tokens import files
from tokens.files import Template

# Texts are encoded one at a time. A thread pool would take cores from decoding and breaks after a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class PromptTooLong(InputError):
    """A prompt does not fit in the context. The message gives its length."""


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the number of token ids that two sequences share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE (GPT-2, https://github.com/openai/gpt-2, encoder.py).

    Visible Latin-1 characters stand for themselves, U+0100 and up for the other bytes.
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


class AddedTokenFinder:
    """Finds added tokens in a text as `tokenizers` does. ids: text -> id of the tokens to find."""

    def __init__(self, tokens: Iterable[AddedToken], ids: dict[str, int], normalizer=None):
        # The text between two added tokens is one unknown token.
        self._model = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._model.normalizer = normalizer
        self._model.add_tokens([*tokens])
        known = {i: token.content for i, token in self._model.get_added_tokens_decoder().items()}
        self._found = {i: (content, ids[content]) for i, content in known.items() if content in ids}

    def find(self, text: str, normalized: bool = True) -> list[tuple[int, int, int]]:
        """Return (start, end, id) of each token; the span includes white space that it strips.

        normalized: also spellings that match a token only after the normalizer has changed them.
        """
        found = self._model.encode(text)
        spans = ((*span, *self._found[i]) for span, i in zip(found.offsets, found.ids) if i in self._found)
        return [(a, b, i) for a, b, content, i in spans if normalized or content in text[a:b]]


class JsonBackend:
    """A tokenizer of the `tokenizers` library.

    size: one more than the highest id
    added: id -> `AddedToken`, tokens beside the vocabulary; those with `special` are control tokens
    special_tokens_map: "bos_token" -> "<s>", ..., for names that the settings lack
    bos_id, adds_bos: the id of BOS, None without one; whether a text starts with it by default
    strips_space: see `tokens.files.Decoder`
    id_of: token -> its id, None if there is no such token

    control: text -> id of every control token; finder: finds them in a text
    """

    def __init__(self, path: Path, settings: dict, model: tokenizers.Tokenizer | None = None):
        model = model or tokenizers.Tokenizer.from_file(str(path))
        self._without_special = model
        self.size, self.added = files.add_tokens(model, settings, path)
        model.no_truncation()  # some files carry the settings of their training
        model.no_padding()
        probe, nonce = model.encode("a"), secrets.token_hex(8)
        self.adds_bos = probe.special_tokens_mask[:1] == [1]
        self.bos_id = probe.ids[0] if self.adds_bos else None
        self._byte_level, self._byte_fallback, self.strips_space = files.decoder_of(model, path)
        self._with_special = copy = tokenizers.Tokenizer(model.model)  # both share the vocabulary
        copy.normalizer, copy.pre_tokenizer = model.normalizer, model.pre_tokenizer
        copy.add_tokens([token for _, token in sorted(model.get_added_tokens_decoder().items())])
        model.encode_special_tokens = True
        self.control = {t.content: i for i, t in self.added.items() if t.special and t.content}
        self.finder = AddedTokenFinder(self.added.values(), self.control, model.normalizer)
        self._placeholders = {i: f"\ue000{nonce}:{i}\ue001" for i in self.control.values()}
        model.add_tokens([AddedToken(text, normalized=False) for text in self._placeholders.values()])
        self._originals = {model.token_to_id(placeholder): i for i, placeholder in self._placeholders.items()}
        self.id_of, self._token_of = model.token_to_id, model.model.id_to_token
        self.special_tokens_map = {}

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Return the ids of a text. parse_special: see `Tokenizer.encode`."""
        # The fast form makes no offsets, which cost as much as the rest and 40 bytes per byte of text.
        model = self._with_special if parse_special else self._without_special
        return model.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_at(self, text: str, spans: list[tuple[int, int, int]]) -> list[int]:
        """Encode a text in which only these spans (start, end, id) are special tokens.

        A placeholder that occurs in no text replaces each span.
        """
        starts = [0, *(end for _, end, _ in spans)]
        pairs = zip(starts, spans)
        cut = "".join(text[start:begin] + self._placeholders[i] for start, (begin, _, i) in pairs)
        return [self._originals.get(i, i) for i in self.encode(cut + text[starts[-1] :], False)]

    def bytes_of(self, i: int) -> bytes:
        """Return the bytes of an id that is not in `added`, b"" for ids beyond the vocabulary."""
        token = self._token_of(i) or ""
        if self._byte_level:
            return bytes(BYTES[c] for c in token) if BYTES.keys() >= set(token) else token.encode()
        return piece_bytes(token, self._byte_fallback)


class Tokenizer:
    """The tokenizer of a checkpoint folder; make it with `Tokenizer.load`.

    vocab_size: one more than the highest id. Ids may be unused; a model's embedding may have more rows.
    bos_id: the id of BOS, None if there is no such token.
    adds_bos: whether plain text starts with BOS.
    strips_space: whether encoding puts a space before the first word, which decoding removes.
    template, tool_template: the chat templates without and with tools, often one; has_template: whether
    `chat` works.
    control: text -> id of every control token. stop_ids: ids of the control tokens that end generation.
    special_tokens_map: "bos_token" -> "<s>", ...
    piece: id -> its bytes, b"" for control tokens and for ids past the vocabulary.

    Nothing changes after loading, so threads may share a tokenizer, but not a `TextStream`.
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
        self.stop_ids = files.stop_ids(self.special_tokens_map.get("eos_token"), self.control)
        self._names = {i: text.encode() for text, i in self.control.items()}

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

        bos: put BOS in front, if the model wants one and the text does not start with it.
        parse_special: encode special tokens in the text as such; true for texts that are written
        for the model, such as a raw prompt or a rendered chat template.
        Raises InputError if the library fails.
        """
        text = text.encode("utf-8", "replace").decode()  # lone surrogates have no bytes
        with library_errors(f"{self._file.name}: cannot encode this text"):
            ids = self._backend.encode(text, parse_special)
        return [self.bos_id, *ids] if bos and self.adds_bos and ids[:1] != [self.bos_id] else ids

    def chat(self, messages: list[dict], **variables) -> list[int]:
        """Apply the chat template and return the token ids, ending with the generation prompt.

        messages: {"role", "content"} dictionaries, in any form that `tokens.messages.ready` reads. Only the
        template adds BOS. It gets `variables`, such as `enable_thinking`, or `add_generation_prompt=False`
        for a conversation that ends with an answer. `continue_final_message=True`, or "prefix": true in the
        last message, cuts the text after that message. Nothing in messages or variables becomes a control
        token. Raises InputError if there is no template, it rejects the messages, or a content is not text.
        """
        normalized = normalize_messages(messages, variables)
        (masked_messages, masked_variables), originals = self._mask.hide(normalized)
        rendered = self.render(masked_messages, **masked_variables).encode("utf-8", "replace").decode()
        text, find = rendered.translate(originals), self._backend.finder.find
        with library_errors(f"{self._file.name}: cannot encode this text"):
            spans = find(rendered, normalized=False)
            if {*find(text)} <= {*spans}:
                return self._backend.encode(text, parse_special=True)
            return self._backend.encode_at(text, spans)  # messages spell control tokens

    def render(self, messages: list[dict], **variables) -> str:
        """Return the text of a conversation, control tokens spelled out. Raises InputError as `chat` does."""
        if self.template is None:
            raise InputError("this checkpoint has no chat template; pass the prompt as plain text")
        template = self._templates[bool(variables.get("tools"))]
        return render_template(template, messages, self.special_tokens_map | variables)

    @cached_property
    def _mask(self):
        return ControlTokenMask(self.control, f"{self.template}{self.tool_template}")

    def decode(self, ids: Iterable[int], shown: Collection[int] = ()) -> str:
        """Return the text of some ids; invalid UTF-8 becomes U+FFFD. shown: see `stream`."""
        stream = self.stream(shown)
        return stream.push(ids) + stream.flush()

    def stream(self, shown: Collection[int] = (), continues: bool = False) -> TextStream:
        """Return a decoder that takes ids as they come. See `TextStream`."""
        return TextStream(self, shown, continues)

    def output_stream(self, sampling, shown: Collection[int] = (), continues: bool = False):
        """Return a `TextStream`, or a `tokens.stops.StopStream` if stop texts or limits may end it."""
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

    The texts of all pushes and of the flush, joined, equal `Tokenizer.decode`. control, piece: see
    `Tokenizer`. shown: ids of special tokens to write out by name. continues: the output continues a text:
    keep its first space.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = (), continues: bool = False):
        self.control, self._tokenizer, self._shown = tokenizer.control, tokenizer, shown
        # The space that encoding put before the first word.
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
        """Return the text that ids complete, the number of ids that count, and the stop text or id that ended
        it: none here, see `tokens.stops.StopStream`.
        """
        return self.push(ids), len(ids), None

    def flush(self) -> str:
        """Return the end of the text: U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", final=True)


@lru_cache(maxsize=8)
def _load(folder: Path, encoder: str, stats: tuple) -> Tokenizer:
    return Tokenizer(folder, encoder)


# -- chat templates: rendered in this process, in jinja's immutable sandbox, without a time limit -----------


PLAIN_KEYS, ROLES = {"role", "content"}, ("system", "user", "assistant")
MAX_SPLIT = 64  # characters; the end of a longer control token is not hidden at a message's start


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
    """`{% generation %}`: marks the assistant's tokens for training, as in transformers. No effect here."""

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
