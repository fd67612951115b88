"""The libraries behind a tokenizer: `tokenizers` for tokenizer.json, `sentencepiece` for tokenizer.model.

A control token reaches a backend as an id, never as text.
"""
from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import AddedToken

from common.cli import one_line
from common.errors import InputError
from common.files import read_bytes
from tokens.files import ENDS, FLAGS
from tokens.spelling import SPACE, Shape, fallback_byte

# Pre-tokenizers that cut a text and leave nothing out of it.
KEEP_TEXT = ("none", "ByteLevel", "Digits", "Split", "Metaspace", "Punctuation")


class Backend(Protocol):
    """What a tokenizer needs of a library."""

    size: int  # how many ids stand for something
    added: dict[int, AddedToken]  # tokens beside the vocabulary; those with `special` are control tokens
    unmatched: frozenset[int]  # added tokens that the library does not find in a text
    special_tokens_map: dict[str, str]  # "bos_token" -> "<s>", ...: where the config names none
    bos_id: int | None
    adds_bos: bool  # whether a text begins with BOS unless the config says otherwise
    strips_space: bool  # whether encoding puts a space before the first word, which decoding takes away

    def id_of(self, token: str) -> int | None:
        """The id of a token, None if there is no such token."""

    def encode(self, parts: list[str | int]) -> list[int]:
        """The ids of a text in which some tokens are given as ids already."""

    def vocabulary(self) -> tuple[str, list[str]]:
        """How tokens are spelled, see `spelled`, and every id's token, "" where there is none."""

    def shape(self) -> Shape | None:
        """What bounds how many tokens a text has; None where nothing does."""


class JsonBackend:
    """A tokenizer.json, run by the `tokenizers` library.

    The library is told once to take control tokens in a text for plain text. A control token that we mean is
    handed to the library as a stand-in, a string that no text contains. So everything that the library does
    around an added token happens as with the original.
    """

    def __init__(self, path: Path, config: dict):
        content = read_bytes(path)
        try:
            model = tokenizers.Tokenizer.from_buffer(content)
        except Exception as e:  # the library raises bare Exceptions
            raise InputError(f"{path}: cannot be read as a tokenizer ({one_line(e)})") from None
        model.no_truncation()  # some files carry the settings of their training
        model.no_padding()
        model.encode_special_tokens = True
        control = {token.content for token in model.get_added_tokens_decoder().values() if token.special}
        ends = {k: v for k, v in special_tokens_map(config).items() if k in ("bos_token", "eos_token")}
        for token in ends.values():
            if token not in control and model.token_to_id(token) is not None:
                model.add_special_tokens([token])
        self.model, self.size, self.special_tokens_map = model, model.get_vocab_size(), {}
        self._vocabulary = [""] * self.size
        for token, i in model.get_vocab().items():
            if i < self.size:
                self._vocabulary[i] = token
        self.added, self.unmatched = model.get_added_tokens_decoder(), frozenset()
        probe = model.encode("a")
        self.adds_bos = bool(probe.special_tokens_mask[:1] == [1])
        self.bos_id = probe.ids[0] if self.adds_bos else None
        self._read_decoder(path)

        nonce = secrets.token_hex(8)
        self._stand_ins = {i: f"\ue000{nonce}:{i}\ue001" for i, token in self.added.items() if token.special}
        model.add_tokens([AddedToken(s, normalized=False, special=False) for s in self._stand_ins.values()])
        self._originals = {model.token_to_id(stand_in): i for i, stand_in in self._stand_ins.items()}

    def _read_decoder(self, path: Path) -> None:
        """Set how tokens spell bytes. Raises InputError if the decoder is of another kind."""
        decoder = json.loads(self.model.decoder.__getstate__()) if self.model.decoder else {"type": "none"}
        steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
        self._byte_level, self._byte_fallback = set(steps) == {"ByteLevel"}, "ByteFallback" in steps
        known = self._byte_level or steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if not known or steps.get("Replace", {}).get("pattern", {"String": SPACE}) != {"String": SPACE}:
            raise InputError(f"{path}: decoder {'+'.join(steps)} is neither byte-level nor sentencepiece's")
        prepend_scheme = steps.get("Metaspace", {}).get("prepend_scheme", "never")
        self.strips_space = "Strip" in steps or prepend_scheme != "never"

    def id_of(self, token: str) -> int | None:
        return self.model.token_to_id(token)

    def encode(self, parts: list[str | int]) -> list[int]:
        text = "".join(self._stand_ins[p] if isinstance(p, int) else p for p in parts)
        # Without offsets, which cost as much as the rest, and 40 bytes for each of the text.
        ids = self.model.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [self._originals.get(i, i) for i in ids]

    def vocabulary(self) -> tuple[str, list[str]]:
        how = "byte-level" if self._byte_level else "fallback" if self._byte_fallback else "plain"
        return how, self._vocabulary

    def shape(self) -> Shape | None:
        parts: list[list[dict]] = []
        for part in (self.model.normalizer, self.model.pre_tokenizer):
            found = json.loads(part.__getstate__()) if part else {"type": "none"}
            parts.append(found.get("normalizers") or found.get("pretokenizers") or [found])
        how, tokens = self.vocabulary()
        forms = {step["type"] for step in parts[0]} - {"none", "Prepend"}
        plain = all(
            step["type"] != "Replace" or (step["pattern"] == {"String": " "} and step["content"] == SPACE)
            for step in parts[0]
        )
        keeps = all(
            step["type"] in KEEP_TEXT and step.get("behavior") not in ("removed", "Removed")
            for step in parts[1]
        )
        known = isinstance(self.model.model, tokenizers.models.BPE) and how != "plain" and plain and keeps
        if not known or not forms <= {"Replace", "NFC"}:
            return None
        strips = any(token.lstrip or token.rstrip for token in self.added.values())
        return Shape.of(how, [*tokens, *(t.content for t in self.added.values())], strips, "NFC" in forms)


