"""Tensors that are put into large pages."""
import mmap
import weakref

import pytest
import torch

from kernels import large_pages
from kernels.large_pages import CHUNK, LINE, PAGE, empty


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(large_pages, "_rest", torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize("linux", (True, False))
def test_copies_are_equal_and_lie_apart(linux, monkeypatch):
    if not linux:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    tensors = [
        torch.randn(3, 5), torch.randn(7, 2, 4).bfloat16(), torch.arange(11, dtype=torch.uint8),
        torch.empty(0, 4), torch.randn(2, 3).T,
    ]
    copies = [empty(t.shape, t.dtype).copy_(t) for t in tensors]
    for copy in copies:  # one does not reach into another
        copy += 1
    for copy, tensor in zip(copies, tensors):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor + 1) and copy.is_contiguous()
        assert copy.data_ptr() % LINE == copies[0].data_ptr() % LINE
    span = copies[-1].data_ptr() - copies[0].data_ptr()
    assert 0 < span < LINE * 2 * len(tensors)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages to ask for")
def test_one_that_is_larger_than_a_chunk():
    small = empty((3,), torch.float32)
    large = empty((CHUNK + 5,), torch.uint8).fill_(1)
    assert small.data_ptr() % PAGE == large.data_ptr() % PAGE == 0
    assert large.sum(dtype=torch.int64) == CHUNK + 5


def test_memory_is_freed_with_the_last_tensor(monkeypatch):
    freed = []
    map_memory = mmap.mmap

    class Seen(map_memory):
        def __init__(self, *_, **__):
            weakref.finalize(self, freed.append, 1)

    monkeypatch.setattr(mmap, "mmap", Seen)
    a, b = empty((4,), torch.float32), empty((4,), torch.float32)
    large_pages._rest = torch.empty(0, dtype=torch.uint8)
    del a
    assert not freed
    del b
    assert freed == ([1] if hasattr(mmap, "MADV_HUGEPAGE") else [])
