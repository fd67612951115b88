"""Memory in large pages, where the system has them.

A pass reads every weight. Each small page of 4 KB costs it a walk through the page tables, and a processor
does not fetch ahead beyond the page.
"""
from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a large page on x86-64, and mostly on aarch64
CHUNK = 64 << 20  # bytes asked for at a time; what is never written takes no memory
LINE = 64  # a tensor begins with a line of the cache

_rest = torch.empty(0, dtype=torch.uint8)  # of the latest chunk


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A CPU tensor that holds anything, side by side with those that were made before."""
    global _rest
    size = math.prod(shape) * dtype.itemsize
    room = size + -size % LINE
    if room > _rest.numel():
        _rest = _chunk(max(room, CHUNK))
    place, _rest = _rest[:size], _rest[room:]
    return place.view(dtype).view(shape)


def _chunk(size: int) -> Tensor:
    """So many bytes from the beginning of a large page. They are freed with the last tensor in them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE :][:size]
