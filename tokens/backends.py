"""The libraries behind a tokenizer: `tokenizers` for tokenizer.json, `sentencepiece` for tokenizer.model.

A backend gets a text cut into parts: plain text as str, control tokens as ids. Both backends have

    size: the number of ids that stand for something
    ids: the ids of the vocabulary
    added: id -> `AddedToken`, tokens beside the vocabulary; those with `special` are control tokens
    unmatched: added tokens that the library does not find in a text
    special_tokens_map: "bos_token" -> "<s>", ..., for names that the settings lack
    bos_id, adds_bos: the id of BOS, None without one; whether a text starts with it by default
    strips_space: whether encoding puts a space before the first word, which decoding removes
    keeps_text: whether encoding is known to keep every visible ASCII character
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from common.cli import one_line
from common.errors import InputError, is_panic
from common.files import read_bytes
from tokens.files import TOKEN_FLAGS, special_tokens_map

# Texts come one at a time. A thread pool would take cores from decoding, and does not survive a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LARGEST_FILE = 256 << 20  # bytes of a file
LARGEST_GAP = 1 << 16  # ids that stand for nothing, below the highest
SPACE = "▁"  # how sentencepiece spells a space
# Steps of tokenizer.json that neither drop nor merge visible ASCII characters. NFC and NFKC merge some with
# the character that follows, which must not be ASCII.
KEEPING = (
    "ByteLevel", "Digits", "Split", "Metaspace", "Punctuation", "Prepend", "NFC", "NFD", "NFKC", "NFKD",
)


def byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level BPE (GPT-2, https://github.com/openai/gpt-2, encoder.py).

    Visible Latin-1 characters stand for themselves, U+0100 and up for the other bytes.
    """
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b]
    others = sorted({*range(256)} - {*visible})
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}


BYTES = byte_alphabet()


def fallback_byte(piece: str) -> bytes:
    """Return b"\\xe2" for the byte-fallback piece `<0xE2>`, b"" for any other piece."""
    return bytes([int(piece[3:5], 16)]) if re.fullmatch("<0x[0-9A-F]{2}>", piece) else b""


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any error of a library, a panic of Rust code too, into an InputError that starts with `what`."""
    try:
        yield
    except InputError:
        raise
    except BaseException as e:  # a panic is no Exception
        if not isinstance(e, Exception) and not is_panic(e):
            raise
        raise InputError(f"{what} ({one_line(e)})") from None


class JsonBackend:
    """A tokenizer.json, run by the `tokenizers` library.

    The library is set to take control tokens in a text for plain text. A control token that is meant goes
    in as a stand-in, a string that no text contains. So the library treats the text around it as it does
    with the original.
    """

    def __init__(self, path: Path, settings: dict):
        content = read_bytes(path, LARGEST_FILE)
        with library_errors(f"{path}: cannot be read as a tokenizer"):
            self._path, self._model = path, tokenizers.Tokenizer.from_buffer(content)
            self._prepare(settings)

    def _prepare(self, settings: dict) -> None:
        model = self._model
        model.no_truncation()  # some files carry the settings of their training
        model.no_padding()
        model.encode_special_tokens = True
        control = {token.content for token in model.get_added_tokens_decoder().values() if token.special}
        ends = map(special_tokens_map(settings).get, ("bos_token", "eos_token"))
        model.add_special_tokens([t for t in ends if t and t not in control and self.id_of(t) is not None])
        self._tokens = {i: token for token, i in model.get_vocab().items()}
        self.size, self.ids, self.special_tokens_map = len(self._tokens), self._tokens.keys(), {}
        self.added, self.unmatched = model.get_added_tokens_decoder(), frozenset()
        probe = model.encode("a")
        self.adds_bos = bool(probe.special_tokens_mask[:1] == [1])
        self.bos_id = probe.ids[0] if self.adds_bos else None
        self._read_decoder()
        self.keeps_text = self._keeps_text()

        # The library numbers new tokens from their count on. Fillers take the ids up to the highest.
        highest = max(self.ids, default=-1)
        if (gap := highest + 1 - self.size) > LARGEST_GAP:
            found = f"{self.size:,} tokens have ids up to {highest:,}"
            raise InputError(f"{self._path}: {found}; expected at most {LARGEST_GAP:,} gaps")
        nonce = secrets.token_hex(8)
        self._stand_ins = {i: f"\ue000{nonce}:{i}\ue001" for i, token in self.added.items() if token.special}
        new = [*(f"\ue000{nonce}-{n}\ue001" for n in range(gap)), *self._stand_ins.values()]
        model.add_tokens([AddedToken(text, normalized=False, special=False) for text in new])
        self._originals = {model.token_to_id(stand_in): i for i, stand_in in self._stand_ins.items()}

    def _read_decoder(self) -> None:
        """Set how tokens spell bytes. Raises InputError on a decoder of another kind."""
        steps = {step["type"]: step for step in _steps(self._model.decoder)}
        self._byte_level, self._byte_fallback = set(steps) == {"ByteLevel"}, "ByteFallback" in steps
        known = self._byte_level or (
            steps and steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
        if not known or steps.get("Replace", {}).get("pattern", {"String": SPACE}) != {"String": SPACE}:
            kind = "+".join(steps) or "none"
            raise InputError(f"{self._path}: decoder {kind} is neither byte-level nor sentencepiece's")
        prepend_scheme = steps.get("Metaspace", {}).get("prepend_scheme", "never")
        self.strips_space = "Strip" in steps or prepend_scheme != "never"

    def _keeps_text(self) -> bool:
        def keeps(step: dict) -> bool:
            if step["type"] == "Replace":
                return step["pattern"] == {"String": " "} and step["content"] == SPACE
            return step["type"] in KEEPING and step.get("behavior") not in ("removed", "Removed")

        steps = [*_steps(self._model.normalizer), *_steps(self._model.pre_tokenizer)]
        return isinstance(self._model.model, tokenizers.models.BPE) and all(map(keeps, steps))

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, None if there is no such token."""
        return self._model.token_to_id(token)

    def encode(self, parts: list[str | int]) -> list[int]:
        """Return the ids of a text whose control tokens are ids already."""
        text = "".join(self._stand_ins[p] if isinstance(p, int) else p for p in parts)
        # The fast form makes no offsets, which cost as much as the rest and 40 bytes per byte of text.
        ids = self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [self._originals.get(i, i) for i in ids]

    def bytes_of(self, i: int) -> bytes:
        """Return the bytes that an id of the vocabulary stands for, b"" for other ids."""
        token = self._tokens.get(i, "")
        if self._byte_level:
            return bytes(BYTES[c] for c in token) if BYTES.keys() >= set(token) else token.encode()
        return (self._byte_fallback and fallback_byte(token)) or token.replace(SPACE, " ").encode()


