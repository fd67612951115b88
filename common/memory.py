"""Memory that this process no longer needs."""
from __future__ import annotations

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Let the heap return freed memory to the system, now and later. Without glibc do nothing.

    By default glibc keeps as much free memory as twice the largest block that was ever freed, up to 64 MB.
    """
    trim_threshold, mmap_threshold, limit = -1, -3, 8 << 20  # arguments of mallopt; bytes
    with contextlib.suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, limit), libc.mallopt(trim_threshold, limit), libc.malloc_trim(0)
