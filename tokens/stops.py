"""Stop strings: found across tokens, and removed from the output."""
from __future__ import annotations

import re
from collections.abc import Collection

from tokens.tokenizer import TextStream


def partial_match(text: str, targets: Collection[str]) -> int:
    """Return the length of the longest suffix of a text that is a prefix of one of these targets."""
    max_length = min(max(map(len, targets), default=1) - 1, len(text))
    lengths = (n for n in range(max_length, 0, -1) if any(t.startswith(text[-n:]) for t in targets))
    return next(lengths, 0)


class StopStream:
    """Detokenizes up to the first stop string, which is excluded.

    Text that may be the start of a stop string is held back. If one token completes several stop strings, the
    one that starts first wins, then the longest. A control token has no text, but matches its name in a stop
    string. stops: non-empty strings. limits: `tokens.limits: Limits`, for stop_token_ids and min_tokens.
    """

    def __init__(self, stream: TextStream, stops: tuple[str, ...], limits=None):
        control_ids = {name: i for name, i in stream.control.items() if any(name in stop for stop in stops)}
        # Lone surrogates stand for control tokens: decoded text has none.
        marks = {name: chr(0xD800 + n) for n, name in enumerate(sorted(control_ids, key=len, reverse=True))}
        names = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        marked = {names.sub(lambda match: marks[match[0]], stop): stop for stop in stops}
        self._stops = dict(zip(stops, stops)) | marked  # stop string with marks -> as passed
        self._marks = {i: marks[name] for name, i in control_ids.items()}
        self._texts = {ord(mark): stream.piece(i).decode() for i, mark in self._marks.items()}
        self._stream, self._held = stream, ""
        self._stop_ids, self._min_left = (limits.stop_token_ids, limits.min_tokens) if limits else ((), 0)

    def emit(self, ids: list[int]) -> tuple[str, int, str | int | None]:
        """See `TextStream.emit`. Must not be called after a stop."""
        released = ""
        for i, token in enumerate(ids):
            self._min_left -= 1
            if token in self._stop_ids and self._min_left < 0:
                return released + self.flush(), i + 1, token
            text, stop = self._release(self._marks.get(token) or self._stream.push([token]))
            released += text
            if stop is not None:
                return released, i + 1, stop
        return released, len(ids), None

    def flush(self) -> str:
        """Return the held-back text of an output that ended without a stop."""
        text, _ = self._release(self._stream.flush())
        return text + self._held.translate(self._texts)

    def _release(self, text: str) -> tuple[str, str | None]:
        self._held += text
        if self._min_left >= 0:
            released, self._held = self._held, ""
            return released.translate(self._texts), None
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stops]
        if complete := [match for match in found if match[0] >= 0]:
            at, _, stop = min(complete)
            released, self._held = self._held[:at], ""
            return released.translate(self._texts), self._stops[stop]
        end = len(self._held) - partial_match(self._held, self._stops)
        released, self._held = self._held[:end], self._held[end:]
        return released.translate(self._texts), None
