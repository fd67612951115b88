"""What runs in the process of `tokens.guard`: requests come in, answers go out, each after its size."""
from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from tokens.files import FILES

HEADER = struct.Struct("<Q")
SECONDS, SECONDS_PER_MB = 3, 4  # of processor time: many times what ordinary tokenizers take
MEMORY, MEMORY_PER_BYTE = 512 << 20, 400  # more than the process has; the libraries keep 200 for each byte


class Allowance(NamedTuple):
    """What one request may take: seconds of processor time, bytes of memory."""

    seconds: int
    size: int

    @classmethod
    def of(cls, request: dict, size: int) -> Allowance:
        """That of a request of so many bytes."""
        if request["do"] == "load":
            paths = (Path(request["folder"]) / name for name in FILES)
            size += min(sum(os.path.getsize(path) for path in paths if path.is_file()), 1 << 30)
            return cls(SECONDS + size // 10**6, MEMORY + 40 * size)
        return cls.of_bytes(size)

    @classmethod
    def of_bytes(cls, size: int) -> Allowance:
        """That of reading so many bytes, and of what is asked about a text in them."""
        return cls(SECONDS + SECONDS_PER_MB * size // 10**6, MEMORY + MEMORY_PER_BYTE * size)

    def apply(self) -> None:
        """Let this process have no more from now on."""
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        seconds = math.ceil(used.ru_utime + used.ru_stime) + self.seconds
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
        # Where there is no /proc, as on macOS, a limit on memory is not kept: there the bounds of templates
        # and the time hold it.
        with contextlib.suppress(ValueError, OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + self.size, most))


class Answers:
    """Answers requests with the tokenizers that were loaded. out: a file descriptor."""

    def __init__(self, out: int):
        self._out, self._encoders = out, {}

    def answer(self, request: dict) -> None:
        """Answer one request, whatever happens: libraries raise what is no Exception, too."""
        from common.cli import one_line
        from common.errors import InputError, is_panic
        from tokens.files import file_of
        from tokens.spelling import TooLong

        Allowance.of(request, request.pop("size")).apply()
        try:
            self._send({"is": self._do(**request)})
        except TooLong as e:
            self._send({"too_long": str(e)})
        except InputError as e:
            # Our working folder may be another one than that of who asks: they name it in their own way.
            self._send({"refused": str(e).replace(request["folder"], request["named"])})
            gc.collect()  # what a template has made hangs on its frames
        except MemoryError:
            what = "the tokenizer or the chat template needs too much memory"
            self._send({"refused": f"{request['named']}: {what}"})
        except BaseException as e:
            words = "made its library panic" if is_panic(e) else "cannot be used"
            file = file_of(Path(request["folder"]))
            where = f"{Path(request['named']) / file}:" if file else f"{request['named']}: its tokenizer"
            self._send({"refused": f"{where} {words} ({one_line(e)})"})

    def _do(
        self, do: str, number: int, folder: str, named: str, forget: list[int], arguments: dict | None = None
    ) -> object:
        from tokens.encoder import Encoder

        for other in forget:
            self._encoders.pop(other, None)
        if do == "rebuild":
            from tokens.gguf_tokenizer import rebuild

            return rebuild(folder=Path(folder), **arguments)
        if do == "load":
            self._encoders[number] = Encoder.load(Path(folder))
            return self._encoders[number].describe()
        encoder = self._encoders[number]
        if do == "chat":
            return encoder.chat(**arguments, doing=lambda what: self._send({"doing": what}))
        if do == "render":
            self._send({"doing": "the chat template"})
        return {"encode": encoder.encode, "render": encoder.render}[do](**arguments)

    def _send(self, answer: dict) -> None:
        data = json.dumps(answer).encode()
        view = memoryview(HEADER.pack(len(data)) + data)
        while view:
            view = view[os.write(self._out, view) :]


def main() -> None:
    """Answer requests from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who ask
    out = os.dup(1)
    os.dup2(2, 1)  # nothing that a library prints gets between the answers
    answers = Answers(out)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while header := sys.stdin.buffer.read(HEADER.size):
        (size,) = HEADER.unpack(header)
        Allowance.of_bytes(size).apply()  # that of the request before may be too little to read it
        answers.answer(json.loads(sys.stdin.buffer.read(size)) | {"size": size})