def _steps(part) -> list[dict]:
    """Return the description of each step of a decoder, normalizer or pre-tokenizer."""
    found = json.loads(part.__getstate__()) if part else {}
    for name in ("decoders", "normalizers", "pretokenizers"):
        if name in found:
            return found[name]
    return [found] if found else []


class SentencePieceBackend:
    """A sentencepiece tokenizer.model. The library neither makes nor finds a control token in a text."""

    def __init__(self, path: Path, settings: dict):
        content = read_bytes(path, LARGEST_FILE)
        with library_errors(f"{path}: cannot be read as a sentencepiece model"):
            # Few checkpoints need the package.
            from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

            proto = sentencepiece_model_pb2.ModelProto.FromString(content)
            self._model = SentencePieceProcessor(model_proto=proto.SerializeToString())
            self.strips_space = proto.normalizer_spec.add_dummy_prefix
            self.keeps_text = not proto.normalizer_spec.precompiled_charsmap
            # The first Llama tokenizers put a space before the text that follows a control token too.
            proto.normalizer_spec.add_dummy_prefix &= settings.get("legacy", True)
            self._model_after_control = SentencePieceProcessor(model_proto=proto.SerializeToString())
        pieces = self._model.get_piece_size()
        self.ids, self.added = range(pieces), {}
        for key, token in settings.get("added_tokens_decoder", {}).items():
            if int(key) >= pieces or token.get("special"):
                flags = {flag: bool(token.get(flag)) for flag in TOKEN_FLAGS}
                self.added[int(key)] = AddedToken(token["content"], **flags)
        self.unmatched = frozenset(i for i, token in self.added.items() if i >= pieces and not token.special)
        for i in self.ids:
            if self._model.is_control(i) or self._model.is_unknown(i):
                self.added.setdefault(i, AddedToken(self._model.id_to_piece(i), special=True))
        self.size = max(pieces, 1 + max(self.added, default=0))
        ends = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id()}  # -1: there is none
        self.bos_id = ends["bos_token"] if ends["bos_token"] >= 0 else None
        self.adds_bos = self.bos_id is not None
        self.special_tokens_map = {name: self._model.id_to_piece(i) for name, i in ends.items() if i >= 0}

    def id_of(self, token: str) -> int | None:
        """As `JsonBackend.id_of`."""
        added = {a.content: i for i, a in self.added.items()}
        if token in added:
            return added[token]
        piece = self._model.piece_to_id(token)
        return None if piece == self._model.unk_id() else piece

    def encode(self, parts: list[str | int]) -> list[int]:
        """As `JsonBackend.encode`."""
        ids = []
        for n, part in enumerate(parts):
            model = self._model_after_control if n else self._model
            ids += [part] if isinstance(part, int) else model.encode(part)
        return ids

    def bytes_of(self, i: int) -> bytes:
        """As `JsonBackend.bytes_of`."""
        if i not in self.ids:
            return b""
        piece = self._model.id_to_piece(i)
        return fallback_byte(piece) if self._model.is_byte(i) else piece.replace(SPACE, " ").encode()
