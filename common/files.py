"""Files: written whole or not at all, read with one-line errors."""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import hashlib
import json
import os
import threading
from collections.abc import Iterator
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


def held(file: int) -> bool:
    """Lock an open file or folder for as long as it stays open -> False if another process holds it.

    The lock ends with the process: a name without a lock is a leftover.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also on a file system without locks, where leftovers stay
        return False
    return True


def left_behind(folder: Path, beginning: str, ending: str) -> Iterator[Path]:
    """Yield what is named BEGINNING*ENDING and no living process holds: leftovers of killed runs."""
    for path in folder.glob(f"{glob.escape(beginning)}*{ending}"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                if held(file):
                    yield path
            finally:
                os.close(file)


def sync(path: str | Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def exchange(new: Path, old: Path) -> None:
    """Let two folders swap names in one step, where the system can; else in two. Raises OSError.

    Killed between the two, it leaves the old one beside itself, named .NAME.old-PID.
    """
    swap = getattr(ctypes.CDLL(None), "renameat2", None)  # of Linux
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if swap and swap(here, os.fsencode(new), here, os.fsencode(old), both) == 0:
        return
    aside = old.with_name(f".{old.name}.old-{os.getpid()}")
    os.replace(old, aside)
    os.replace(new, old)
    os.replace(aside, new)


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to. At the end the file takes the place of `path`.

    After an error the temporary file is gone and `path` is as before. Leftovers of killed runs are removed.
    If `path` is a link, what it leads to is replaced. A device or a pipe is written directly. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    for old in left_behind(path.parent, f".{path.name}.", ".partial"):
        old.unlink()
    # Another process or thread may be writing the same file.
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        with writing(path), open(part, "wb") as file:
            held(file.fileno())
            yield part
            os.fsync(file)  # else a power cut could leave the new name with old, or no, contents
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, all of it or nothing. Raises OSError."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def reading(path: str | Path, what: str = "") -> Iterator[None]:
    """Turn errors of reading a file into an InputError. what: stands before the path, such as a flag."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{what} {path}: no such file".strip()) from None
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{what} {path}: cannot be read ({getattr(e, 'strerror', e)})".strip()) from None


def check_file(path: str | Path) -> int:
    """Return the size of a file. Raises InputError if there is none."""
    with reading(path):
        return os.stat(path).st_size


def read_text(path: str | Path, what: str = "") -> str:
    """Read a text in UTF-8, without a byte order mark; lines end in \\n. Raises InputError, see `reading`."""
    with reading(path, what), open(path, encoding="utf-8-sig") as file:
        return file.read()


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a text in UTF-8; only \\n ends one. Raises InputError."""
    with reading(path), open(path, encoding="utf-8-sig", newline="\n") as file:
        for line in file:
            yield line.rstrip("\n")


def read_json(path: str | Path) -> dict:
    """Parse a JSON object. Raises InputError if it is missing, unreadable, or not an object."""
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


def digest(*made_of: object) -> str:
    """Return a digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]