class SentencePieceBackend:
    """A sentencepiece tokenizer.model.

    The library never makes a control token out of text, and it never finds one in a text.
    """

    def __init__(self, path: Path, config: dict):
        content = read_bytes(path)
        try:
            # Few checkpoints need the package.
            from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

            proto = sentencepiece_model_pb2.ModelProto.FromString(content)
            self.model = SentencePieceProcessor(model_proto=proto.SerializeToString())
            self.strips_space = proto.normalizer_spec.add_dummy_prefix
            self._rewrites = bool(proto.normalizer_spec.precompiled_charsmap)
            # The first Llama tokenizers put a space before the text that follows a control token too.
            proto.normalizer_spec.add_dummy_prefix &= config.get("legacy", True)
            self._model_after_control = SentencePieceProcessor(model_proto=proto.SerializeToString())
        except Exception as e:  # a package is missing, or one of their own errors
            raise InputError(f"{path}: cannot be read as a sentencepiece model ({one_line(e)})") from None
        pieces = self.model.get_piece_size()
        self.added = {}
        for key, token in config.get("added_tokens_decoder", {}).items():
            if int(key) >= pieces or token.get("special"):
                self.added[int(key)] = AddedToken(token["content"], **{f: bool(token.get(f)) for f in FLAGS})
        self.unmatched = frozenset(i for i, token in self.added.items() if i >= pieces and not token.special)
        for i in range(pieces):
            if self.model.is_control(i) or self.model.is_unknown(i):
                self.added.setdefault(i, AddedToken(self.model.id_to_piece(i), special=True))
        self.size = max(pieces, 1 + max(self.added, default=0))
        ends = {"bos_token": self.model.bos_id(), "eos_token": self.model.eos_id()}  # -1: there is none
        self.bos_id = ends["bos_token"] if ends["bos_token"] >= 0 else None
        self.adds_bos = self.bos_id is not None
        self.special_tokens_map = {name: self.model.id_to_piece(i) for name, i in ends.items() if i >= 0}

    def id_of(self, token: str) -> int | None:
        added = {a.content: i for i, a in self.added.items()}
        if token in added:
            return added[token]
        piece = self.model.piece_to_id(token)
        return None if piece == self.model.unk_id() else piece

    def encode(self, parts: list[str | int]) -> list[int]:
        ids = []
        for n, part in enumerate(parts):
            model = self._model_after_control if n else self.model
            ids += [part] if isinstance(part, int) else model.encode(part)
        return ids

    def vocabulary(self) -> tuple[str, list[str]]:
        def spelled_out(i: int) -> str:
            piece = self.model.id_to_piece(i)
            found = fallback_byte(piece) if self.model.is_byte(i) else piece.replace(SPACE, " ").encode()
            return found.decode("latin-1")
        return "latin-1", [spelled_out(i) for i in range(self.model.get_piece_size())]

    def shape(self) -> Shape | None:
        if self._rewrites:
            return None
        contents = [token.content for token in self.added.values()]
        return Shape.of("latin-1", [*self.vocabulary()[1], *contents], strips=True, composes=False)


def special_tokens_map(config: dict) -> dict[str, str]:
    """Name -> text of bos_token, eos_token, ...; the files spell them "<s>" or {"content": "<s>", ...}."""
    tokens = {name: config.get(name) for name in ENDS}
    return {name: t if isinstance(t, str) else t["content"] for name, t in tokens.items() if t}
