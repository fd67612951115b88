"""The error that a user sees. It imports nothing, so that a command can catch it before torch is there."""
from __future__ import annotations


class InputError(Exception):
    """A file, a flag or a request cannot be used. The message is one line: what, where, what to do."""
