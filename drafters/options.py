"""Checks of options that only some methods take."""
from __future__ import annotations

from pathlib import Path

from common.errors import InputError
from engine.drafting import MAX_TREE_NODES, DraftOptions, methods_of
from extensions import METHOD_FLAGS, METHODS, Method, MethodFlag


def is_resizable(name: str) -> bool:
    """Return whether a method, or one of two combined ones, drafts trees of any size."""
    return any(method.resizable for method in methods_of(name).values())


def flags_of(name: str) -> dict[str, MethodFlag]:
    """Return the flags of a method, or of two combined ones."""
    return {flag: info for flag, info in METHOD_FLAGS.items() if info.method in methods_of(name)}


def check(drafting: DraftOptions, methods: dict[str, Method]) -> dict:
    """Return the flags of the methods, with defaults. Raises InputError."""
    window, name = drafting.window, drafting.method
    if window is not None and (type(window) is not int or window < 0):
        raise InputError(f"--draft-window {window!r}: must be at least 1 token, or 0 for all")
    if window is not None and not is_resizable(name):
        supported = ", ".join(filter(is_resizable, METHODS))
        raise InputError(f"--draft-window {window}: is for heads with attention ({supported}); leave it out")
    known = flags_of(name)
    flags = {flag: info.default for flag, info in known.items()} | drafting.flags
    for flag, value in flags.items():
        if flag not in known:
            owner = METHOD_FLAGS[flag].method if flag in METHOD_FLAGS else "no method"
            raise InputError(f"--{flag} belongs to --speculate {owner}; leave it out")
        _, default, what, minimum = known[flag]
        if value is None:
            raise InputError(f"--speculate {name}: needs --{flag}, the {what}")
        if default is None and not Path(value).is_file():
            raise InputError(f"--{flag} {value}: no such file; pass the {what}")
        if default is not None and not (type(value) is int and minimum <= value <= MAX_TREE_NODES):
            raise InputError(f"--{flag} {value!r}: must be {minimum} to {MAX_TREE_NODES:,}")
    return flags
