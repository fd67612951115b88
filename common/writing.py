"""Atomic writes of files and folders."""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import InputError


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Add the file name to an OSError raised in this context: errors of write() have none."""
    try:
        yield
    except OSError as e:
        if e.errno is not None:  # otherwise setting `filename` would change the message
            e.filename = e.filename or str(path)
        raise


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it replaces `path`.

    On an error the temporary file is removed and `path` is unchanged. Symlinks are followed. Devices and
    pipes are written directly. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    # Unique per process and thread: others may be writing the same file.
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with writing(path):
            part.touch()
            yield part
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def staging(out: Path, kept: Callable[[Path], bool] = Path.is_dir) -> Iterator[Path]:
    """Yield an empty temporary folder next to `out`; on success it replaces `out`.

    kept: a predicate; entries of the old `out` for which it is true are moved to the new folder unless it has
    that name (default: subfolders, such as heads). Symlinks are followed. On an error or Ctrl-C the temporary
    folder is removed. Raises InputError if it cannot be written.
    """
    destination = out.resolve()
    temporary = destination.with_name(f".{destination.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a killed process with our pid (containers)
        temporary.mkdir(parents=True)
        yield temporary
        _replace_folder(temporary, destination, kept)
    except OSError as e:
        raise InputError(f"{out}: cannot be written ({e})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_folder(new: Path, out: Path, kept: Callable[[Path], bool]) -> None:
    try:
        os.replace(new, out)
    except OSError:
        if not out.is_dir():
            raise
        old = new.with_name(f"{new.name}.old")
        shutil.rmtree(old, ignore_errors=True)  # left by a killed process
        out.rename(old)
        try:
            new.rename(out)
        except OSError:
            old.rename(out)
            raise
        for entry in filter(kept, old.iterdir()):
            if not os.path.lexists(out / entry.name):
                entry.rename(out / entry.name)
        shutil.rmtree(old)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically. Raises OSError."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


def digest(*values: object) -> str:
    """Return a SHA-256 digest (24 hex digits) of JSON-serializable values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:24]


def check_writable(flag: str, folder: str) -> None:
    """Raise InputError unless a folder, or its nearest existing parent, is writable."""
    path = Path(folder).absolute()
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise InputError(f"{flag} {folder}: is not a writable folder")


def check_replaceable(flag: str, folder: str) -> None:
    """Raise InputError unless `staging` can create or replace a folder."""
    path = Path(folder).resolve()
    if os.path.ismount(path):
        raise InputError(f"{flag} {folder}: is a mount point and cannot be replaced; use a folder in it")
    if os.path.exists(path) and not path.is_dir():
        raise InputError(f"{flag} {folder}: is not a writable folder")
    check_writable(flag, str(path.parent))
