"""A server in its own process, on the golden target."""
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from helpers import ROOT

MAX_START_SECONDS = 120.0


class Serving:
    """A running server: its address, its process, its log."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self.process, self.log, self.url = process, log, ""
        start_time = time.monotonic()
        while not self.url:
            if match := re.search(r"http://\S+", self.printed()):
                self.url = match[0]
            if process.poll() is not None or time.monotonic() - start_time > MAX_START_SECONDS:
                raise AssertionError(f"the server did not start: {self.printed()}")
            time.sleep(0.05)

    def printed(self) -> str:
        """Return the server's output so far."""
        return self.log.read_text()

    def get(self, path: str, **options):
        """Send a GET request."""
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str = "/v1/chat/completions", headers: dict | None = None, **body):
        """Send a POST request with a JSON body."""
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120)

    @contextlib.contextmanager
    def stream(self, path: str = "/v1/chat/completions", headers: dict | None = None, **body) -> Iterator:
        """Send a streaming request: a context that yields the data of the events, without "data: "."""
        body |= {"stream": True}
        with httpx.stream("POST", self.url + path, json=body, headers=headers, timeout=60) as events:
            yield (line[6:] for line in events.iter_lines() if line.startswith("data: "))

    def end(self) -> int:
        """Shut the server down and return its exit status."""
        self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def serving(checkpoint: Path, log: Path, *options: str, ranks: int = 1) -> Iterator[Serving]:
    """Start a server for this checkpoint on a free port, uncompiled. log: the file for its output."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] * (ranks > 1)
    command = [sys.executable, *launch, str(ROOT / "serve.py"), "--checkpoint", str(checkpoint)]
    command += ["--port", "0", "--no-compile", "--threads", "1", *options]
    environment = {k: v for k, v in os.environ.items() if k != "EAGLE_API_KEY"}
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=environment)
    try:
        yield Serving(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
