"""A file that is there whole or not at all."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_place_of(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, to be written in this context: at its end the file takes the place of `path`, or, after an
    error, is gone. Raises OSError."""
    path = Path(path)
    part = path.with_name(path.name + ".partial")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
