"""The process in which tokenizers and chat templates run, and what it may take.

Both are programs of whoever made a checkpoint. A pattern of tokenizer.json can backtrack without end inside a
library that holds the interpreter, where no thread can stop it; a library may end its process. So they run
in a process beside ours, one for all tokenizers. It gets so much processor time and memory for each request,
and is started anew if that was not enough. Its messages are JSON: what comes back is never run.
"""
from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from common.errors import InputError
from tokens.encoding_process import HEADER, Allowance
from tokens.files import FILES
from tokens.spelling import TooLong

ROOT = Path(__file__).resolve().parent.parent
START = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)];"
    " from tokens.encoding_process import main; main()"
)
KEPT = 8  # tokenizers that are not loaded again while their files are the same
WAIT = 15  # times the processor time that a request may take: the machine may have other work
QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}


class Ended(Exception):
    """The process ended while it worked."""


class Guard:
    """The process, started when it is first needed. Any thread may ask it; one request is done at a time."""

    def __init__(self):
        self._lock, self._process, self._owner = threading.RLock(), None, 0
        self._loaded: set[int] = set()  # numbers of the tokenizers that it holds
        self._forgotten: list[int] = []  # of those that nobody holds any more
        self._count = 0
        self._known: dict[str, tuple[list, Guarded]] = {}  # by folder, with what its files were
        self.doing = ""

    def load(self, folder: Path) -> Guarded:
        """The tokenizer of a folder. Raises InputError if its files are damaged or do too much."""
        with self._lock:
            stamp = [
                (name, status.st_size, status.st_mtime_ns) for name in FILES
                if (folder / name).is_file() and (status := (folder / name).stat())
            ]
            key = str(folder.absolute())
            if key not in self._known or self._known[key][0] != stamp:
                while len(self._known) >= KEPT:
                    del self._known[next(iter(self._known))]
                self._known[key] = stamp, Guarded(self, folder)
            return self._known[key][1]

    def rebuild(self, fields: dict, folder: Path, where: str) -> int:
        """Have the files of a GGUF's tokenizer written into a folder, see `tokens.gguf_tokenizer`."""
        request = {"do": "rebuild", "number": 0, "folder": str(folder.absolute()), "named": str(folder)}
        return self.ask(request | {"arguments": {"fields": fields, "where": where}}, where)

    def alone(self) -> threading.RLock:
        """A context in which nobody else asks."""
        return self._lock

    def begin(self) -> None:
        """Start the process, unless it runs, while other things are done."""
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()

    def ask(self, request: dict, what: str) -> object:
        """The answer to a request. what: whose files may be at fault. Raises InputError."""
        forgotten, self._forgotten = self._forgotten, []
        data = json.dumps(request | {"forget": forgotten}).encode()
        allowance = Allowance.of(request, len(data))
        with self._lock:
            self.begin()
            self.doing = "the tokenizer"
            began = time.monotonic()
            try:
                self._send(data)
                return self._answer(began + WAIT * allowance.seconds)
            except Ended:
                raise InputError(f"{what}: {self._why(allowance)}") from None
            except TimeoutError:
                self.close()
                waited = f"has not ended after {time.monotonic() - began:.0f} s and was stopped"
                raise InputError(f"{what}: {self.doing} {waited}") from None
            except InputError:
                raise
            except BaseException:  # Ctrl-C: half an answer may be under way
                self.close()
                raise

    def close(self) -> None:
        """End the process."""
        with self._lock:
            process, self._process = self._process, None
            self._loaded.clear()
            if process is None or self._owner != os.getpid():
                return
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            process.kill()
            process.wait()

    @property
    def process_id(self) -> int | None:
        """Of the process that runs now."""
        return self._process and self._process.pid

    def number(self) -> int:
        """A number for one more tokenizer."""
        with self._lock:
            self._count += 1
            return self._count

    def holds(self, number: int) -> bool:
        """Whether the process that runs now has loaded this tokenizer."""
        here = self._owner == os.getpid() and self._process is not None
        return here and number in self._loaded and self._process.poll() is None

    def loaded(self, number: int) -> None:
        """The process has loaded this tokenizer."""
        self._loaded.add(number)

    def forget(self, number: int) -> None:
        """Nobody asks this tokenizer any more. May be called at any moment, as by a garbage collector."""
        self._forgotten.append(number)

    def _start(self) -> None:
        if self._owner == os.getpid():
            self.close()
        self._loaded, self._owner = set(), os.getpid()  # after a fork the parent's process is not ours
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, env=os.environ | QUIET, bufsize=0,
            )
        except OSError as e:
            raise InputError(f"the tokenizer's process cannot be started ({e.strerror})") from None

    def _send(self, data: bytes) -> None:
        data = HEADER.pack(len(data)) + data
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._process.stdin.fileno(), view[: 1 << 20]) :]
        except OSError:
            raise Ended from None

    def _answer(self, deadline: float) -> object:
        while True:
            (size,) = HEADER.unpack(self._read(HEADER.size, deadline))
            answer = json.loads(self._read(size, deadline))
            if "doing" in answer:
                self.doing = answer["doing"]
            elif "too_long" in answer:
                raise TooLong(answer["too_long"])
            elif "refused" in answer:
                raise InputError(answer["refused"])
            else:
                return answer["is"]

    def _read(self, size: int, deadline: float) -> bytes:
        pipe, parts = self._process.stdout.fileno(), []
        while size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError
            part = os.read(pipe, min(size, 1 << 20))
            if not part:
                raise Ended
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _why(self, allowance: Allowance) -> str:
        """Why the process has ended."""
        process, doing = self._process, self.doing
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        status = process.poll()
        self.close()
        if status == -signal.SIGXCPU:
            return f"{doing} took more than {allowance.seconds} s of processor time and was stopped"
        if status in (-signal.SIGABRT, -signal.SIGKILL):
            return f"{doing} needed more than {allowance.size / 1e9:.1f} GB of memory and was stopped"
        ended = f"signal {-status}" if (status or 0) < 0 else f"status {status}"
        return f"{doing} ended the process that it ran in ({ended}); its files are damaged"


class Guarded:
    """The tokenizer of one folder in the process."""

    def __init__(self, guard: Guard, folder: Path):
        self._guard, self._named, self._folder = guard, str(folder), str(folder.absolute())
        self._number = guard.number()
        self.facts = self._load()

    def __del__(self):
        self._guard.forget(self._number)

    def ask(self, do: str, **arguments) -> object:
        """What the encoder answers. Raises InputError, TooLong; TypeError if arguments are no JSON."""
        with self._guard.alone():
            # After the process was started anew it has to be loaded again.
            if not self._guard.holds(self._number) and self._load() != self.facts:
                raise InputError(f"{self._named}: the tokenizer's files have changed; start again")
            return self._guard.ask(self._request(do) | {"arguments": arguments}, self._named)

    def _request(self, do: str) -> dict:
        return {"do": do, "number": self._number, "folder": self._folder, "named": self._named}

    def _load(self) -> dict:
        with self._guard.alone():
            facts = self._guard.ask(self._request("load"), self._named)
            self._guard.loaded(self._number)
            return facts


GUARD = Guard()
atexit.register(GUARD.close)
