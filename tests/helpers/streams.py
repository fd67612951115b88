"""Stand-ins for a GPU's two streams on a CPU, which run copies in the worst order that their events allow.

What is computed runs where it is called, so the copies run elsewhere: as late or as early as may be.
"""
from collections import deque

import torch
from torch import Tensor

POISON = 0xC5  # in every byte: weights that are read too soon are large, or no numbers


class Host:
    """What both orders share. copies: so many have run."""

    copies = 0

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def run_copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        self.copies += 1


class Late(Host):
    """A copy runs when something that is computed waits for it, and no sooner.

    From the moment that it is put into its queue its target holds nothing of use.
    """

    def __init__(self):
        self.queue = deque()

    def event(self) -> dict[str, int]:
        """How often it was recorded, and how often that was reached."""
        return {"recorded": 0, "reached": 0}

    def record(self, event: dict[str, int], copying: bool) -> None:
        event["recorded"] += 1
        if copying:
            self.queue.append(event)
        else:
            event["reached"] += 1

    def wait(self, event: dict[str, int], copying: bool) -> None:
        if not copying:
            while event["reached"] < event["recorded"]:
                self._run(self.queue.popleft())

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.data.view(torch.uint8).fill_(POISON)
        self.queue.append((target, source))

    def _run(self, item) -> None:
        if isinstance(item, tuple):
            self.run_copy(*item)
        else:
            item["reached"] += 1


class Early(Host):
    """A copy runs as soon as no event holds it, which may be before it is put into its queue: a device
    computes later than it is told to.

    A pass is always the same calls. `learn` notes them; from then on it is known what will be copied. Where
    nothing holds copies they run half a pass ahead.
    """

    def __init__(self):
        self.calls, self.learning = [], True  # of a pass: what is called, whose queue, with what
        self.now = self.next = 0  # calls that were made; calls that the copying queue has gone over

    def learn(self, make_a_pass) -> None:
        """Note the calls of a pass, of which nothing is computed, and begin."""
        make_a_pass()
        self.learning = False

    def event(self) -> object:
        return object()

    def record(self, event: object, copying: bool) -> None:
        self._call("record", copying, event)

    def wait(self, event: object, copying: bool) -> None:
        self._call("wait", copying, event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._call("copy", True, target, source)

    def _at(self, i: int) -> tuple:
        return self.calls[i % len(self.calls)]

    def _call(self, *call) -> None:
        if self.learning:
            self.calls.append(call)
            return
        assert list(map(id, call[2:])) == list(map(id, self._at(self.now)[2:])), "a pass is not as the first"
        self.now += 1
        if call[:2] == ("wait", False):
            while self.next <= self._recorded(self.now - 1, call[2], True):
                assert self._go_on(), "what is waited for never comes"
        while self._go_on():
            pass

    def _recorded(self, before: int, event: object, copying: bool) -> int:
        """The last call before this one that records the event in a queue; -1 if there is none."""
        made = range(before - 1, max(before - 1 - len(self.calls), -1), -1)
        return next((i for i in made if self._at(i)[:3] == ("record", copying, event)), -1)

    def _go_on(self) -> bool:
        """Let the copying queue go over one call, if nothing holds it."""
        kind, copying, *what = self._at(self.next)
        held = copying and kind == "wait" and self._recorded(self.next, what[0], False) >= self.now
        if held or self.next >= self.now + len(self.calls) // 2:
            return False
        if kind == "copy":
            self.run_copy(*what)
        self.next += 1
        return True
