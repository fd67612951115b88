"""Text to token ids and back: `tokenizer.json` and sentencepiece's `tokenizer.model` behind one face, chat
templates.

Two things are worth knowing before reading.

Decoding is a table. Every id stands for some bytes (none for a control token), a text is the concatenation of
its bytes read as UTF-8, so the stream is an incremental UTF-8 decoder: constant work per token and nothing to
re-decode.

Control tokens never come out of a user's text. The libraries are told not to look for them; where a chat
template is rendered we find them ourselves, after hiding those that the messages contain (`Tokenizer.chat`).
"""
from __future__ import annotations

import codecs
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken
from tokenizers import Tokenizer as JsonTokenizer

from common.errors import InputError
from common.files import read_json

ENCODERS = ("tokenizer.json", "tokenizer.model")  # the first that exists is used
FILES = (
    *ENCODERS, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
)


def copy_files(source: Path, target: Path) -> bool:
    """Copy the tokenizer files of one folder to another. False, and nothing copied, if none of them can
    encode.

    Raises InputError if they do not load.
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

    `vocab_size` counts the ids that stand for something (a model's embedding may have more rows); `bos_id` is
    None if there is no such token; `adds_bos` says whether plain text starts with it; `has_template` whether
    `chat` works.
    """

    def __init__(self, backend: _Json | _SentencePiece, config: dict, template: str | None):
        self.backend, self.template = backend, template
        self.names = backend.names | _named(config)
        self.vocab_size, self.has_template = backend.size, template is not None
        self.control = {a.content: i for i, a in backend.added.items() if a.special}  # text -> id
        self.bos_id = backend.id_of(self.names["bos_token"]) if "bos_token" in self.names else backend.bos_id
        add_bos = config.get("add_bos_token")
        self.adds_bos = self.bos_id is not None and (backend.adds_bos if add_bos is None else bool(add_bos))

        # What to cut out of a text before the backend sees it. All added tokens stand in the first pattern,
        # because the leftmost and longest match wins whatever its kind; those the backend finds by itself are
        # then left to it.
        by_hand = {a.content: i for i, a in backend.added.items() if i in backend.unseen}
        self._special = _pattern(backend.added.values()), self.control | by_hand
        self._plain = _pattern(a for a in backend.added.values() if a.content in by_hand), by_hand

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer in this folder, None if it has none. Raises InputError if its files are damaged."""
        folder, config = Path(folder), {}
        path = next((folder / name for name in ENCODERS if (folder / name).is_file()), None)
        if path is None:
            return None
        for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the second has the last word
            if (folder / name).is_file():
                config |= {k: v for k, v in read_json(folder / name).items() if v is not None}
        try:
            backend = (_Json if path.suffix == ".json" else _SentencePiece)(path, config)
            return cls(backend, config, _template(folder, config))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OSError) as e:
            raise InputError(f"{folder}: the tokenizer's files are damaged ({_line(e)})") from None

    def encode(self, text: str, bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text, with BOS in front if `bos`, the model wants one and the text does not start
        with it.

        Control tokens spelled out in the text are plain text, unless `special` (a rendered chat template).
        """
        ids = self.backend.encode(self._split(text, special))
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
        `enable_thinking`, or `add_generation_prompt=False` for a conversation that ends with what the
        assistant said. What the messages contain never becomes a control token. Raises InputError if there is
        no template or the template refuses the messages.
        """
        # Where a message holds a control token, or ends in what could be the beginning of one, the character
        # it starts with is replaced by a private one for as long as the template and the search for control
        # tokens run. Templates trim, split and test what they are given; a single character survives that,
        # and comes back in its place.
        used = set(json.dumps(messages, ensure_ascii=False, default=str)) | set(self.template or "")
        # From the private planes down.
        free = (chr(c) for c in range(0x10FFFD, 0xE000, -1) if chr(c) not in used)
        masks = {first: next(free) for first in sorted({token[0] for token in self.control})}
        anywhere = re.compile("(?=" + "|".join(map(re.escape, self.control)) + ").", re.DOTALL)
        reach = max(map(len, self.control), default=0)

        def hide(value):
            if isinstance(value, dict):
                return {k: hide(v) for k, v in value.items()}
            if isinstance(value, (list, tuple)):
                return [hide(v) for v in value]
            if not isinstance(value, str) or not self.control:
                return value
            hidden = list(anywhere.sub(lambda m: masks[m[0]], value))  # one character for one: positions stay
            end = len(value.rstrip())
            for i in range(max(0, end - reach), end):
                if any(token.startswith(value[i:end]) for token in self.control):
                    hidden[i] = masks[value[i]]
            return "".join(hidden)

        unmask = str.maketrans({mask: first for first, mask in masks.items()})
        parts = self._split(self._render(hide(messages), variables), special=True)
        return self.backend.encode([p if isinstance(p, int) else p.translate(unmask) for p in parts])

    def _split(self, text: str, special: bool) -> list[str | int]:
        """Cut a text at the tokens we match ourselves: str for the text between them, int for their ids."""
        # Lone surrogates, from a terminal or from JSON, have no bytes.
        text = text.encode("utf-8", "replace").decode()
        pattern, ids = self._special if special else self._plain
        parts, start = [], 0
        for m in pattern.finditer(text):
            # The pattern may have taken in spaces (lstrip, rstrip).
            token = ids.get(m[0], ids.get(m[0].strip()))
            if token is not None:
                parts += [text[start : m.start()], token]
                start = m.end()
        return [p for p in (*parts, text[start:]) if p != ""]

    @cached_property
    def _compiled(self) -> jinja2.Template:
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        env.filters["tojson"] = _tojson  # jinja's own escapes <, > and & for HTML
        env.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        return env.from_string(self.template)

    def _render(self, messages: list[dict], variables: dict) -> str:
        if self.template is None:
            raise InputError("this checkpoint has no chat template; pass the prompt as plain text")
        # None: is tested for.
        context = {"tools": None, "documents": None, "add_generation_prompt": True, **self.names, **variables}
        try:
            return self._compiled.render(messages=messages, **context)
        # A template is a program of the checkpoint's author: anything can be raised in it.
        except Exception as e:
            raise InputError(f"chat template: {_line(e)}") from None


class TextStream:
    """Ids in, text out, as early as it is certain. All pushes and the flush together equal
    `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._piece = tokenizer.piece
        self._strip = tokenizer.backend.strips_space  # the space that encoding put before the first word
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text these ids complete; a character of which bytes are missing waits for them."""
        data = b"".join(map(self._piece, ids))
        if data and self._strip:
            data, self._strip = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


class _Json:
    """A tokenizer.json, run by the `tokenizers` library.

    The library is told to take control tokens for plain text, once and for all. Those we mean are handed to
    it as stand-ins that no text contains, so that all it does around an added token stays as it is in the
    original.
    """

    def __init__(self, path: Path, config: dict):
        try:
            model = JsonTokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exceptions
            raise InputError(f"{path}: cannot be read as a tokenizer ({_line(e)})") from None
        model.no_truncation()  # some files carry the settings of their training
        model.no_padding()
        model.encode_special_tokens = True
        special = {a.content for a in model.get_added_tokens_decoder().values() if a.special}
        for name in (v for k, v in _named(config).items() if k in ("bos_token", "eos_token")):
            if name not in special and model.token_to_id(name) is not None:
                model.add_special_tokens([name])
        self.model, self.size, self.names = model, model.get_vocab_size(), {}
        self.added, self.unseen = model.get_added_tokens_decoder(), frozenset()
        probe = model.encode("a")
        self.adds_bos = bool(probe.special_tokens_mask[:1] == [1])
        self.bos_id = probe.ids[0] if self.adds_bos else None
        self._decoder(path)

        nonce = secrets.token_hex(8)
        self._stand_in = {i: f"\ue000{nonce}:{i}\ue001" for i, a in self.added.items() if a.special}
        model.add_tokens([AddedToken(s, normalized=False, special=False) for s in self._stand_in.values()])
        self._real = {model.token_to_id(s): i for i, s in self._stand_in.items()}

    def _decoder(self, path: Path) -> None:
        spec = json.loads(self.model.decoder.__getstate__()) if self.model.decoder else {"type": "none"}
        steps = {step["type"]: step for step in spec.get("decoders", [spec])}
        self._byte_level, self._byte_fallback = set(steps) == {"ByteLevel"}, "ByteFallback" in steps
        known = self._byte_level or steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if not known or steps.get("Replace", {}).get("pattern", {"String": "▁"}) != {"String": "▁"}:
            raise InputError(f"{path}: decoder {'+'.join(steps)} is neither byte-level nor sentencepiece's")
        self.strips_space = "Strip" in steps or steps.get("Metaspace", {}).get(
            "prepend_scheme", "never"
        ) != "never"

    def id_of(self, token: str) -> int | None:
        return self.model.token_to_id(token)

    def encode(self, parts: list[str | int]) -> list[int]:
        text = "".join(self._stand_in[p] if isinstance(p, int) else p for p in parts)
        return [self._real.get(i, i) for i in self.model.encode(text, add_special_tokens=False).ids]

    def bytes_of(self, i: int) -> bytes:
        token = self.model.id_to_token(i) or ""
        if self._byte_level:
            return bytes(BYTES[c] for c in token) if BYTES.keys() >= set(token) else token.encode()
        return _byte(token) if self._byte_fallback and _byte(token) else token.replace("▁", " ").encode()


class _SentencePiece:
    """A sentencepiece tokenizer.model. The library never makes a control piece out of text, nor finds one in
    it.
    """

    unseen: frozenset[int]  # tokens added beside the model, which the library does not know

    def __init__(self, path: Path, config: dict):
        try:
            # Only these folders need it.
            from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

            proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
            self.model = SentencePieceProcessor(model_proto=proto.SerializeToString())
            self.strips_space = proto.normalizer_spec.add_dummy_prefix
            # The first Llama tokenizers put a space before the text that follows a control token too.
            proto.normalizer_spec.add_dummy_prefix &= config.get("legacy", True)
            self._inner = SentencePieceProcessor(model_proto=proto.SerializeToString())
        except Exception as e:  # a package is missing, or one of their own errors
            raise InputError(f"{path}: cannot be read as a sentencepiece model ({_line(e)})") from None
        n = self.model.get_piece_size()
        self.added = {}
        for i, token in config.get("added_tokens_decoder", {}).items():
            if int(i) >= n or token.get("special"):
                flags = {k: bool(token.get(k)) for k in ("special", "lstrip", "rstrip", "single_word")}
                self.added[int(i)] = AddedToken(token["content"], **flags)
        self.unseen = frozenset(i for i, a in self.added.items() if i >= n and not a.special)
        for i in range(n):
            if self.model.is_control(i) or self.model.is_unknown(i):
                self.added.setdefault(i, AddedToken(self.model.id_to_piece(i), special=True))
        self.size = max(n, 1 + max(self.added, default=0))
        self.bos_id = self.model.bos_id() if self.model.bos_id() >= 0 else None
        self.adds_bos = self.bos_id is not None
        ends = {"bos_token": self.model.bos_id(), "eos_token": self.model.eos_id()}
        # Where the config names none.
        self.names = {name: self.model.id_to_piece(i) for name, i in ends.items() if i >= 0}

    def id_of(self, token: str) -> int | None:
        added = {a.content: i for i, a in self.added.items()}
        found = added.get(token, self.model.piece_to_id(token))
        return None if found == self.model.unk_id() and token not in added else found

    def encode(self, parts: list[str | int]) -> list[int]:
        ids = []
        for n, part in enumerate(parts):
            ids += [part] if isinstance(part, int) else (self._inner if n else self.model).encode(part)
        return ids

    def bytes_of(self, i: int) -> bytes:
        token = self.model.id_to_piece(i)
        return _byte(token) if self.model.is_byte(i) else token.replace("▁", " ").encode()


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training in some templates; here it is transparent.
    """

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: visible Latin-1 stands for itself, the other bytes for U+0100 and
    up.
    """
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b]
    return {chr(b): b for b in visible} | {
        chr(256 + n): b for n, b in enumerate(sorted({*range(256)} - {*visible}))
    }


BYTES = byte_alphabet()


def _byte(token: str) -> bytes:
    """b"\\xe2" of the byte-fallback piece `<0xE2>`, nothing of any other."""
    return bytes([int(token[3:5], 16)]) if re.fullmatch("<0x[0-9A-F]{2}>", token) else b""


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern:
    """Matches any of these tokens, the longest first; nothing if there are none."""
    def one(a: AddedToken) -> str:
        word = rf"(?<!\w){re.escape(a.content)}(?!\w)" if a.single_word else re.escape(a.content)
        return r"\s*" * a.lstrip + word + r"\s*" * a.rstrip
    return re.compile("|".join(map(one, sorted(tokens, key=lambda a: -len(a.content)))) or r"(?!)")


def _named(config: dict) -> dict[str, str]:
    """bos_token, eos_token, ... as text; the files spell them "<s>" or {"content": "<s>", ...}."""
    found = {k: config.get(k) for k in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {k: v if isinstance(v, str) else v["content"] for k, v in found.items() if v}


def _template(folder: Path, config: dict) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if (folder / "chat_template.json").is_file():
        config = read_json(folder / "chat_template.json")
    found = config.get("chat_template")
    if isinstance(found, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
        found = {t["name"]: t["template"] for t in found}
        found = found.get("default", next(iter(found.values()), None))
    if not isinstance(found, (str, type(None))):
        raise ValueError("chat_template is no text")
    return found


def _tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str):
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
