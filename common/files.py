"""Files: written whole or not at all, and read as JSON with one-line errors."""
from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from common.errors import InputError


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A context in which an OSError names this file: writing to an open file names none."""
    try:
        yield
    except OSError as e:
        if e.errno is not None:  # else it has its own words, which a name would replace
            e.filename = e.filename or str(path)
        raise


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to. At the end the file takes the place of `path`.

    After an error the temporary file is gone and `path` is as before. If `path` is a link, what it leads to
    is replaced. A device or a pipe is written directly. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with writing(path):
            yield path
        return
    # Another process or thread may be writing the same file.
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with writing(path):
            yield part
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, all of it or nothing. Raises OSError."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict:
    """Parse a JSON object. Raises InputError if it is missing, unreadable or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise InputError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data
