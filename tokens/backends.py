"""The libraries behind a tokenizer: `tokenizers` for tokenizer.json, `sentencepiece` for tokenizer.model.

A backend gets a text cut into parts: plain text as str, control tokens as ids. Both backends have

    size: one more than the highest id
    ids: the ids of the vocabulary
    added: id -> `AddedToken`, tokens beside the vocabulary; those with `special` are control tokens
    unmatched: added tokens that the library does not find in a text
    special_tokens_map: "bos_token" -> "<s>", ..., for names that the settings lack
    bos_id, adds_bos: the id of BOS, None without one; whether a text starts with it by default
    strips_space: whether encoding puts a space before the first word, which decoding removes
    id_of: token -> its id, None if there is no such token
"""
from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from common.cli import library_errors
from common.errors import InputError
from common.files import check_file, read_json
from tokens.files import DEFAULTS, MERGES, listed_tokens, special_tokens_map
from tokens.word_rules import WORD_RULES, byte_level_bpe

# Texts come one at a time. A thread pool would take cores from decoding, and does not survive a fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LARGEST_GAP = 1 << 16  # ids that stand for nothing, below the highest
SPACE = "▁"  # how sentencepiece spells a space
WORDS_OF_CLASS = {"qwen2": "qwen2", "qwen3": "qwen2", "gpt2": "gpt-2"}  # part of its name: the rule


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


