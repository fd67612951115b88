"""Options that a method has no use for."""
from __future__ import annotations

from common.errors import InputError


def refuse(name: str, **options: object) -> None:
    """Raise InputError if any of these options, which mean nothing to the method, has a value."""
    for option, value in options.items():
        if value:
            raise InputError(f"--speculate {name}: has no use for --{option}; leave it out")
