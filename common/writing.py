"""Writing files and folders: completely or not at all."""
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
    """Let an OSError in this context name the file: writing to an open file names none."""
    try:
        yield
    except OSError as e:
        if e.errno is not None:  # else it has its own words, which a name would replace
            e.filename = e.filename or str(path)
        raise


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; at the end it replaces `path`.

    After an error the temporary file is gone and `path` is as before. If `path` is a link, its destination is
    replaced. A device or a pipe is written directly. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    # Another process or thread may be writing the same file.
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
    """Yield an empty folder beside `out`; at the end it replaces `out`.

    kept: which entries of `out` stay if the new folder has none of that name: by default folders, such as
    heads. If `out` is a link, its destination is replaced. After an error and on Ctrl-C the temporary folder
    is removed. Raises InputError if it cannot be written.
    """
    place = out.resolve()
    temporary = place.with_name(f".{place.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # in a container, process ids repeat
        temporary.mkdir(parents=True)
        yield temporary
        _replace_folder(temporary, place, kept)
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
        out.rename(old)
        new.rename(out)
        for entry in filter(kept, old.iterdir()):
            if not os.path.lexists(out / entry.name):
                entry.rename(out / entry.name)
        shutil.rmtree(old)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, all of it or nothing. Raises OSError."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


def digest(*made_of: object) -> str:
    """Return a digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]


def check_folder(flag: str, folder: str) -> None:
    """Raise InputError unless a folder, or the one that it would be made in, takes files."""
    path = Path(folder).absolute()
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise InputError(f"{flag} {folder}: not a folder that can be written to")


def check_replaceable(flag: str, folder: str) -> None:
    """Raise InputError unless a folder can be made, or replaced by another one, which is made next to it."""
    path = Path(folder).resolve()
    if os.path.ismount(path):
        raise InputError(f"{flag} {folder}: is mounted, and cannot be replaced; name a folder in it")
    if os.path.exists(path) and not path.is_dir():
        raise InputError(f"{flag} {folder}: not a folder that can be written to")
    check_folder(flag, str(path.parent))
