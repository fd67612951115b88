"""What a conversation holds."""
from __future__ import annotations

from collections.abc import Iterator


def texts_of(value: object) -> Iterator[str]:
    """Every text in lists and dictionaries."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            waiting += found.keys()
            waiting += found.values()
        elif isinstance(found, (list, tuple)):
            waiting += found
