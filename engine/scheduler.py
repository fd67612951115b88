"""Scheduler interface: which drafter and tree each step runs. The default: always the drafter's own tree.

Schedulers that measure and learn subclass `Scheduler`. The engine calls `next` before a step, `launched` and
`timed` after it, and `emitted` for every request when the host reads what the step emitted.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from engine.draft import Drafter
from engine.request import Request
from engine.sampling import Sampling
from tree import Tree

if TYPE_CHECKING:
    from engine.runner import ModelRunner, SlotRange


class Choice(NamedTuple):
    """What a step drafts."""

    drafter: Drafter
    # Limit its tree to what reduces latency; None: draft all of it. `expand(scores, limit)` and
    # `keep(scores)` return how many nodes to expand and to keep, see `schedulers.marginal_costs`.
    costs: Any = None
    head: bool = False  # True if the scheduler switched the draft head on for this step


class Scheduler:
    """Chooses the drafter of every step: always the engine's own."""

    runner: ModelRunner
    skips_head = False  # it may choose steps without the draft head, see `engine.deferred`

    def variants(self, drafter: Drafter) -> list[Drafter]:
        """Return the other drafters that steps may run, not allocated: buffers are sized for all of them."""
        return []

    def attach(self, engine) -> None:
        """Attach to an `engine.engine.Engine`. Called once, before its first step."""
        self.runner = engine.runner

    @property
    def drafters(self) -> list[Drafter]:
        """The drafters that steps may run."""
        return [self.runner.drafter]

    def add(self, request: Request) -> None:
        """Prepare for a new request."""

    def next(self, requests: list[Request], group: SlotRange) -> Choice:
        """Choose what to draft for these requests, the slots of `group`."""
        return Choice(self.runner.drafter)

    def launched(self, choice: Choice, group: SlotRange, tree: Tree, noisy: bool) -> Any:
        """Return a record of a step for `timed` and `emitted`, or None. noisy: a request samples."""

    def timed(self, record: Any, seconds: float) -> None:
        """Learn how long a step took. Not called where the host reads steps late."""

    def emitted(self, record: Any, index: int, request: Request, count: int) -> None:
        """Learn how many tokens a step emitted for request number `index` of the step."""

    def warm_up(self, engine, sampling: Sampling) -> None:
        """Time steps of the engine before requests come."""

    def describe(self, noisy: bool) -> str | None:
        """Return one line that describes what is drafted, or None. noisy: at temperatures above 0."""
