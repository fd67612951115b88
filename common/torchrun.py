"""Commands that torchrun starts several times: the number of this process, and one voice for all."""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

from common.errors import InputError

PATIENCE = timedelta(seconds=5)  # for the store that torchrun keeps
PR_SET_PDEATHSIG = 1  # prctl(2)


def several() -> bool:
    """Return whether this is one of several processes."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_first() -> bool:
    """Return whether this is the only process, or the first of several."""
    return not several() or os.environ.get("RANK", "0") == "0"


# Options that may differ between machines. The contents of their files are compared by their callers.
OF_A_MACHINE = {
    "checkpoint", "draft", "datastore", "prompt_file", "json_schema", "questions", "out", "trace", "device",
    "threads", "host", "port", "api_key",
}


def command_in_words(o: argparse.Namespace, *read: object) -> str:
    """Return on one line the options on which all processes have to agree, and the contents of files."""
    asked = {name: value for name, value in sorted(vars(o).items()) if name not in OF_A_MACHINE}
    return repr((asked, *read))


def check_group() -> None:
    """Raise InputError unless the environment numbers this process as torchrun does.

    torch would wait for a process that does not exist.
    """
    found = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR")}
    size, rank, port, address = found.values()
    numbered = all(map(str.isdecimal, (size, rank, port))) and int(rank) < int(size)
    if not (numbered and address):
        words = " ".join(f"{name}={value[:40]}" for name, value in found.items())
        raise InputError(f"{words} in the environment: these describe no process of a group; start several"
                         " with torchrun, or unset WORLD_SIZE")


def end_with_torchrun() -> None:
    """Have the system send SIGTERM to this process when the torchrun that started it dies.

    Without this, the others of a group wait for minutes. Only Linux has this call.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def one_voice() -> Iterator[Callable[[str], None] | None]:
    """Mute all but the first of several processes.

    Yields a function that prints the first line that it gets in any process, None for a single process.
    """
    voice = sys.stderr

    def say(line: str) -> None:
        if _is_first_to_say():
            print(line, file=voice, flush=True)

    if is_first():
        yield say if several() else None
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        with contextlib.redirect_stderr(nowhere):
            yield say


def _is_first_to_say() -> bool:
    """Return whether this is the first call of all processes. True if the store is gone."""
    import torch.distributed as dist

    env = os.environ
    try:
        address = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        # torch prints each attempt to reach a store that is gone.
        socket.create_connection(address, PATIENCE.seconds).close()
        store = dist.TCPStore(*address, is_master=False, timeout=PATIENCE)
        start = env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"last line of {start}", 1) == 1
    except (KeyError, ValueError, OSError, RuntimeError):
        return True
