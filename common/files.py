"""Read files, with one-line errors."""
from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from common.errors import InputError

MAX_POINTER, POINTER = 1024, b"version https://git-lfs"  # size in bytes; prefix


@contextlib.contextmanager
def reading(path: str | Path, what: str = "") -> Iterator[None]:
    """Turn errors of reading a file into an InputError. what: precedes the path, such as a flag.

    A small file may be a pointer of Git LFS, which a clone without it has in place of large files.
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
    """Read a text in UTF-8, without a byte order mark; lines end in \\n. Raises InputError, see `reading`."""
    with reading(path, what), open(path, encoding="utf-8-sig") as file:
        return file.read()


def read_json(path: str | Path) -> dict:
    """Parse a JSON object. Raises InputError if the file is missing, unreadable, or no object."""
    with reading(path):
        data = parse_json(Path(path).read_bytes(), str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def parse_json(content: str | bytes, where: str) -> object:
    """Return the value of a JSON text. Raises InputError, which begins with `where`."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: cannot be read as JSON ({e})") from None
