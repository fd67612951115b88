"""A file that is there whole or not at all."""
from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_place_of(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, to be written in this context: at its end the file takes the place of `path`, or, after an
    error, is gone. What a link leads to is replaced, not the link; a device or a pipe is written itself. Raises OSError."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")  # another may be writing the same
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
