"""The thread that decodes: it admits requests, advances them, and hands on what they gain.

Everything that touches the model happens here. Handlers of requests talk to it by `submit` and `cancel`, from
any thread; a job hears by its `deliver`, called in this one.
"""
from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from common.cli import note
from common.errors import InputError, first_line
from engine.body import Score
from engine.seats import Draft, Event, Seats, Text
from sampling.options import Sampling
from server.metrics import Metrics
from tokens.grammar import Guide
from tokens.stops import StopStream
from tokens.tokenizer import Tokenizer

FAILURES = 3  # in a row, after which nothing more is expected of the model


class QueueFull(Exception):
    """As many requests wait as may."""


class Closing(Exception):
    """The server takes no more requests."""


class Gone(Exception):
    """What decodes is lost, and nothing can be decoded any more."""


NOT_FINITE = "the model's scores are no finite numbers: its weights hold nan or infinite ones"


class Failure(NamedTuple):
    """Why a job ended without an answer, and what is at fault: the request, the server, time, or its end."""

    why: str
    fault: Literal["request", "server", "time", "closing"] = "server"


class Delta(NamedTuple):
    """What a job gained: text that `ids` complete, the first `drafted` of which were drafted.

    finish: "stop", "length" or "error", with the last one; failure: of an error. draft: the step's tree, if
    watched.
    """

    text: str
    ids: list[int]
    drafted: int = 0
    scores: tuple[Score, ...] = ()
    nodes: int = 0  # of the tree that was drafted, the root not counted
    draft: Draft | None = None
    finish: str | None = None
    failure: Failure | None = None


