"""Pointers of Git LFS, which a clone without it has in place of large files."""
from __future__ import annotations

from pathlib import Path

from common.errors import InputError
from common.files import check_file

MAX_POINTER = 1024  # bytes


def check_pointer(path: Path) -> None:
    """Raise InputError if there is no file, or a pointer."""
    if 0 < check_file(path) < MAX_POINTER and path.read_bytes().startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: is a Git LFS pointer, not the file; run `git lfs pull` in its folder")
