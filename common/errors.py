"""InputError, one-line error messages, and file readers that raise InputError."""
from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

FLAG = re.compile(r"(\S+\.py .*)|--([a-z][a-z0-9-]*)")  # group 1: a command to run, kept unchanged
MAX_POINTER, POINTER = 1024, b"version https://git-lfs"  # Git LFS pointer file: max. bytes, first bytes


class InputError(ValueError):
    """A file, a flag or a request cannot be used. The message is one line: what, where, what to do.

    Messages contain flags, which the Python API shows as parameters: --max-seq-len as max_seq_len.
    """

    in_command = False  # set by the command line: messages name flags, not parameters

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.in_command else FLAG.sub(lambda m: m[1] or m[2].replace("-", "_"), message)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Call `common.names.did_you_mean`, which is imported only on errors."""
    return import_module("common.names").did_you_mean(word, known)


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: 1 token, 2,000 tokens."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def printable(text: str, max_length: int = 120) -> str:
    """Return untrusted text, cut after `max_length` characters.

    Control characters are escaped: they could move a cursor or change color.
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= max_length else text[:max_length] + "..."


def one_line(error: object) -> str:
    """Return the message of an error on one line, or its class if it has none."""
    return printable(" ".join(str(error).split()), 1500) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the error's class if it has none."""
    return printable(str(error).strip().partition("\n")[0], 300) or type(error).__name__


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any error of a library, including Rust panics, into an InputError that starts with `what`."""
    try:
        yield
    except BaseException as e:  # a Rust panic is a BaseException
        is_panic = type(e).__module__ == "pyo3_runtime"
        if isinstance(e, InputError) or not (isinstance(e, Exception) or is_panic):
            raise
        raise InputError(f"{what} ({one_line(e)})") from None


# -- reading files ----------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: str | Path, what: str = "") -> Iterator[None]:
    """Turn errors of reading a file into an InputError. what: text before the path, such as a flag.

    Reject Git LFS pointer files, which a clone without Git LFS has in place of large files.
    """
    try:
        if 0 < os.stat(path).st_size < MAX_POINTER and Path(path).read_bytes().startswith(POINTER):
            raise InputError(f"{path}: is a Git LFS pointer, not the file; run `git lfs pull` in its folder")
        yield
    except FileNotFoundError:
        raise InputError(f"{what} {path}: no such file".strip()) from None
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{what} {path}: cannot be read ({getattr(e, 'strerror', e)})".strip()) from None


def check_file(path: str | Path) -> int:
    """Return the size of a file in bytes. Raises InputError, see `reading`."""
    with reading(path):
        return os.stat(path).st_size


def read_text(path: str | Path, what: str = "") -> str:
    """Read a UTF-8 file without its byte order mark; line endings become \\n. Raises as `reading`."""
    with reading(path, what), open(path, encoding="utf-8-sig") as file:
        return file.read()


def read_json(path: str | Path) -> dict:
    """Parse a JSON object. Raises InputError if the file is missing, unreadable, or not an object."""
    with reading(path):
        data = parse_json(Path(path).read_bytes(), str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def parse_json(content: str | bytes, where: str) -> object:
    """Return the value of a JSON text. Raises InputError, which starts with `where`."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: cannot be read as JSON ({e})") from None
