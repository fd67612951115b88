"""Texts that end an output: found across tokens, and cut out exactly."""
from __future__ import annotations

from typing import NamedTuple

from tokens.tokenizer import TextStream


class Found(NamedTuple):
    """What some ids gave: text that is certain now, and how many of the ids count.

    stop: the text that ended the output, None if it goes on.
    """

    text: str
    ids: int
    stop: str | None = None


class StopStream:
    """Ids in, text out, up to the first of some texts, of which nothing comes out.

    Text that may be the beginning of one is held back until it is certain. stops: none of them is empty. Of
    two that are complete with the same token the one that begins first counts, of those the longest.
    """

    def __init__(self, stream: TextStream, stops: tuple[str, ...]):
        self._stream, self._stops, self._held = stream, stops, ""

    def push(self, ids: list[int]) -> Found:
        """What these ids give. After a stop nothing may be pushed."""
        if not self._stops:
            return Found(self._stream.push(ids), len(ids))
        certain = ""
        for i, token in enumerate(ids):
            text, stop = self._take(self._stream.push([token]))
            certain += text
            if stop is not None:
                return Found(certain, i + 1, stop)
        return Found(certain, len(ids))

    def flush(self) -> str:
        """The text that still waits, where the output has ended without a stop."""
        text, stop = self._take(self._stream.flush())
        held, self._held = self._held, ""
        return text if stop is not None else text + held

    def _take(self, text: str) -> tuple[str, str | None]:
        self._held += text
        places = [(self._held.find(stop), -len(stop), stop) for stop in self._stops]
        if complete := [place for place in places if place[0] >= 0]:
            at, _, stop = min(complete)
            certain, self._held = self._held[:at], ""
            return certain, stop
        most = max(map(len, self._stops), default=1) - 1
        keep = next(
            (n for n in range(min(most, len(self._held)), 0, -1)
             if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0,
        )
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain, None
