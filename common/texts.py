"""Text files that a user names: prompts, questions, schemas. None of them can be without end.

A regular file is read if it is not too long. A pipe is read where the user has handed it over: standard
input, and a shell's <(...). A pipe with a name, a device or a socket may never end, or hold back its first
byte for ever; it is refused.
"""
from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from common.errors import InputError
from common.files import opened, read_bytes

MOST = 128 << 20  # bytes of a prompt; a context of a million tokens of the longest kind
MOST_OF_DATA = 4 << 30  # of what is read as a whole: one JSON array, a text for a store
LONGEST_LINE = 64 << 20
HANDED_OVER = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def _may_be(path: str | Path) -> tuple[int, ...]:
    """The kinds of `stat.S_IFMT` that a path may lead to, beside files."""
    if not str(path).startswith(HANDED_OVER):
        return ()
    return (stat.S_IFIFO, stat.S_IFCHR) if _is_terminal(path) else (stat.S_IFIFO,)


def _is_terminal(path: str | Path) -> bool:
    number = str(path).rpartition("/")[2].replace("stdin", "0")
    return number.isdecimal() and len(number) < 9 and os.isatty(int(number))


def read_text(path: str | Path, most: int = MOST, what: str = "") -> str:
    """A text in UTF-8, without a byte order mark, of at most so many bytes.

    what: stands before the path in an error, such as a flag. Raises InputError if it is missing, too long or
    no file that has an end.
    """
    data = read_bytes(path, most, what, _may_be(path))
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        name = f"{what} {path}".strip()
        raise InputError(f"{name}: cannot be read, it is no UTF-8 (byte {e.start:,})") from None


def read_lines(path: str | Path, what: str = "") -> Iterator[str]:
    """The lines of a text in UTF-8, one at a time. Raises InputError, on lines that are too long, too."""
    name = f"{what} {path}".strip()
    with opened(path, what=what, may_be=_may_be(path)) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise InputError(f"{name}: line {number} has more than {LONGEST_LINE:,} bytes")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\n")
            except UnicodeDecodeError as e:
                raise InputError(
                    f"{name}: cannot be read, line {number} is no UTF-8 (byte {e.start:,})"
                ) from None


def check_readable(what: str, path: str | Path) -> None:
    """Raise InputError unless a text can be read there, as far as that shows. Nothing is read."""
    with opened(path, what=what, may_be=_may_be(path)):
        pass
