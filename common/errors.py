"""The error that a user sees, and texts of others in its message."""
from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(Exception):
    """A file, a flag or a request cannot be used. The message is one line: what, where, what to do."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with the nearest known name, nothing if none is near."""
    near = difflib.get_close_matches(word, [*known], 1)
    return f" (did you mean {near[0]}?)" if near else ""


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a library in Rust, which is no Exception."""
    return type(error).__module__ == "pyo3_runtime"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, to be quoted in ours, or the error's class."""
    return printable(str(error).strip().partition("\n")[0], 300) or type(error).__name__


def printable(text: str, most: int = 120) -> str:
    """Return a text from a file with escaped control characters, cut after `most`."""
    text = escaped(text[: most + 1])
    return text if len(text) <= most else text[:most] + "..."


def escaped(text: str) -> str:
    """Return a text with escaped control characters: they could move a cursor or change colours."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def not_utf8(text: str) -> bool:
    """Return whether UTF-8 cannot hold a text: it has bytes of a command line, or half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
