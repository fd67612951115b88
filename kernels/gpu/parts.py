"""Which parts of a step run on our kernels: all of them, except what failed `engine.check`."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

PARTS = "attend", "linear", "experts", "rank", "restrict", "move"
left_out: set[str] = set()  # parts that their PyTorch definitions compute
observers: list[Callable] = []  # the last is called instead of a kernel: (part, kernel, definition, args)


def on_kernel(part: str, definition: Callable) -> Callable:
    """Decorate a method that computes a part of a step by a kernel. definition: the method it overrides."""
    def decorate(kernel: Callable) -> Callable:
        @wraps(kernel)
        def chosen(*args, **options):
            if observers:
                return observers[-1](part, partial(kernel, **options), partial(definition, **options), args)
            return (definition if part in left_out else kernel)(*args, **options)

        return chosen

    return decorate