@dataclass(eq=False)
class Job:
    """A request on its way. deliver: called with what it gains, in order; the last delta has a `finish`.

    seconds: it may take so long, waiting included. What it has become of is in the fields after `plain`.
    """

    prompt: list[int]
    sampling: Sampling
    deliver: Callable[[Delta], None]
    guide: Guide | None = None
    seconds: float | None = None
    watch: bool = False
    score_prompt: bool = False
    plain: bool = False
    text: Text | None = None
    stream: StopStream | None = None
    arrived: float = field(default_factory=time.monotonic)
    first: float | None = None  # when its first token came
    last: float | None = None
    tokens: int = 0  # that count as output
    accepted: int = 0  # of those that were drafted
    rejected: int = 0
    cancelled: bool = False
    ended: bool = False

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not read again."""
        return self.text.cached if self.text else 0


class Worker(threading.Thread):
    """Decodes jobs with `seats`, as many at once as there are places; up to `queue` more wait.

    stop_ids: those that end a text.
    """

    def __init__(self, seats: Seats, tokenizer: Tokenizer, metrics: Metrics, queue: int = 64):
        super().__init__(name="decoding", daemon=True)
        self.seats, self.tokenizer, self.metrics, self.queue = seats, tokenizer, metrics, queue
        self.stop_ids = set(seats.state.stop_ids.tolist())
        self.failed: str | None = None  # why nothing can be decoded any more
        self.on_gone: Callable[[], None] = lambda: None  # called once if what decodes is lost
        self.lost: Callable[[], bool] = lambda: False  # whether that is so, as far as others can tell
        self._change = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._cancelled: list[Job] = []
        self._jobs: dict[Text, Job] = {}
        self._closing = self._stopped = False

    # -- from any thread ----------------------------------------------------------------------

    def submit(self, *jobs: Job) -> None:
        """Take jobs, all of them or none. Raises QueueFull, Closing; ValueError if one cannot be decoded."""
        for job in jobs:
            self.seats.check(job.prompt)
            self.seats.check_request(job.sampling)
        with self._change:
            if self._closing or self.failed:
                raise Closing(self.failed or "the server is going down")
            room = self.most - len(self._jobs) - len(self._waiting)
            if len(jobs) > max(room, 0):
                raise QueueFull(
                    f"{len(self._jobs)} requests run and {len(self._waiting)} wait, {len(jobs)} more do not"
                    " fit: try again later"
                )
            self._waiting.extend(jobs)
            self._gauge()
            self._change.notify()

    def cancel(self, *jobs: Job) -> None:
        """Nobody wants these jobs any more: they hear nothing from now on, and leave before the next step."""
        with self._change:
            for job in jobs:
                job.cancelled = True
            self._cancelled += [job for job in jobs if not job.ended]
            self._change.notify()

    def close(self) -> None:
        """Take no more jobs; those that are here are decoded to their end."""
        with self._change:
            self._closing = True
            self._change.notify()

    def stop(self) -> None:
        """End now. Jobs that are here end with an error."""
        with self._change:
            self._closing = self._stopped = True
            self._change.notify()

    def abandon(self) -> None:
        """If what decodes is lost, tell all jobs so: this thread may wait for it without an end."""
        if self.lost() and not self.failed:
            self.failed = "the server is going down: what decodes is lost"
            self._fail_all(self.failed, "closing")
            self.stop()

    @property
    def most(self) -> int:
        """How many jobs run and wait at most."""
        return self.queue + self.seats.batch

    @property
    def running(self) -> int:
        """How many jobs have a place."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """How many jobs have none."""
        return len(self._waiting)

    # -- in the thread ------------------------------------------------------------------------

    def run(self) -> None:
        failures, gone = 0, False
        while True:
            try:
                if not self._prepare():
                    break
                self._round()
                failures = 0
            except Gone as e:
                self.failed, gone = f"the server is going down: {e}", True
                break
            except Exception as e:  # a fault of ours: whoever is here hears of it, the others go on
                traceback.print_exc()
                failures += 1
                self._fail_all(f"decoding failed ({type(e).__name__}: {first_line(e)})")
                if failures == FAILURES:
                    self.failed = f"decoding has failed {FAILURES} times in a row; see the server's log"
                    note(f"error: {self.failed}")
        down = gone or not self.failed
        self._fail_all(self.failed or "the server is going down", "closing" if down else "server")
        if gone:
            self.on_gone()

    def _prepare(self) -> bool:
        """Wait for something to do; drop what nobody wants. Returns whether to go on."""
        with self._change:
            while not (self._waiting or self._jobs or self._cancelled or self._stopped):
                if self._closing:
                    return False
                self._change.wait()
            if self._stopped or self.failed:
                return False
            cancelled, self._cancelled = self._cancelled, []
            for job in cancelled:
                if job in self._waiting:
                    self._waiting.remove(job)
        for job in cancelled:
            self._leave(job)
            if not job.ended:
                job.ended = True
                self.metrics.ended(job, "abort", time.monotonic())
        return True

    def _round(self) -> None:
        """Admit whom there is a place for, advance everyone, hand on what was gained."""
        now = time.monotonic()
        for job in self._everyone():
            if job.seconds is not None and now - job.arrived > job.seconds:
                self._end(job, Failure(f"the request has taken its {job.seconds:g} seconds", "time"))
        while self.seats.free:
            with self._change:
                if not self._waiting:
                    break
                job = self._waiting.popleft()
            self._admit(job)
        if self.seats.busy:
            for event in self.seats.advance():
                self._hand_on(self._jobs.get(event.text), event)
        self._gauge()

    def _admit(self, job: Job) -> None:
        job.stream = StopStream(self.tokenizer.stream(), job.sampling.stop)
        try:
            job.text = self.seats.admit(
                job.prompt, job.sampling, job.guide, job.watch, job.score_prompt, job.plain
            )
        except (ValueError, InputError) as e:
            self._end(job, Failure(first_line(e), "request"))
            return
        self._jobs[job.text] = job
        self.metrics.admitted(job)

    def _hand_on(self, job: Job | None, event: Event) -> None:
        """What a text emitted, to its job."""
        if job is None or job.ended:
            return
        if event.error:
            self._end(job, Failure(event.error, "request"))  # its grammar cannot be followed
            return
        if not all(map(_is_finite, (*(job.text.prompt_scores or ()), *event.emitted.scores))):
            self._end(job, Failure(NOT_FINITE))  # which no JSON can hold
            return
        found = job.stream.push(event.emitted.ids)
        ids, finish = event.emitted.ids[: found.ids], None
        job.tokens += len(ids)
        drafted = min(event.emitted.drafted, len(ids))
        job.accepted, job.rejected = job.accepted + drafted, job.rejected + event.nodes - drafted
        text = found.text
        if found.stop is not None:
            finish = "stop"
        elif event.emitted.done:
            finish = "stop" if ids and ids[-1] in self.stop_ids else "length"
            text += job.stream.flush()
        now = time.monotonic()
        self.metrics.emitted(job, len(ids), drafted, event.nodes, now)
        job.first, job.last = job.first or now, now
        scores = tuple(event.emitted.scores[: len(ids)])
        if finish:
            self._leave(job)
            job.ended = True
            self.metrics.ended(job, finish, now)
        if not job.cancelled:
            job.deliver(Delta(text, ids, drafted, scores, event.nodes, event.draft, finish))

    def _end(self, job: Job, failure: Failure) -> None:
        """A job ends without an answer."""
        with self._change:
            if job in self._waiting:
                self._waiting.remove(job)
        self._leave(job)
        if not job.ended:
            job.ended = True
            self.metrics.ended(job, "error", time.monotonic())
            if not job.cancelled:
                job.deliver(Delta("", [], finish="error", failure=failure))

    def _leave(self, job: Job) -> None:
        """Free a job's place, if it has one."""
        if job.text and self._jobs.pop(job.text, None) and not self.failed:
            self.seats.leave(job.text)

    def _fail_all(self, why: str, fault: str = "server") -> None:
        for job in self._everyone():
            self._end(job, Failure(why, fault))
        self._gauge()

    def _everyone(self) -> list[Job]:
        with self._change:
            return [*self._waiting, *self._jobs.values()]

    def _gauge(self) -> None:
        self.metrics.load(len(self._jobs), len(self._waiting))


def _is_finite(score: Score) -> bool:
    return math.isfinite(score.logprob) and all(math.isfinite(logprob) for _, logprob in score.top)
