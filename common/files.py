"""Files: written whole or not at all, read with one-line errors and within bounds."""
from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from common.errors import InputError, did_you_mean

MOST_JSON = 512 << 20  # bytes of a file that is parsed
MOST_TEXT = 128 << 20  # bytes of a prompt; a context of a million tokens of the longest kind
MOST_OF_DATA = 4 << 30  # bytes of what is read as a whole: one JSON array, a text for a store
LONGEST_LINE = 64 << 20
HANDED_OVER = ("/dev/", "/proc/self/fd/")  # pipes of the shell; others may wait for ever
NO_FILES = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device"}
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON: half of a character that is spelled as two


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
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks has no leftovers
        return False
    return True


def left_behind(folder: Path, beginning: str, ending: str) -> Iterator[Path]:
    """Files and folders of such names that no living process holds: leftovers of killed runs."""
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

    After an error the temporary file is gone and `path` is as before. Leftovers of killed runs are removed.
    If `path` is a link, what it leads to is replaced. A device or a pipe is written directly. Raises OSError.
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


def check_file(path: str | Path, what: str = "") -> int:
    """Return the size of a file. Raises InputError unless there is a regular one. what: see `read_bytes`."""
    name = f"{what} {path}".strip()
    try:
        found = os.stat(path)
    except (OSError, ValueError) as e:  # ValueError: a name with a zero in it
        why = f"cannot be read ({e})"
        if isinstance(e, FileNotFoundError):
            there = (file.name for file in Path(path).parent.glob('*'))
            why = f"no such file{did_you_mean(Path(path).name, there)}"
        raise InputError(f"{name}: {why}") from None
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise InputError(f"{name}: is {NO_FILES.get(kind, 'no file')}; expected a file")
    return found.st_size


def check_readable(what: str, path: str | Path) -> None:
    """Raise InputError unless a text can be read there: a file, or a pipe of the shell. Nothing is read."""
    if not str(path).startswith(HANDED_OVER):
        check_file(path, what)
    if not os.access(path, os.R_OK):
        raise InputError(f"{f'{what} {path}'.strip()}: cannot be read")


def read_bytes(path: str | Path, most: int = 1 << 30, what: str = "") -> bytes:
    """Read a file, or a pipe such as /dev/stdin, of at most `most` bytes.

    what: stands before the path in an error, such as a flag. Raises InputError if it is missing or too long.
    """
    check_readable(what, path)
    name, parts, found = f"{what} {path}".strip(), [], 0
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while max(size, found) <= most and (part := file.read(1 << 20)):
                parts.append(part)
                found += len(part)
    except OSError as e:
        raise InputError(f"{name}: cannot be read ({e.strerror or e})") from None
    if max(size, found) > most:
        raise InputError(f"{name}: is {max(size, found):,} bytes or more; expected at most {most:,}")
    return b"".join(parts)


def read_text(path: str | Path, most: int = MOST_TEXT, what: str = "") -> str:
    """Read a text in UTF-8, without a byte order mark; lines end in \\n. Arguments: see `read_bytes`."""
    try:
        text = read_bytes(path, most, what).decode("utf-8-sig")
    except UnicodeDecodeError as e:
        name = f"{what} {path}".strip()
        raise InputError(f"{name}: cannot be read, it is no UTF-8 (byte {e.start:,})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: str | Path, what: str = "") -> Iterator[str]:
    """Yield the lines of a text in UTF-8. Raises InputError, also on a line that is too long."""
    check_readable(what, path)
    name, number = f"{what} {path}".strip(), 0
    try:
        with open(path, "rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise InputError(f"{name}: line {number} has more than {LONGEST_LINE:,} bytes")
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\n")
    except UnicodeDecodeError as e:
        raise InputError(f"{name}: cannot be read, line {number} is no UTF-8 (byte {e.start:,})") from None
    except OSError as e:
        raise InputError(f"{name}: cannot be read ({e.strerror or e})") from None


def read_json(path: str | Path) -> dict:
    """Parse a JSON object. Raises InputError if it is missing, unreadable, not an object, or too large."""
    data = parse_json(read_bytes(path, MOST_JSON), str(path))
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def parse_json(content: bytes, where: str) -> object:
    """Return the value of a JSON text. Raises InputError, which begins with `where`."""
    try:
        text = content.decode("utf-8")
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: cannot be read as JSON ({e})") from None
    if HALF.search(text):
        check_characters(value, where)
    return value


def digest(*made_of: object) -> str:
    """Return a digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:24]


def check_characters(value: object, where: str) -> None:
    """Raise InputError, which begins with `where`, if a text in a JSON value has half a character.

    JSON can spell one ("\\ud800"); no text with it can be written, or cut into tokens.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        half = e.object[e.start].encode("unicode_escape").decode()
        raise InputError(f"{where}: holds {half}, half of a character; expected whole ones") from None
