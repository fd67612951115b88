"""Limits of an output that are token masks: bad_words, min_tokens, ignore_eos, stop_token_ids."""
from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tokens.tokenizer import Tokenizer

AFTER_UTF8 = b"\xff"  # sorts after all bytes of UTF-8


@dataclass(frozen=True)
class Limits:
    """Further limits of an output, named as in vLLM.

    grammar: in GBNF or in llguidance's Lark dialect. stop_token_ids: additional stop ids. bad_words: texts
    that are never generated. min_tokens: minimum number of tokens. ignore_eos: never generate a stop id.
    """

    grammar: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


class Pieces:
    """The bytes of all tokens, and masks [ceil(V / 32)] int32 of the tokens that complete a word."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.piece, self._size = tokenizer.piece, -(-vocab_size // 32) * 32
        self._sorted = sorted((self.piece(i), i) for i in range(vocab_size))
        self.completing = lru_cache(1024)(self._completing)

    def bits(self, ids: Iterable[int]) -> np.ndarray:
        """Return the mask of these ids."""
        allowed = np.zeros(self._size, bool)
        allowed[[i for i in ids if i < self._size]] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _completing(self, word: bytes, matched: int) -> np.ndarray:
        """Return the mask of tokens that complete a word whose first `matched` bytes are generated."""
        rest = word[matched:]
        if not matched:  # the token contains the whole word
            return self.bits(i for piece, i in self._sorted if word in piece)
        start, end = (bisect_left(self._sorted, (key,)) for key in (rest, rest + AFTER_UTF8))
        return self.bits(i for _, i in self._sorted[start:end])


class LimitGuide:
    """A guide that masks stop ids and bad words, on top of an optional grammar guide (`inner`)."""

    def __init__(self, pieces: Pieces, stop_ids: Collection[int], limits: Limits, inner=None):
        self._pieces, self._inner = pieces, inner
        self._min_tokens = math.inf if limits.ignore_eos else limits.min_tokens
        self._stops = pieces.bits({*stop_ids, *limits.stop_token_ids})
        self._words = [word.encode() for word in limits.bad_words]
        self._longest = max(map(len, self._words), default=1)
        self._output_tail = 0, b""  # (number of tokens, their last bytes)

    @property
    def error(self) -> str | None:
        """See `tokens.grammar: Guide.error`."""
        return self._inner and self._inner.error

    def _append(self, tail: tuple[int, bytes], token: int) -> tuple[int, bytes]:
        return tail[0] + 1, (tail[1] + self._pieces.piece(token))[-self._longest :]

    def advance(self, ids: Iterable[int]) -> None:
        """See `tokens.grammar: Guide.advance`."""
        for token in ids:
            self._output_tail = self._append(self._output_tail, token)
        if self._inner:
            self._inner.advance(ids)

    def mask(self, tokens: list[int], parent: list[int], into: np.ndarray) -> None:
        """See `tokens.grammar: Guide.mask`. A limit that would leave no token is ignored."""
        into[: len(tokens)] = -1
        if self._inner:
            self._inner.mask(tokens, parent, into)
        tails = [self._output_tail]
        for node, row in enumerate(into[: len(tokens)]):
            if node:
                tails.append(self._append(tails[parent[node]], tokens[node]))
            count, text = tails[node]
            allowed = row & ~self._stops if count < self._min_tokens else row
            for word in self._words:
                for matched in range(len(word)):
                    if text.endswith(word[:matched]):
                        allowed = allowed & ~self._pieces.completing(word, matched)
            if allowed.any():
                row[:] = allowed
