"""Kernels that fall back to their PyTorch definitions if `engine.check` finds them wrong."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

KERNELS = "attend", "delta", "dense", "linear", "experts", "rank", "restrict"
disabled: set[str] = set()  # kernels whose PyTorch definition runs instead
observer: Callable | None = None  # called instead of a kernel: (name, kernel, definition, args)


def with_fallback(name: str, definition: Callable) -> Callable:
    """Decorate a method that launches the kernel `name`. definition: the method it overrides."""
    def decorate(kernel: Callable) -> Callable:
        @wraps(kernel)
        def kernel_or_definition(*args, **options):
            if observer is not None and name not in disabled:
                return observer(name, partial(kernel, **options), partial(definition, **options), args)
            return (definition if name in disabled else kernel)(*args, **options)

        return kernel_or_definition

    return decorate
