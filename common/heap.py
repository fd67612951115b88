"""Returning freed memory to the operating system."""
import contextlib
import ctypes


def return_freed_memory() -> None:
    """Return free heap memory to the operating system (`malloc_trim`); a no-op without glibc.

    `mallopt(M_MMAP_THRESHOLD)` would be slower: it maps and zeroes every large tensor in every step.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
