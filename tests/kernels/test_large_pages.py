"""Packed weights lie side by side in large pages."""
import mmap

import pytest
import torch

from kernels import packed
from kernels.packed import LINE, PAGE, _large_pages

CHUNK = 2 * PAGE


@pytest.mark.parametrize("linux", (True, False))
def test_tensors_lie_side_by_side(linux, monkeypatch):
    """From the beginning of a page, and in one that is larger than a chunk."""
    monkeypatch.setattr(packed, "CHUNK", CHUNK)
    monkeypatch.setattr(packed, "_rest", torch.empty(0, dtype=torch.uint8))
    if not linux:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    shapes = [((3, 5), torch.float32), ((7, 2, 4), torch.bfloat16), ((11,), torch.uint8)]
    tensors = [_large_pages(*shape).fill_(i) for i, shape in enumerate(shapes)]
    large = _large_pages((CHUNK + 5,), torch.uint8).fill_(1)
    for i, tensor in enumerate(tensors):  # one does not reach into another
        assert (tensor == i).all() and tensor.is_contiguous()
        assert tensor.data_ptr() % LINE == tensors[0].data_ptr() % LINE
    assert 0 < tensors[-1].data_ptr() - tensors[0].data_ptr() < LINE * 2 * len(tensors)
    assert large.sum(dtype=torch.int64) == CHUNK + 5
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert tensors[0].data_ptr() % PAGE == large.data_ptr() % PAGE == 0
