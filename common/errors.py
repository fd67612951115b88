"""The error that a user sees. It imports nothing, so that a command can catch it before torch is there."""
from __future__ import annotations


class InputError(Exception):
    """A file, a flag or a request cannot be used. The message is one line: what, where, what to do."""


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library written in Rust, which is no Exception."""
    return type(error).__module__ == "pyo3_runtime"


def first_line(error: BaseException) -> str:
    """The first line of a library's message, to be quoted in ours; the error's class if it has none."""
    return printable(str(error).strip().partition("\n")[0], 300) or type(error).__name__


def printable(text: str, most: int = 120) -> str:
    """A text from a file, to be shown: its control characters escaped, and not too long."""
    text = escaped(text[: most + 1])
    return text if len(text) <= most else text[:most] + "..."


def escaped(text: str) -> str:
    """A text in which what moves a cursor, changes colours or cannot be printed is escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def not_utf8(text: str) -> bool:
    """Whether a text has parts that UTF-8 cannot hold: bytes of a command line, halves of a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
