"""Files: written whole or not at all, read with one-line errors, and only if they end.

Pipes, sockets and devices may never end, or wait for ever; files can pretend to be larger than any memory.
"""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from common.errors import InputError

MOST_JSON = 512 << 20  # bytes that a parsed file may take in memory
VALUE_BYTES = 80  # that a value takes there, about, beside its text
KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A context in which an OSError names this file: writing to an open file names none."""
    try:
        yield
    except OSError as e:
        if e.errno is not None:  # else it has its own words, which a name would replace
            e.filename = e.filename or str(path)
        raise


def held(file: int) -> bool:
    """Lock an open file or folder for as long as it stays open -> False if another process holds it.

    The lock ends with the process, however it ends: a name that nobody holds was left behind.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nothing there is taken to be left behind
        return False
    return True


def left_behind(folder: Path, beginning: str, ending: str) -> Iterator[Path]:
    """The files and folders of such names that no living process holds. What a kill -9 leaves is among them.
    """
    try:
        names = [name for name in os.listdir(folder) if name.startswith(beginning) and name.endswith(ending)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            file = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if held(file):
                    yield folder / name
            finally:
                os.close(file)


def sync(path: str | Path) -> None:
    """Have a file, or the names in a folder, on the disk and not only on the way to it. Raises OSError."""
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
    try:
        os.replace(new, old)
    except BaseException:
        os.replace(aside, old)
        raise
    os.replace(aside, new)


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to. At the end the file takes the place of `path`.

    After an error the temporary file is gone and `path` is as before. What a killed process left of the
    same file is removed. If `path` is a link, what it leads to is replaced. A device or a pipe is written
    directly. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with writing(path):
            yield path
        return
    beginning, ending = f".{path.name}.", ".partial"
    for old in left_behind(path.parent, beginning, ending):
        with contextlib.suppress(OSError):
            old.unlink()
    # Another process or thread may be writing the same file.
    part = path.with_name(f"{beginning}{os.getpid()}.{threading.get_ident()}{ending}")
    file = None
    try:
        with writing(path):
            file = os.open(part, os.O_WRONLY | os.O_CREAT, 0o666)
            held(file)
            yield part
            os.fsync(file)  # else a power cut could leave the new name with old, or no, contents
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        if file is not None:
            os.close(file)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, all of it or nothing. Raises OSError."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")


def check_file(path: str | Path) -> int:
    """The size of a file. Raises InputError unless there is one that ends: no pipe, no device."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as e:  # ValueError: a name with a zero in it
        raise InputError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "no file")
        raise InputError(f"{path}: is {kind}; expected a file")
    return found.st_size


def read_bytes(path: str | Path, most: int = 1 << 30) -> bytes:
    """The contents of a file of at most so many bytes. Raises InputError."""
    size = check_file(path)
    if size > most:
        raise InputError(f"{path}: is {size:,} bytes; expected at most {most:,}")
    try:
        # Not to wait, should the name lead to a pipe by now. Some files of the system have no end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            content = file.read(size)
            while len(content) <= most and (more := file.read(min(1 << 20, most + 1 - len(content)))):
                content += more
    except (OSError, TypeError) as e:  # TypeError: None, of what would have to be waited for
        reason = getattr(e, "strerror", None) or "it gives nothing"
        raise InputError(f"{path}: cannot be read ({reason})") from None
    if len(content) > most:
        raise InputError(f"{path}: does not end; expected at most {most:,} bytes")
    return content


def read_text(path: str | Path, most: int = 1 << 30, encoding: str = "utf-8") -> str:
    """The contents of a text file of at most so many bytes. Raises InputError."""
    try:
        return read_bytes(path, most).decode(encoding)
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: cannot be read as text ({e})") from None


def read_json(path: str | Path) -> dict:
    """Parse a JSON object. Raises InputError if it is missing, unreadable, not an object, or too large."""
    data = parse_json(read_bytes(path, MOST_JSON), str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def parse_json(content: bytes, where: str) -> object:
    """The value that a JSON text holds. Raises InputError, which begins with `where`."""
    values = content.count(b",") + content.count(b"[") + content.count(b"{")
    if len(content) + values * VALUE_BYTES > MOST_JSON:
        raise InputError(f"{where}: is JSON of {values:,} values; expected what takes {MOST_JSON:,} bytes")
    try:
        text = content.decode("utf-8")
        return json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise InputError(f"{where}: cannot be read as JSON ({e})") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        key, digits = re.search(r'(?:"([^"]{1,99})"\s*:[\s\[]*)?-?(\d{4301,})', text).groups()
        raise InputError(
            f"{where}: {key or 'it'} holds a number of {len(digits):,} digits; expected one that fits 64 bits"
        ) from None
