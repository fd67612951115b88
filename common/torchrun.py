"""Processes started by torchrun: comparable options, muted output, exit with the launcher."""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1  # prctl(2)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Discard stdout and stderr in this context."""
    with open(os.devnull, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


# Options that may differ between machines. Of the files among them, callers compare the contents.
PER_MACHINE = {
    "checkpoint", "draft", "datastore", "prompt_file", "json_schema", "questions", "out", "trace", "device",
    "threads", "host", "port", "api_key",
}


def shared_options(args: argparse.Namespace, *contents: object) -> str:
    """Return the options that must be equal on all ranks, and the contents of files, as one line."""
    shared = {name: value for name, value in sorted(vars(args).items()) if name not in PER_MACHINE}
    return repr((shared, *contents))


def exit_with_torchrun() -> None:
    """Send SIGTERM to this process when its torchrun dies.

    Otherwise ranks would continue without a launcher, or wait for minutes.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
