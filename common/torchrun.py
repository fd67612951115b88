"""Processes started by torchrun: comparable options, muted output."""
from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Discard stdout and stderr in this context."""
    with open(os.devnull, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


# Options that may differ between machines. Callers compare the contents of these files.
PER_MACHINE = {
    "checkpoint", "draft", "datastore", "prompt_file", "json_schema", "questions", "out", "trace", "device",
    "threads", "host", "port", "api_key",
}


def shared_options(o: argparse.Namespace, *contents: object) -> str:
    """Return the options that all ranks must share, and the contents of files, as one line."""
    shared = {name: value for name, value in sorted(vars(o).items()) if name not in PER_MACHINE}
    return repr((shared, *contents))
