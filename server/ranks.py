"""A server on several ranks: the first one has the requests, the others repeat what it does with its engine.

Decoding changes an engine through three methods only: admit, step, remove. The first rank sends each call to
the others before it makes it. The result is the same everywhere, since no rank decides by time.
"""
from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from engine.engine import Engine
from engine.request import Event, Guide, Request
from kernels.tp import is_lost_rank
from sampling.options import Sampling
from server.worker import EngineLost

FOREVER = timedelta(days=365)  # for the next request, on the other ranks


class Channel:
    """Messages from the first rank to the others. All ranks make it together."""

    def __init__(self):
        self.group = dist.new_group(backend="gloo", timeout=FOREVER)
        self.processes: list = [None] * dist.get_world_size()
        dist.all_gather_object(self.processes, (socket.gethostname(), os.getpid()), group=self.group)

    def is_lost(self) -> bool:
        """Return whether a process on this machine has died."""
        try:
            for host, pid in self.processes:
                if host == socket.gethostname():
                    os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    def send(self, *message) -> None:
        """Send a message from the first rank; an empty one is the last."""
        dist.broadcast_object_list([message], src=0, group=self.group)

    def receive(self) -> tuple:
        """Wait for the next message."""
        received = [()]
        dist.broadcast_object_list(received, src=0, group=self.group)
        return received[0]


class Leader:
    """The engine of the first rank, which the others follow. It also raises EngineLost.

    Requests have passed `Engine.check`: a mistake would end the other ranks.
    """

    def __init__(self, engine: Engine, channel: Channel):
        self.engine, self.channel = engine, channel

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def admit(self, prompt: list[int], sampling: Sampling, *, guide: Guide | None, **options) -> Request:
        with self._together("admit", prompt, sampling, options):
            return self.engine.admit(prompt, sampling, guide=guide, **options)

    def remove(self, request: Request) -> None:
        if request.active:
            with self._together("remove", request.slot):
                self.engine.remove(request)

    def step(self) -> list[Event]:
        with self._together("step"):
            return self.engine.step()

    def end(self) -> None:
        """Let the others end. Raises RuntimeError if one has died."""
        if self.channel.is_lost():
            raise dist.DistError("its process has ended")
        self.channel.send()

    @contextlib.contextmanager
    def _together(self, *message) -> Iterator[None]:
        """A context for a call that all ranks make. Raises EngineLost if one has died."""
        try:
            self.channel.send(*message)
            yield
        except RuntimeError as e:
            if not is_lost_rank(e):
                raise
            raise EngineLost("another rank of this server has died") from None


def follow(engine: Engine, channel: Channel) -> None:
    """Repeat the calls of the first rank until it ends. Raises RuntimeError if it dies.

    Signals are for the first rank, which ends in order and then lets this one end.
    """
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, signal.SIG_IGN)
    while message := channel.receive():
        name, *arguments = message
        if name == "admit":
            prompt, sampling, options = arguments
            engine.admit(prompt, sampling, **options)
        elif name == "remove":
            # Engines that get the same calls have the same places.
            engine.remove(next(request for request in engine.requests if request.slot == arguments[0]))
        else:
            engine.step()
