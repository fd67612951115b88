"""Stop strings: found across tokens, and removed from the output."""
from __future__ import annotations

import re
from collections.abc import Collection

from tokens.tokenizer import TextStream


def partial_match(text: str, words: Collection[str]) -> int:
    """Return the length of the longest suffix of a text that is a prefix of one of these words."""
    most = min(max(map(len, words), default=1) - 1, len(text))
    return next((n for n in range(most, 0, -1) if any(word.startswith(text[-n:]) for word in words)), 0)


class StopStream:
    """Detokenizes up to the first stop string, which is excluded.

    Text that may be the start of a stop string is held back. If one token completes two stop strings, the one
    that starts first wins, then the longer one. A control token has no text, but matches its name in a stop
    string. stops: not empty. limits: `tokens.limits: Limits`, for stop_token_ids and min_tokens.
    """

    def __init__(self, stream: TextStream, stops: tuple[str, ...], limits=None):
        named = {name: i for name, i in stream.control.items() if any(name in stop for stop in stops)}
        # Lone surrogates stand for control tokens: decoded text has none.
        marks = {name: chr(0xD800 + n) for n, name in enumerate(sorted(named, key=len, reverse=True))}
        names = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        spelled = {names.sub(lambda name: marks[name[0]], stop): stop for stop in stops}
        self._stops = dict(zip(stops, stops)) | spelled  # spelling with marks -> stop string
        self._marks = {i: marks[name] for name, i in named.items()}
        self._texts = {ord(mark): stream.piece(i).decode() for i, mark in self._marks.items()}
        self._stream, self._held = stream, ""
        self._stop_ids, self._left = (limits.stop_token_ids, limits.min_tokens) if limits else ((), 0)

    def emit(self, ids: list[int]) -> tuple[str, int, str | int | None]:
        """As `TextStream.emit`. Not to be called after a stop."""
        certain = ""
        for i, token in enumerate(ids):
            self._left -= 1
            if token in self._stop_ids and self._left < 0:
                return certain + self.flush(), i + 1, token
            text, stop = self._take(self._marks.get(token) or self._stream.push([token]))
            certain += text
            if stop is not None:
                return certain, i + 1, stop
        return certain, len(ids), None

    def flush(self) -> str:
        """Return the held-back text of an output that ended without a stop."""
        text, _ = self._take(self._stream.flush())
        return text + self._held.translate(self._texts)

    def _take(self, text: str) -> tuple[str, str | None]:
        self._held += text
        if self._left >= 0:
            certain, self._held = self._held, ""
            return certain.translate(self._texts), None
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stops]
        if complete := [one for one in found if one[0] >= 0]:
            at, _, stop = min(complete)
            certain, self._held = self._held[:at], ""
            return certain.translate(self._texts), self._stops[stop]
        end = len(self._held) - partial_match(self._held, self._stops)
        certain, self._held = self._held[:end], self._held[end:]
        return certain.translate(self._texts), None
