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
from typing import BinaryIO

from common.errors import InputError

MOST_JSON = 512 << 20  # bytes that a parsed file may take in memory
NO_LIMIT = 1 << 62  # bytes
VALUE_BYTES = 80  # that a value takes there, about, beside its text
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON: of a character that is spelled as two
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
    same file is removed. If `path` is a link, what it leads to is replaced. A device such as /dev/null is
    written directly. Raises OSError, InputError on what is neither: a pipe that nobody reads would wait for
    ever.
    """
    path = Path(os.path.realpath(path))
    if is_device(path):
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


def is_device(path: Path, name: str = "") -> bool:
    """Whether there is a device of characters here. Raises InputError if it is anything but that or a file.

    name: what the error calls it.
    """
    return path.exists() and not stat.S_ISREG(_status(name or str(path), path, (stat.S_IFCHR,)).st_mode)


def check_file(path: str | Path) -> int:
    """The size of a file. Raises InputError unless there is one that ends: no pipe, no device."""
    return _status(str(path), path, ()).st_size


@contextlib.contextmanager
def opened(
    path: str | Path, most: int = NO_LIMIT, what: str = "", may_be: tuple[int, ...] = ()
) -> Iterator[BinaryIO]:
    """A file that is open for reading, in bytes.

    most: bytes that it may have. what: stands before the path in an error, such as a flag. may_be: kinds,
    beside files, of `stat.S_IFMT`; they are waited for. Raises InputError if it is missing, too long or
    without an end, also where it cannot be read later.
    """
    name = f"{what} {path}".strip()
    size = _status(name, path, may_be).st_size
    if size > most:
        raise InputError(f"{name}: is {size:,} bytes; expected at most {most:,}")
    try:
        # Not to wait, should the name lead to a pipe by now. Some files of the system wait, too.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = _judge(name, os.fstat(file.fileno()), may_be)
            os.set_blocking(file.fileno(), not stat.S_ISREG(found.st_mode))
            yield file
    except OSError as e:
        raise InputError(f"{name}: cannot be read ({e.strerror or e})") from None


def _status(name: str, path: str | Path, may_be: tuple[int, ...]) -> os.stat_result:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except (OSError, ValueError) as e:  # ValueError: a name with a zero in it
        raise InputError(f"{name}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    return _judge(name, found, may_be)


def _judge(name: str, found: os.stat_result, may_be: tuple[int, ...]) -> os.stat_result:
    kind = stat.S_IFMT(found.st_mode)
    if kind not in (stat.S_IFREG, *may_be):
        raise InputError(f"{name}: is {KINDS.get(kind, 'no file')}; expected a file")
    return found


def read_bytes(
    path: str | Path, most: int = 1 << 30, what: str = "", may_be: tuple[int, ...] = ()
) -> bytes:
    """The contents of a file of at most so many bytes. Arguments and errors as for `opened`."""
    name, parts, size = f"{what} {path}".strip(), [], 0
    with opened(path, most, what, may_be) as file:
        first = os.fstat(file.fileno()).st_size + 1  # some files of the system say 0
        while (part := file.read(min(max(first, 1 << 20), most + 1 - size))) != b"":
            if part is None:
                raise InputError(f"{name}: cannot be read (it waits for more without an end)")
            parts.append(part)
            size += len(part)
            if size > most:
                raise InputError(f"{name}: goes on after {most:,} bytes; expected no more")
    return b"".join(parts)


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
        value = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise InputError(f"{where}: cannot be read as JSON ({e})") from None
    except ValueError:  # Python reads no number of more than 4,300 digits
        key, digits = re.search(r'(?:"([^"]{1,99})"\s*:[\s\[]*)?-?(\d{4301,})', text).groups()
        raise InputError(
            f"{where}: {key or 'it'} holds a number of {len(digits):,} digits; expected one that fits 64 bits"
        ) from None
    if HALF.search(text):
        check_characters(value, where)
    return value


def check_characters(value: object, where: str) -> None:
    """Raise InputError, which begins with `where`, if a text in what JSON held has half a character.

    JSON can spell one ("\\ud800"); no text with it can be written, or cut into tokens.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        half = e.object[e.start].encode("unicode_escape").decode()
        raise InputError(f"{where}: holds {half}, half of a character; expected whole ones") from None