def open_library(path: Path, settings: dict) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json, or of a vocab.json and the merges.txt beside it.

    The latter two do not say how a text is cut into words: the class of the tokenizer does, or the model's
    type. Raises InputError on one that is not in `WORDS_OF_CLASS`, and the library's errors.
    """
    if path.name == "tokenizer.json":
        return tokenizers.Tokenizer.from_file(str(path))
    config = path.with_name("config.json")
    kind = settings.get("tokenizer_class")
    known = f"{kind} {(read_json(config) if config.exists() else {}).get('model_type')}".lower()
    words = next((words for name, words in WORDS_OF_CLASS.items() if name in known), None)
    if words is None:
        raise InputError(f"{path}: tokenizer_class {kind!r} is not known (Qwen2Tokenizer and GPT2Tokenizer"
                         " are); save the tokenizer as tokenizer.json")
    vocab, merges = tokenizers.models.BPE.read_file(str(path), str(path.with_name(MERGES)))
    model = byte_level_bpe(vocab, merges, WORD_RULES[words], settings.get("add_prefix_space", False))
    model.add_special_tokens([token for token in {*DEFAULTS.values()} if token in vocab])
    return model


class JsonBackend:
    """A tokenizer.json, or vocab.json with merges.txt, run by the `tokenizers` library.

    The library is set to take control tokens in a text for plain text. A control token that is meant goes
    in as a stand-in, a string that no text contains. So the library treats the text around it as it does
    with the original.
    """

    def __init__(self, path: Path, settings: dict):
        with library_errors(f"{path}: cannot be read as a tokenizer"):
            self._path, self._model = path, open_library(path, settings)
            self._prepare(settings)

    def _prepare(self, settings: dict) -> None:
        model, self.id_of = self._model, self._model.token_to_id
        model.no_truncation()  # some files carry the settings of their training
        model.no_padding()
        model.encode_special_tokens = True
        new = self._take_settings(settings)
        self.added, self.unmatched, probe = model.get_added_tokens_decoder(), frozenset(), model.encode("a")
        self._tokens = {i: token for token, i in model.get_vocab().items()}
        self.adds_bos = probe.special_tokens_mask[:1] == [1]
        self.bos_id = probe.ids[0] if self.adds_bos else None
        self._read_decoder()

        # The library numbers new tokens from here on, also where ids above are taken. Fillers go before
        # those whose id is higher, and up to the highest id.
        begin = max(model.get_vocab_size(with_added_tokens=False), 1 + max(self.added, default=-1))
        free = {i: token for i, token in new if i >= begin and i not in self._tokens}
        last = max([*self._tokens, *free])
        late = [token for i, token in new if free.get(i) is not token]
        free |= dict(enumerate(late, last + 1))
        self.added |= free
        self._tokens |= {i: token.content for i, token in free.items()}
        self.ids, self.size, self.special_tokens_map = self._tokens.keys(), 1 + max(self._tokens), {}
        if self.size - len(self._tokens) > LARGEST_GAP:
            raise InputError(f"{self._path}: {len(self._tokens):,} tokens have ids up to {self.size - 1:,};"
                             f" expected at most {LARGEST_GAP:,} gaps")
        nonce = secrets.token_hex(8)
        fillers = (AddedToken(f"\ue000{nonce}-{i}\ue001", normalized=False) for i in range(begin, self.size))
        self._stand_ins = {i: f"\ue000{nonce}:{i}\ue001" for i, token in self.added.items() if token.special}
        stand_ins = (AddedToken(text, normalized=False) for text in self._stand_ins.values())
        model.add_tokens([*(free.get(i, filler) for i, filler in enumerate(fillers, begin)), *stand_ins])
        self._originals = {model.token_to_id(stand_in): i for i, stand_in in self._stand_ins.items()}

    def _take_settings(self, settings: dict) -> list[tuple[int, AddedToken]]:
        """Give tokens of the file the flags of the settings. Returns tokens that only the settings have.

        A token that either makes special is special. So is one that the settings only name or list; it has
        the id -1 if it is new. A list changes no flag of an added token.
        """
        known, changed, new = self._model.get_added_tokens_decoder(), [], []
        decoder = {token.content: (i, token) for i, token in settings["added_tokens_decoder"].items()}
        named = special_tokens_map(settings).values()
        for content in filter(None, dict.fromkeys((*decoder, *named, *listed_tokens(settings)))):
            (i, given), at = decoder.get(content, (-1, None)), self.id_of(content)
            old = known.get(at)
            token = given or old or AddedToken(content, special=True)
            token.special |= content in named or bool(old and old.special)
            if at is None:
                new.append((i, token))
            elif token is old or repr(token) != repr(old):
                changed.append(token)
        self._model.add_tokens(changed)
        return sorted(new, key=lambda found: found[0])

    def _read_decoder(self) -> None:
        """Set how tokens spell bytes. Raises InputError on a decoder of another kind."""
        decoder = json.loads(self._model.decoder.__getstate__()) if self._model.decoder else {"decoders": []}
        steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
        self._byte_level, self._byte_fallback = set(steps) == {"ByteLevel"}, "ByteFallback" in steps
        known = self._byte_level or (
            steps and steps.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
        if not known or steps.get("Replace", {}).get("pattern", {"String": SPACE}) != {"String": SPACE}:
            kind = "+".join(steps) or "none"
            raise InputError(f"{self._path}: decoder {kind} is neither byte-level nor sentencepiece's")
        prepend_scheme = steps.get("Metaspace", {}).get("prepend_scheme", "never")
        self.strips_space = "Strip" in steps or prepend_scheme != "never"

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


class SentencePieceBackend:
    """A sentencepiece tokenizer.model. The library neither makes nor finds a control token in a text."""

    def __init__(self, path: Path, settings: dict):
        check_file(path)
        content, given = path.read_bytes(), settings["added_tokens_decoder"]
        with library_errors(f"{path}: cannot be read as a sentencepiece model"):
            # Few checkpoints need the package.
            from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

            proto = sentencepiece_model_pb2.ModelProto.FromString(content)
            named = dict.fromkeys((*special_tokens_map(settings).values(), *listed_tokens(settings)))
            control = named.keys() | {token.content for token in given.values() if token.special}
            for piece in proto.pieces:
                if piece.piece in control and piece.type != piece.UNKNOWN:
                    piece.type = piece.CONTROL
            proto.normalizer_spec.add_dummy_prefix &= settings.get("add_prefix_space", True)
            self._model = SentencePieceProcessor(model_proto=proto.SerializeToString())
            self.strips_space = proto.normalizer_spec.add_dummy_prefix
            # The first Llama tokenizers put a space before the text that follows a control token too, unless
            # it begins with one.
            self._no_prefix_before = " " if settings.get("legacy", True) else ""
            proto.normalizer_spec.add_dummy_prefix = False
            self._model_without_prefix = SentencePieceProcessor(model_proto=proto.SerializeToString())
        pieces, known = len(proto.pieces), {piece.piece: i for i, piece in enumerate(proto.pieces)}
        given = {known.get(token.content, i): token for i, token in given.items()}
        names = known.keys() | {token.content for token in given.values()}
        new = (AddedToken(name, special=True) for name in named if name not in names)
        given |= dict(enumerate(new, max([pieces - 1, *given]) + 1))
        self.ids = range(pieces)
        self.added = {i: token for i, token in given.items() if i >= pieces or token.special}
        self.unmatched = frozenset(i for i, token in self.added.items() if i >= pieces and not token.special)
        for i in self.ids:
            if self._model.is_control(i) or self._model.is_unknown(i):
                self.added.setdefault(i, AddedToken(self._model.id_to_piece(i), special=True))
        self.id_of = (known | {token.content: i for i, token in self.added.items()}).get
        self.size = max(pieces, 1 + max(self.added, default=0))
        ends = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id()}  # -1: there is none
        self.bos_id = ends["bos_token"] if ends["bos_token"] >= 0 else None
        self.adds_bos = self.bos_id is not None
        self.special_tokens_map = {name: self._model.id_to_piece(i) for name, i in ends.items() if i >= 0}

    def encode(self, parts: list[str | int]) -> list[int]:
        """As `JsonBackend.encode`."""
        ids = []
        for n, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                bare = n and part.startswith(self._no_prefix_before)
                ids += (self._model_without_prefix if bare else self._model).encode(part)
        return ids

    def bytes_of(self, i: int) -> bytes:
        """As `JsonBackend.bytes_of`."""
        if i not in self.ids or self._model.is_unused(i):
            return b""
        piece = self._model.id_to_piece(i)
        return fallback_byte(piece) if self._model.is_byte(i) else piece.replace(SPACE, " ").encode()
