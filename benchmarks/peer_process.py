"""A peer that is a program of its own: started once, then asked prompt after prompt, over pipes or HTTP."""
from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from common.errors import InputError


class PeerProcess:
    """A program that runs as long as its `with` statement. name: what errors call it.

    Its messages are kept for the error that says why it ended. Raises InputError if it cannot be started.
    """

    def __init__(self, name: str, command: list[str], **pipes):
        self.name = name
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115, closed by __exit__
        try:
            pipes = {"stdout": self.messages, "stderr": self.messages, **pipes}
            self.process = subprocess.Popen(command, **pipes)
        except OSError as e:
            self.messages.close()
            raise InputError(f"{name}: cannot be started ({e.strerror})") from None

    def come_up(self) -> None:
        """Return when it can be asked. Raises InputError if that will not be."""
        raise NotImplementedError

    def __enter__(self):
        try:
            self.come_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.messages):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def failed(self, what: str) -> InputError:
        """The error to raise when it did not do what it should: this, and the last line that it wrote."""
        self.messages.seek(0)
        lines = self.messages.read().decode(errors="replace").strip().split("\n")
        return InputError(f"{self.name}: {what} ({lines[-1].strip() or 'no message'})")


class HttpPeer(PeerProcess):
    """A program that serves HTTP on a free port of this machine, and says at /health when it can be asked."""

    def __init__(self, name: str, command: list[str]):
        with socket.socket() as any_free:
            any_free.bind(("127.0.0.1", 0))
            self.port = any_free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(name, [*command, "--host", "127.0.0.1", "--port", str(self.port)])

    def come_up(self) -> None:
        """Return when the model is loaded. Raises InputError if the program ends before."""
        while True:
            if self.process.poll() is not None:
                raise self.failed("ended")
            time.sleep(0.1)
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/health").close()  # raises HTTPError unless it is 200
                return
