"""Commands that torchrun starts several times: what all processes agree on, and how they end."""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1  # prctl(2)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Discard what is printed in this context."""
    with open(os.devnull, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


# Options that may differ between machines. The contents of their files are compared by their callers.
OF_A_MACHINE = {
    "checkpoint", "draft", "datastore", "prompt_file", "json_schema", "questions", "out", "trace", "device",
    "threads", "host", "port", "api_key",
}


def command_in_words(o: argparse.Namespace, *read: object) -> str:
    """Return on one line the options on which all processes have to agree, and the contents of files."""
    asked = {name: value for name, value in sorted(vars(o).items()) if name not in OF_A_MACHINE}
    return repr((asked, *read))


def end_with_torchrun() -> None:
    """Have the system send SIGTERM to this process when the torchrun that started it dies.

    Without this, the others of a group wait for minutes. Only Linux has this call.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
