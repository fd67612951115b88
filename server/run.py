"""Running the server, from the first connection to the last."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time

import uvicorn

from common.cli import note
from engine.runner import CachesTooLarge
from server.worker import Worker

LAST_WORDS = 3  # seconds for the errors that end requests after the grace period
NOTICE = 2  # seconds for a decoding rank to notice that another one has died
KEEP_ALIVE = 75  # seconds that an idle connection stays: longer than clients keep theirs


class Uvicorn(uvicorn.Server):
    """A uvicorn server that gives requests `grace` seconds at its end."""

    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float):
        super().__init__(config)
        self.worker, self.grace = worker, grace

    def handle_exit(self, sig: int, frame) -> None:
        if self.worker.closing:  # a second signal: requests end with an error, which clients get if they read
            self.grace = 0.0
            logging.disable()  # uvicorn shows where each request was cut off
            return
        if not self.worker.failed:
            note("going down: requests that run are ended first; Ctrl-C again ends at once")
        self.worker.close()
        threading.Thread(target=self._close, args=(sig, frame), daemon=True).start()

    def _close(self, sig: int, frame) -> None:
        """Stop listening when requests have ended; until then new ones are refused with the reason."""
        began = time.monotonic()
        while self.worker.running + self.worker.waiting and time.monotonic() < began + self.grace:
            if time.monotonic() > began + NOTICE:
                self.worker.stop_if_lost()
            time.sleep(0.05)
        self.worker.stop()
        super().handle_exit(sig, frame)


def largest_engine(target, drafting, *, batch: int, max_seq_len: int | None, smallest: int):
    """Make an engine that serves `batch` requests at once, or half as many, and so on, until caches fit.

    smallest: the fewest requests. target: an `engine.target.Target`. Errors are those of its `engine`.
    """
    while True:
        try:
            return target.engine(drafting, batch=batch, max_seq_len=max_seq_len, serves=True)
        except CachesTooLarge as e:
            if batch // 2 < smallest:
                raise
            batch //= 2
            target.log(f"{batch} slots: {e}")


def serve(app, worker: Worker, listener: socket.socket, grace: float) -> None:
    """Answer requests until SIGTERM or Ctrl-C; current ones then get `grace` seconds to end."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=LAST_WORDS,
        server_header=False, timeout_keep_alive=KEEP_ALIVE,
    )
    # Uvicorn raises a signal again after its work: SIGTERM then ends as orderly as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    worker.start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Uvicorn(config, worker, grace).serve(sockets=[listener]))
    worker.stop()
    worker.join(timeout=10)
