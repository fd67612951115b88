"""Killing a process at every write, fsync and rename that it makes, one after the other."""
from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

# Calls into C that change what is on the disk; of our own, the exchange of two folders is one.
CALLS = {
    "write", "writelines", "flush", "close", "truncate", "replace", "rename", "fsync", "link", "symlink",
    "mkdir", "unlink", "remove", "rmdir", "sendfile", "copy_file_range", "write_record", "write_end_of_file",
}
MOST = 2000  # changes of one action; more is a mistake of the test


def kills(action: Callable[[], object], prepare: Callable[[], object]) -> Iterator[str]:
    """Run `action` in a child that is killed before its first change of the disk, then in one that is killed
    before its second and so on, until one comes to its end. Yields what was about to be done each time.

    prepare: called before each child.
    """
    for count in range(1, MOST):
        prepare()
        call = _killed_at(count, action)
        if call is None:
            return
        yield call
    raise AssertionError(f"more than {MOST} changes of the disk")


def _killed_at(count: int, action: Callable[[], object]) -> str | None:
    """The call before which the child was killed; None if it made fewer and came to its end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        left = count

        def watch(frame, event, argument) -> None:
            nonlocal left
            name = argument.__name__ if event == "c_call" else frame.f_code.co_name
            if (event, name) == ("call", "exchange") or (event == "c_call" and name in CALLS):
                owner = getattr(argument, "__self__", None)  # what is printed, or in memory, is on no disk
                if owner in (sys.stdout, sys.stderr) or isinstance(owner, (str, bytes, list, set)):
                    return
                left -= 1
                if left == 0:
                    sys.setprofile(None)
                    os.write(write, name.encode())
                    os.kill(os.getpid(), signal.SIGKILL)

        tqdm.set_lock(threading.RLock())  # its own is shared by forks, and a killed one never gives it back
        signal.alarm(60)
        try:
            sys.setprofile(watch)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    os.close(write)
    with os.fdopen(read) as pipe:
        call = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return call if code else None


def contents(folder: Path) -> dict[str, bytes] | None:
    """What every file below a folder holds, by its path; None if there is no such folder."""
    if not folder.exists():
        return None
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
