"""A server on several ranks: the first one has the requests, the others do with their seats what it does.

All that decoding does to a model goes through three calls of `engine.seats.Seats`: a request is admitted, one
leaves, everyone is advanced. The first rank tells the others each call before it makes it. What comes of a
call is the same everywhere, as no rank goes by time.
"""
from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from engine.seats import Event, Seats, Text
from kernels.tp import is_loss
from sampling.options import Sampling
from server.worker import Gone
from tokens.grammar import Guide

IDLE = timedelta(days=365)  # the others wait as long as nobody asks for anything


class Orders:
    """What the first rank tells the others. Made on all ranks together."""

    def __init__(self):
        self.group = dist.new_group(backend="gloo", timeout=IDLE)
        self.processes: list = [None] * dist.get_world_size()
        dist.all_gather_object(self.processes, (socket.gethostname(), os.getpid()), group=self.group)

    def lost(self) -> bool:
        """Whether a process of this machine has died."""
        here = [pid for host, pid in self.processes if host == socket.gethostname()]
        return not all(map(_lives, here))

    def tell(self, *order) -> None:
        """On the first rank: send an order, which may be empty."""
        dist.broadcast_object_list([order], src=0, group=self.group)

    def hear(self) -> tuple:
        """On another rank: wait for the next order."""
        heard = [()]
        dist.broadcast_object_list(heard, src=0, group=self.group)
        return heard[0]


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """A context in which an error that says that another rank is lost is a `Gone`."""
    try:
        yield
    except RuntimeError as e:
        if not is_loss(e):
            raise
        raise Gone("another rank of this server has died") from None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Leader:
    """The seats of the first rank, which the others follow. Arguments and errors are those of `Seats`; where
    another rank is lost, Gone.
    """

    def __init__(self, seats: Seats, orders: Orders):
        self.seats, self.orders = seats, orders
        self.numbers: dict[Text, int] = {}  # of the texts that the others have, too
        self.admitted = 0

    def __getattr__(self, name: str):
        return getattr(self.seats, name)

    def admit(
        self, prompt: list[int], sampling: Sampling, guide: Guide | None = None, watch: bool = False,
        score_prompt: bool = False, plain: bool = False,
    ) -> Text:
        self.seats.check(prompt)  # a mistake stays here
        self.seats.check_request(sampling)
        if sampling.json_schema is not None and guide is None:
            guide = self.seats.guide(sampling.json_schema)
        self.admitted += 1
        with _together():
            self.orders.tell("admit", self.admitted, prompt, sampling, None, watch, score_prompt, plain)
            text = self.seats.admit(prompt, sampling, guide, watch, score_prompt, plain)
        self.numbers[text] = self.admitted
        return text

    def leave(self, text: Text) -> None:
        if (number := self.numbers.pop(text, None)) is not None:
            with _together():
                self.orders.tell("leave", number)
                self.seats.leave(text)

    def advance(self) -> list[Event]:
        with _together():
            self.orders.tell("advance")
            return self.seats.advance()

    def end(self) -> None:
        """Let the others go. Raises RuntimeError if one is lost."""
        if self.orders.lost():
            raise dist.DistError("its process has ended")
        self.orders.tell()


def follow(seats: Seats, orders: Orders) -> None:
    """Do what the first rank does until it ends. Raises RuntimeError if that is lost.

    Signals are for the first rank, which ends in order and then lets this one go.
    """
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, signal.SIG_IGN)
    texts: dict[int, Text] = {}
    while order := orders.hear():
        what, *arguments = order
        if what == "admit":
            number, *request = arguments
            texts[number] = seats.admit(*request)
        elif what == "leave":
            seats.leave(texts.pop(arguments[0]))
        else:
            seats.advance()
