"""Run the server: uvicorn, graceful shutdown."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time

import uvicorn

from common.cli import log_stderr
from engine.runner import CachesTooLarge
from server.worker import Worker

ERROR_SECONDS = 3  # to send errors after the grace period
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections


class Uvicorn(uvicorn.Server):
    """A uvicorn server with `grace` seconds for requests at shutdown."""

    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float):
        super().__init__(config)
        self.worker, self.grace = worker, grace

    def handle_exit(self, sig: int, frame) -> None:
        if self.worker.closing:  # a second signal: requests end with an error
            self.grace = 0.0
            logging.disable()  # uvicorn would print a traceback per request
            return
        if not self.worker.failed:
            log_stderr("shutting down: finishing running requests; Ctrl-C again aborts them")
        self.worker.close()
        threading.Thread(target=self._close, args=(sig, frame), daemon=True).start()

    def _close(self, sig: int, frame) -> None:
        """Stop listening when requests have ended; until then new ones get an error response."""
        start = time.monotonic()
        while self.worker.running + self.worker.waiting and time.monotonic() < start + self.grace:
            time.sleep(0.05)
        self.worker.stop()
        super().handle_exit(sig, frame)


def largest_engine(target, drafting, *, batch: int, max_seq_len: int | None, min_batch: int):
    """Create an engine with `batch` slots, halved until the caches fit in memory.

    target: an `engine.target.Target`. Raises as `Target.engine` if fewer than `min_batch` slots fit.
    """
    while True:
        try:
            return target.engine(drafting, batch=batch, max_seq_len=max_seq_len, serves=True)
        except CachesTooLarge as e:
            if batch // 2 < min_batch:
                raise
            batch //= 2
            target.log(f"{batch} slots: {e}")


def serve(app, worker: Worker, listener: socket.socket, grace: float) -> None:
    """Serve until SIGTERM or Ctrl-C; running requests then get `grace` seconds to finish."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=ERROR_SECONDS,
        server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    # Uvicorn raises the signal again at its end: then handle SIGTERM like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    worker.start()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Uvicorn(config, worker, grace).serve(sockets=[listener]))
    worker.stop()
    worker.join(timeout=10)
