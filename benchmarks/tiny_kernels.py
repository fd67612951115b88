"""A Triton kernel that does next to nothing, for `probe.py`: what remains is the cost of a launch."""
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def add_one_kernel(x, EARLY: tl.constexpr):
    """One number plus one. EARLY: the next kernel may start, and wait for this one's result by itself."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(x, tl.load(x) + 1)


def add_one(x: Tensor, early: bool) -> None:
    """x[0] += 1. early: by programmatic launch, which compute capability 9.0 has."""
    add_one_kernel[(1,)](x, EARLY=early, num_warps=1, launch_pdl=early)
