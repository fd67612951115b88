"""Text files that a user names: prompts, questions, schemas. None of them can be without end.

A regular file is read if it is not too long. A pipe is read where the user has handed it over: standard
input, and a shell's <(...). A pipe with a name, a device or a socket may never end, or hold back its first
byte for ever; it is refused.
"""
from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common.errors import InputError

MOST = 128 << 20  # bytes of a prompt; a context of a million tokens of the longest kind
MOST_OF_DATA = 4 << 30  # of what is read as a whole: one JSON array, a text for a store
LONGEST_LINE = 64 << 20
HANDED_OVER = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


@contextmanager
def opened(path: str | Path, most: int, what: str = "") -> Iterator[BinaryIO]:
    """A file that is open for reading, in bytes.

    most: bytes that a regular file may have. what: stands before the path in an error, such as a flag. Raises
    InputError if it is missing, too long or no file that has an end.
    """
    name = f"{what} {path}".strip()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would block
    except (OSError, ValueError) as e:
        raise InputError(f"{name}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    try:
        status = os.fstat(descriptor)
        kind, handed_over = status.st_mode, str(path).startswith(HANDED_OVER)
        piped = handed_over and (stat.S_ISFIFO(kind) or os.isatty(descriptor))
        if stat.S_ISDIR(kind):
            raise InputError(f"{name}: cannot be read (Is a directory)")
        if not stat.S_ISREG(kind) and not piped:
            raise InputError(f"{name}: is a device, a socket or a named pipe; give a regular file")
        if stat.S_ISREG(kind) and status.st_size > most:
            raise InputError(f"{name}: has {status.st_size:,} bytes, at most {most:,} are read")
    except InputError:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        # A regular file never blocks, but for those of the kernel, such as /proc/kmsg.
        os.set_blocking(descriptor, piped)
        try:
            yield file
        except OSError as e:
            raise InputError(f"{name}: cannot be read ({e.strerror or e})") from None


def read_text(path: str | Path, most: int = MOST, what: str = "") -> str:
    """A text in UTF-8, without a byte order mark. Arguments and errors as for `opened`."""
    with opened(path, most, what) as file:
        data = file.read(most + 1)
    name = f"{what} {path}".strip()
    if data is None:
        raise InputError(f"{name}: cannot be read (it waits for more without an end)")
    if len(data) > most:
        raise InputError(f"{name}: has more than {most:,} bytes, so many are read")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as e:
        raise InputError(f"{name}: cannot be read, it is no UTF-8 (byte {e.start:,})") from None


def read_lines(path: str | Path, what: str = "") -> Iterator[str]:
    """The lines of a text in UTF-8, one at a time. Raises InputError, on lines that are too long, too."""
    name = f"{what} {path}".strip()
    with opened(path, 1 << 62, what) as file:
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
    """Raise InputError unless `opened` takes a file. Nothing is read."""
    with opened(path, 1 << 62, what):
        pass
