"""Call kernels with guard bytes around their outputs, and compare with their definitions."""
import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

GUARD, EDGE, UNSET = 256, 0xA5, 0xFF  # guard bytes on each side, their value, the value of unwritten bytes
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # absolute and relative errors


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Allocate tensors between guard bytes within this context, filled with bytes that are NaN as floats.
    Fails on exit if anything was written outside the tensors.
    """
    memories: list[Tensor] = []

    def with_guards(allocate: Callable) -> Callable[..., Tensor]:
        def allocated(*arguments, **options) -> Tensor:
            x = allocate(*arguments, **options)
            memory = torch.full((2 * GUARD + x.nbytes,), EDGE, dtype=torch.uint8, device=x.device)
            memory[GUARD:-GUARD] = UNSET
            memories.append(memory)
            return memory[GUARD:-GUARD].view(x.dtype).view(x.shape)

        return allocated

    empty, new_empty = with_guards(torch.empty), with_guards(torch.Tensor.new_empty)
    with patch.object(torch, "empty", empty), patch.object(torch.Tensor, "new_empty", new_empty):
        yield
    assert memories, "nothing was allocated"
    for memory in memories:
        edges = torch.cat((memory[:GUARD], memory[-GUARD:]))
        assert (edges == EDGE).all(), "writes outside its results"


def owned(x: Tensor) -> Tensor:
    """Return a copy for the kernel to modify, between guard bytes if within `guarded`."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def check(kernel: Callable, definition: Callable, limit: float = 0.0) -> None:
    """Compare the results of two functions. The kernel is called twice and must give the same bits."""
    with guarded():
        result = kernel()
    close(result, definition(), limit)
    close(kernel(), result)


def close(result, expected, limit: float = 0.0) -> None:
    """Fail if nested tensors differ: floats by more than `limit`, absolute or relative."""
    for x, y in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=limit, atol=limit, check_dtype=False)
