"""Running the server, from the first connection to the last."""
from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from common.cli import note
from server.worker import Worker

LAST_WORDS = 3  # seconds to tell those whose requests are not done by the end of the grace
NOTICE = 2  # seconds in which a rank that decodes notices that another one is lost, if it ever does
IDLE = 75  # seconds that a connection is kept: longer than clients keep theirs, which would meet a closed one


class Uvicorn(uvicorn.Server):
    """Says when it is ready; at its end lets requests end, for so long."""

    def __init__(self, config: uvicorn.Config, worker: Worker, ready: Callable[[], None], grace: float):
        super().__init__(config)
        self.worker, self.ready, self.grace = worker, ready, grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()

    def handle_exit(self, sig: int, frame) -> None:
        if self.should_exit:  # a second signal: at once
            self.worker.stop()
        else:
            if not self.worker.failed:
                note("going down: requests that run are ended first")
            self.worker.close()
            # Who is not done by then hears why, in the form of other errors, and has a moment to read it.
            for seconds, end in ((NOTICE, self.worker.abandon), (self.grace, self.worker.stop)):
                ending = threading.Timer(seconds, end)
                ending.daemon = True
                ending.start()
        super().handle_exit(sig, frame)


def serve(app, worker: Worker, listener: socket.socket, grace: float, ready: Callable[[], None]) -> int:
    """Answer requests until SIGTERM or Ctrl-C; then those that are here get `grace` seconds to end.

    Returns the exit status.
    """
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=math.ceil(grace) + LAST_WORDS,
        server_header=False, timeout_keep_alive=IDLE,
    )
    server = Uvicorn(config, worker, ready, grace)
    # Uvicorn raises a signal again when its work is done: SIGTERM is then to end no less orderly than Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    worker.on_gone = lambda: os.kill(os.getpid(), signal.SIGTERM)
    worker.start()
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except KeyboardInterrupt:
        pass
    finally:
        worker.stop()
        worker.join(timeout=10)
    return 0
