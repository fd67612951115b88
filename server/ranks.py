"""Serving on several ranks: rank 0 handles requests, the others repeat its engine's calls.

Three methods change an engine: admit, step, remove. Rank 0 broadcasts each call before it makes it. No call
depends on time, so results are equal on all ranks.
"""
from __future__ import annotations

import signal
from datetime import timedelta

import torch.distributed as dist

from engine.engine import Engine
from engine.request import Event, Guide, Request
from engine.sampling import Sampling

IDLE_TIMEOUT = timedelta(days=365)  # between two calls


class Channel:
    """Messages from rank 0 to the others. All ranks must create it together."""

    def __init__(self):
        self.group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    def send(self, *message) -> None:
        """Broadcast a message from rank 0; an empty message ends the other ranks."""
        dist.broadcast_object_list([message], src=0, group=self.group)

    def receive(self) -> tuple:
        """Wait for the next message."""
        received = [()]
        dist.broadcast_object_list(received, src=0, group=self.group)
        return received[0]


class Leader:
    """The engine of rank 0; it broadcasts its calls. Its methods raise RuntimeError if a rank has died.

    Requests must have passed `Engine.check`, as an error would end the other ranks.
    """

    def __init__(self, engine: Engine, channel: Channel):
        self.engine, self.channel = engine, channel

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def admit(self, prompt: list[int], sampling: Sampling, *, guide: Guide | None, **options) -> Request:
        self.channel.send("admit", prompt, sampling, options)
        return self.engine.admit(prompt, sampling, guide=guide, **options)

    def remove(self, request: Request) -> None:
        if request.active:
            self.channel.send("remove", request.slot)
            self.engine.remove(request)

    def step(self) -> list[Event]:
        self.channel.send("step")
        return self.engine.step()

    def end(self) -> None:
        """End the other ranks. Raises RuntimeError if one has died."""
        self.channel.send()


def follow(engine: Engine, channel: Channel) -> None:
    """Repeat the calls of rank 0 until it ends. Raises RuntimeError if it dies.

    Signals are ignored: rank 0 handles them and then ends this rank.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while message := channel.receive():
        name, *arguments = message
        if name == "admit":
            prompt, sampling, options = arguments
            engine.admit(prompt, sampling, **options)
        elif name == "remove":
            # The same calls have put the request into the same slot.
            engine.remove(engine.slots.requests[arguments[0]])
        else:
            engine.step()
