"""Limits of an output that are token masks: bad_words, min_tokens, ignore_eos, stop_token_ids."""
from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tokens.tokenizer import Tokenizer

PAST = b"\xff"  # sorts after all bytes of UTF-8


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
    """The bytes of all tokens, and masks [V/32] int32 of the tokens that complete a word."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int):
        self.piece, self._size = tokenizer.piece, -(-vocabulary // 32) * 32
        self._sorted = sorted((self.piece(i), i) for i in range(vocabulary))
        self.completing = lru_cache(1024)(self._completing)

    def bits(self, ids: Iterable[int]) -> np.ndarray:
        """Return the mask of these ids."""
        found = np.zeros(self._size, bool)
        found[[i for i in ids if i < self._size]] = True
        return np.packbits(found, bitorder="little").view(np.int32)

    def _completing(self, word: bytes, given: int) -> np.ndarray:
        """Return the mask of tokens that complete a word after its first `given` bytes."""
        rest = word[given:]
        if not given:  # the token contains the whole word
            return self.bits(i for piece, i in self._sorted if word in piece)
        begin, end = (bisect_left(self._sorted, (key,)) for key in (rest, rest + PAST))
        return self.bits(i for _, i in self._sorted[begin:end])


class LimitGuide:
    """A guide that masks stop ids and bad words, on top of an optional grammar guide (`inner`)."""

    def __init__(self, pieces: Pieces, stop_ids: Collection[int], limits: Limits, inner=None):
        self._pieces, self._inner = pieces, inner
        self._at_least = math.inf if limits.ignore_eos else limits.min_tokens
        self._stops = pieces.bits({*stop_ids, *limits.stop_token_ids})
        self._words = [word.encode() for word in limits.bad_words]
        self._longest = max(map(len, self._words), default=1)
        self._end = 0, b""  # number of tokens, and the last bytes

    @property
    def error(self) -> str | None:
        """As `tokens.grammar: Guide.error`."""
        return self._inner and self._inner.error

    def _after(self, end: tuple[int, bytes], token: int) -> tuple[int, bytes]:
        return end[0] + 1, (end[1] + self._pieces.piece(token))[-self._longest :]

    def advance(self, ids: Iterable[int]) -> None:
        """As `tokens.grammar: Guide.advance`."""
        for token in ids:
            self._end = self._after(self._end, token)
        if self._inner:
            self._inner.advance(ids)

    def mask(self, tokens: list[int], parent: list[int], into: np.ndarray) -> None:
        """As `tokens.grammar: Guide.mask`. A limit that would leave no token is ignored."""
        into[: len(tokens)] = -1
        if self._inner:
            self._inner.mask(tokens, parent, into)
        ends = [self._end]
        for node, row in enumerate(into[: len(tokens)]):
            if node:
                ends.append(self._after(ends[parent[node]], tokens[node]))
            count, text = ends[node]
            left = row & ~self._stops if count < self._at_least else row
            for word in self._words:
                for given in range(len(word)):
                    if text.endswith(word[:given]):
                        left = left & ~self._pieces.completing(word, given)
            if left.any():
                row[:] = left
