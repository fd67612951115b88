"""The decoding thread: admit requests to the engine, run steps, dispatch events.

Only this thread uses the engine. HTTP handlers call `submit` and `cancel` from any thread.
"""
from __future__ import annotations

import math
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.cli import log_stderr
from common.errors import first_line
from engine.engine import Engine
from engine.request import Event, Request
from engine.sampling import Sampling
from server.metrics import Metrics
from server.protocol import Refusal

MAX_CONSECUTIVE_FAILURES = 3
SHUTTING_DOWN = "the server is shutting down"


@dataclass(eq=False)
class Job:
    """A waiting or running request.

    on_event: called on the worker's thread with each event; the last one has a `finish`, or is a Refusal.
    time_limit: seconds, queueing included. options: further arguments of `Engine.admit`. finish:
    "stop", "length", "error" or "abort". refusal: the reason of an error.
    """

    prompt: list[int]
    sampling: Sampling
    time_limit: float = math.inf
    options: dict = field(default_factory=dict)
    on_event: Callable[[Event | Refusal], None] = lambda event: None
    request: Request | None = None  # from admission on
    arrived: float = field(default_factory=time.perf_counter)
    last: float | None = None  # time of the last token
    drafted: int = 0  # number of draft tokens
    steps: Counter[int] = field(default_factory=Counter)  # drafted steps by number of accepted tokens
    finish: str | None = None
    refusal: Refusal | None = None

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return sum(accepted * steps for accepted, steps in self.steps.items())


class Worker(threading.Thread):
    """Decode up to `engine.batch` jobs at a time; queue up to `queue` more."""

    def __init__(self, engine: Engine, metrics: Metrics, queue: int = 64):
        super().__init__(name="decoding", daemon=True)
        self.engine, self.metrics, self.capacity = engine, metrics, queue + engine.batch
        self.failed: str | None = None  # why decoding has stopped; None while it works
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[Request, Job] = {}
        self._cancelled: list[Job] = []
        self.closing = self._stopped = False  # closing: no more jobs are accepted
        metrics.watch(self)

    # -- from any thread ----------------------------------------------------------------------

    def submit(self, *jobs: Job) -> None:
        """Queue jobs, all of them or none. Raises Refusal."""
        with self._changed:
            if self.closing or self.failed:
                raise Refusal(503, self.failed or SHUTTING_DOWN, "closing")
            if self.running + self.waiting + len(jobs) > self.capacity:
                raise Refusal(429, f"the queue has no space for {len(jobs)} more; retry later", "queue_full")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, *jobs: Job) -> None:
        """End these jobs before the next step, without an event."""
        with self._changed:
            self._cancelled += [job for job in jobs if job.finish is None]
            self._changed.notify()

    def close(self) -> None:
        """Accept no more jobs; stop when the current ones have finished."""
        with self._changed:
            self.closing = True
            self._changed.notify()

    def stop(self) -> None:
        """Stop now; current jobs get a Refusal."""
        self._stopped = True
        self.close()

    @property
    def running(self) -> int:
        """Number of jobs in the engine."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of jobs in the queue."""
        return len(self._waiting)

    # -- in the thread ------------------------------------------------------------------------

    def run(self) -> None:
        failures = 0
        try:
            while self._wait():
                try:
                    self._run_step()
                    failures = 0
                except Exception as e:  # a bug: fail the current jobs, continue with later ones
                    traceback.print_exc()
                    failures += 1
                    if failures == MAX_CONSECUTIVE_FAILURES:
                        self.failed = f"decoding has failed {failures} times in a row; see the server's log"
                        log_stderr(f"error: {self.failed}")
                    self._refuse_all(Refusal(500, f"decoding failed ({type(e).__name__}: {first_line(e)})"))
        except Exception as e:  # failing the jobs failed too: the device is unusable
            self.failed = f"decoding has failed ({first_line(e)}); see the server's log"
            log_stderr(f"error: {self.failed}")
        self._refuse_all(Refusal(503, self.failed or SHUTTING_DOWN))

    def _wait(self) -> bool:
        """Wait for work. Returns False if the thread should stop."""
        with self._changed:
            while not (self._waiting or self._running or self._cancelled or self._stopped or self.failed):
                if self.closing:
                    return False
                self._changed.wait()
            return not (self._stopped or self.failed)

    def _run_step(self) -> None:
        """Drop cancelled and timed-out jobs, admit waiting ones, run one step."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
        for job in cancelled:
            self._end(job, "abort")
        now = time.perf_counter()
        for job in self._jobs():
            if now - job.arrived > job.time_limit:
                message = f"the request exceeded its time limit of {job.time_limit:g} s"
                self._refuse(job, Refusal(504, message))
        while self.engine.free and self._waiting:
            self._admit(self._waiting[0])
        if self.engine.busy:
            for event in self.engine.step():
                if job := self._running.get(event.request):
                    self._dispatch(job, event)

    def _admit(self, job: Job) -> None:
        job.request = self.engine.admit(job.prompt, job.sampling, **job.options)
        with self._changed:
            self._running[job.request] = self._waiting.popleft()
        self.metrics.admitted(job.request)

    def _dispatch(self, job: Job, event: Event) -> None:
        if event.finish == "error":
            guide = job.request.guide
            self._refuse(job, Refusal(400 if guide and guide.error else 500, job.request.error))
            return
        self.metrics.emitted(job, event)
        job.last = job.request.last
        job.drafted += event.nodes
        job.steps[event.drafted] += event.nodes > 0
        if event.finish:
            self._end(job, "length" if event.finish == "cache" else event.finish)
        job.on_event(event)

    def _refuse(self, job: Job, refusal: Refusal) -> None:
        if job.finish is None:
            job.refusal = refusal
            try:
                self._end(job, "error")
            finally:
                job.on_event(refusal)

    def _refuse_all(self, refusal: Refusal) -> None:
        for job in self._jobs():
            self._refuse(job, refusal)

    def _end(self, job: Job, finish: str) -> None:
        """Drop a job from the queue or the engine."""
        if job.finish is not None:
            return
        job.finish = finish
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
        if self._running.pop(job.request, None) and not self.failed:
            self.engine.remove(job.request)
        self.metrics.ended(job)

    def _jobs(self) -> list[Job]:
        with self._changed:
            return [*self._running.values(), *self._waiting]
