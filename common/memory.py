"""Memory that this process no longer needs."""
from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path


def return_freed_memory() -> None:
    """Let the heap return freed memory to the system, now and later. Without glibc do nothing.

    By default glibc keeps as much free memory as twice the largest block that was ever freed, up to 64 MB.
    """
    trim_threshold, mmap_threshold, limit = -1, -3, 8 << 20  # arguments of mallopt; bytes
    with contextlib.suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, limit), libc.mallopt(trim_threshold, limit), libc.malloc_trim(0)


def unmap_idle_code() -> None:
    """Unmap the code of libraries until it runs. Importing PyTorch maps 70 MB, decoding needs 15 of them."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        libc, maps = ctypes.CDLL(None), Path("/proc/self/maps").read_text()
        for addresses, flags, *_, name in (line.split(maxsplit=5) for line in maps.splitlines()):
            if flags == "r-xp" and name.startswith("/"):  # never written, so that the file has it
                start, end = (int(address, 16) for address in addresses.split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
