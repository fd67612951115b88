"""The sentencepiece library behind a tokenizer.model."""
from __future__ import annotations

from pathlib import Path

from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import AddedToken

from common.errors import check_file, library_errors
from tokens.files import listed_tokens, special_tokens_map
from tokens.masking import AddedTokenFinder
from tokens.tokenizer import piece_bytes


class SentencePieceBackend:
    """A sentencepiece tokenizer.model. The library does not find control tokens in a text, so we do."""

    def __init__(self, path: Path, settings: dict):
        check_file(path)
        content, added_tokens = path.read_bytes(), settings["added_tokens_decoder"]
        with library_errors(f"{path}: cannot be read as a sentencepiece model"):
            proto = sentencepiece_model_pb2.ModelProto.FromString(content)
            named = dict.fromkeys((*special_tokens_map(settings).values(), *listed_tokens(settings)))
            control = named.keys() | {token.content for token in added_tokens.values() if token.special}
            for piece in proto.pieces:
                if piece.piece in control and piece.type != piece.UNKNOWN:
                    piece.type = piece.CONTROL
            proto.normalizer_spec.add_dummy_prefix &= settings.get("add_prefix_space", True)
            self._model = SentencePieceProcessor(model_proto=proto.SerializeToString())
            self.strips_space = proto.normalizer_spec.add_dummy_prefix
            # Legacy Llama tokenizers put a space before text after a control token too, unless it has one.
            self._no_prefix_before = " " if settings.get("legacy", True) else ""
            proto.normalizer_spec.add_dummy_prefix = False
            self._model_without_prefix = SentencePieceProcessor(model_proto=proto.SerializeToString())
        piece_count, piece_ids = len(proto.pieces), {piece.piece: i for i, piece in enumerate(proto.pieces)}
        added_tokens = {piece_ids.get(token.content, i): token for i, token in added_tokens.items()}
        names = piece_ids.keys() | {token.content for token in added_tokens.values()}
        new = (AddedToken(name, special=True) for name in named if name not in names)
        added_tokens |= dict(enumerate(new, max([piece_count - 1, *added_tokens]) + 1))
        self.ids = range(piece_count)
        self.added = {i: token for i, token in added_tokens.items() if i >= piece_count or token.special}
        for i in self.ids:
            if self._model.is_control(i) or self._model.is_unknown(i):
                self.added.setdefault(i, AddedToken(self._model.id_to_piece(i), special=True))
        added = {i: token for i, token in self.added.items() if token.content}
        # The leftmost, longest token wins. The library does not find tokens beyond its own pieces.
        self.control = {token.content: i for i, token in added.items() if token.special}
        text = {token.content: i for i, token in added.items() if not token.special}
        self.finder = AddedTokenFinder(added.values(), self.control | text)
        self._text_finder = AddedTokenFinder(map(added.get, text.values()), text)
        self.id_of = (piece_ids | {token.content: i for i, token in self.added.items()}).get
        self.size = max(piece_count, 1 + max(self.added, default=0))
        ids = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id()}  # -1: none
        self.bos_id = ids["bos_token"] if ids["bos_token"] >= 0 else None
        self.adds_bos = self.bos_id is not None
        self.special_tokens_map = {name: self._model.id_to_piece(i) for name, i in ids.items() if i >= 0}

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """See `JsonBackend.encode`."""
        return self.encode_at(text, (self.finder if parse_special else self._text_finder).find(text))

    def encode_at(self, text: str, spans: list[tuple[int, int, int]]) -> list[int]:
        """See `tokens.masking.SpanEncoder.encode_at`."""
        ids, start = [], 0
        for span_start, end, token in (*spans, (len(text), len(text), None)):
            if part := text[start:span_start]:
                without_prefix = start and part.startswith(self._no_prefix_before)
                ids += (self._model_without_prefix if without_prefix else self._model).encode(part)
            ids += [token] if token is not None else []
            start = end
        return ids

    def bytes_of(self, i: int) -> bytes:
        """See `JsonBackend.bytes_of`."""
        if i not in self.ids or self._model.is_unused(i):
            return b""
        piece = self._model.id_to_piece(i)
        return piece_bytes(piece, self._model.is_byte(i))
