"""Which tree the next step drafts, or none: by the tokens a step emits over the seconds it takes.

Three things decide. `Calibration`: how often a head's drafts are accepted, by tree, measured once for a head.
`Acceptance`: how much more or less is accepted of the current requests. `Times`: how long a step with each
tree takes here and now, from real steps, a few at warm-up and then all that run. On our CPU kernels the
choice never changes the text.
"""
from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from checkpoint.calibration import SHORT, Calibration
from engine.request import Request
from tree import TreeShape

# Trees that are tried, smallest first.
CANDIDATES = tuple(TreeShape(*numbers) for numbers in (
    (2, 0, 1), (3, 0, 2), (3, 1, 1), (4, 1, 2), (4, 2, 1), (6, 1, 3), (6, 2, 2), (8, 2, 3), (8, 3, 2),
    (12, 3, 4), (16, 4, 4), (24, 5, 6), (40, 6, 8), (60, 7, 10),
))


# -- the requests at hand ----------------------------------------------------------------------

MEMORY = 0.98  # weight of a step relative to the one after it
PRIOR = 6.0  # steps of average text that a request begins with


class Ratio:
    """A ratio of two sums over steps, found / expected; old steps fade."""

    def __init__(self, expected: float, found: float | None = None):
        self.found, self.expected = expected if found is None else found, expected

    def record(self, found: float, expected: float) -> None:
        """Add one step."""
        self.found = MEMORY * self.found + found
        self.expected = MEMORY * self.expected + expected

    @property
    def value(self) -> float:
        return self.found / self.expected


class Acceptance:
    """Acceptance of one request. drafts: accepted drafts over those of an average text. alone: tokens of a
    step without the head, which is more than one where prompt lookup drafts.
    """

    def __init__(self, drafts: float, ease: float):
        self.drafts, self.alone = Ratio(PRIOR * drafts, PRIOR * drafts * ease), Ratio(PRIOR)


# -- the machine, and the choice ---------------------------------------------------------------

MARGIN = 1.03  # speed of another tree over the current one's that makes a change worth it
LOOK, LOOK_PLAIN = 4, 8  # steps that a choice of a tree, of plain decoding holds
STEADY = 64  # tokens of context between which tau is taken as constant
PROBE = 2  # steps with a tree, after a while of plain decoding, to see whether drafts are accepted again
FASTER = 0.8  # what these take over what was expected, below which all kinds are timed again
FIRST_REST, LONGEST_REST = 48, 1024  # steps of plain decoding before that; doubled each time in vain
TIMED = 20  # latest steps of a kind, whose lower quartile is its time
FRESH = 48  # steps after which a time is corrected by what other kinds take now
REHEARSED = 5  # steps of each kind at warm-up
EASY = 1.8  # acceptance of an easy text, which large trees suit, over the average one
HOPELESS = 0.8  # speed over the best one below which larger trees are not rehearsed


class Timed(NamedTuple):
    """Seconds of a step, and when it ran."""

    when: int
    seconds: float


class Times:
    """Seconds of real steps: by sequences in the step, whether it draws noise, the size of the context
    (`size_of`), and the tree (None: plain).
    """

    def __init__(self):
        self.steps = 0
        self._timed: dict[tuple[int, bool, int], dict[TreeShape | None, deque[Timed]]] = {}

    def add(self, count: int, noisy: bool, shape: TreeShape | None, context: int, seconds: float) -> None:
        """Record a step."""
        of_size = self._timed.setdefault((count, noisy, size_of(context)), {})
        of_size.setdefault(shape, deque(maxlen=TIMED)).append(Timed(self.steps, seconds))

    @property
    def known(self) -> bool:
        """True after the first timed step."""
        return bool(self._timed)

    def refresh(self) -> None:
        """Take all times as of now."""
        for timed in self._timed.values():
            for shape in timed:
                timed[shape] = deque((t._replace(when=self.steps) for t in timed[shape]), TIMED)

    def of(
        self, count: int, noisy: bool, shapes: Iterable[TreeShape | None], context: int
    ) -> dict[TreeShape | None, float]:
        """Return the seconds of a step with each tree now, of those that have run.

        A tree that has run at contexts of another size only is taken to differ as much as those of both.
        """
        size, shapes = size_of(context), [*shapes]
        sizes = [s for n, drew, s in self._timed if (n, drew) == (count, noisy)]
        nearest = sorted(sizes, key=lambda s: abs(s - size))[:2]
        found = {s: self._now(self._timed[count, noisy, s], shapes) for s in nearest}
        here = found.pop(size, {})
        elsewhere = next(iter(found.values()), {})
        ratios = [t / elsewhere[shape] for shape, t in here.items() if shape in elsewhere]
        ratio = statistics.median_high(ratios) if ratios else 1.0
        seconds = {shape: t * ratio for shape, t in elsewhere.items()} | here
        guesses = {s: self._guess(count, s) for s in shapes if s not in seconds}
        return seconds | {s: t for s, t in guesses.items() if t}

    def _now(
        self, timed: dict[TreeShape | None, deque[Timed]], shapes: list[TreeShape | None]
    ) -> dict[TreeShape | None, float]:
        """Return the seconds of steps of one size. Old times are taken to have changed as the fresh ones
        have.
        """
        seconds, stale, changes = {}, [], []
        for shape in timed.keys() & shapes:
            fresh = [t.seconds for t in timed[shape] if t.when >= self.steps - FRESH]
            old = [t.seconds for t in timed[shape] if t.when < self.steps - FRESH]
            seconds[shape] = low(fresh or old)
            if not fresh:
                stale.append(shape)
            elif old:
                changes.append(seconds[shape] / low(old))
        change = statistics.median_high(changes) if changes else 1.0
        return seconds | {shape: seconds[shape] * change for shape in stale}

    def _guess(self, count: int, shape: TreeShape | None) -> float | None:
        """Guess the seconds of a step that has not run, if it has with other numbers of sequences.

        Between steps with fewer and with more sequences they are interpolated. Else they are those with few
        sequences, and the cost of additional rows there.
        """
        found = [(n, s, low([t.seconds for t in timed]))
                 for (n, *_), of_size in self._timed.items() for s, timed in of_size.items()]
        by_count = minima((n, seconds) for n, s, seconds in found if s == shape)
        if not by_count:
            return None
        few, rows = min(by_count), shape.nodes if shape else 1
        if few <= count <= max(by_count):
            return between(by_count, count)
        by_rows = minima((s.nodes if s else 1, seconds) for n, s, seconds in found if n == few)
        alone = max(seconds for n, s, seconds in found if n == few and s == shape)
        return alone + between(by_rows, rows * count // few) - between(by_rows, rows)


def low(seconds: list[float]) -> float:
    """Return the lower quartile: other programs delay some steps, none is too fast."""
    return sorted(seconds)[len(seconds) // 4]


def size_of(context: int) -> int:
    """Return the size of a context: 0 up to 362 tokens, and one more each time that it doubles."""
    return max(0, round(math.log2(max(context, 1) / 256)))


def minima(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the least value of each key."""
    found: dict[int, float] = {}
    for key, value in pairs:
        found[key] = min(value, found.get(key, math.inf))
    return found


def between(known: dict[int, float], at: int) -> float:
    """Interpolate between the nearest known sizes, linearly, and beyond them; never below the least."""
    sizes = sorted(known)
    if len(sizes) == 1:
        return known[sizes[0]]
    high = next((n for n in sizes[1:] if n >= at), sizes[-1])
    low = sizes[sizes.index(high) - 1]
    return max(known[low] + (known[high] - known[low]) * (at - low) / (high - low), min(known.values()))


class Tuner:
    """Chooses the tree of each step, None for a step without the head.

    calibration: of the head. shapes: trees to choose among, smallest first. It keeps what it learns of the
    machine and of the average request; what it learns of a request stays in `Request.acceptance`.
    """

    def __init__(self, calibration: Calibration, shapes: Iterable[TreeShape]):
        self.calibration, self.times = calibration, Times()
        self.live = True  # steps are timed as they run, and times become stale
        self.shapes = tuple(shape for shape in shapes if shape in calibration.taus[0.0])
        usual = statistics.fmean(calibration.ease)
        self._usual = {noisy: Ratio(PRIOR, PRIOR * usual) for noisy in (False, True)}
        self._current: dict[tuple[int, bool], TreeShape | None] = {}
        self._ahead: deque[TreeShape | None] = deque()  # kinds of the next steps, whatever is faster
        self._held, self._plain, self._rest = 0, 0, FIRST_REST
        self._probed: tuple = None, 0.0  # a tree, and the seconds that it was to take
        self._group: tuple = ()

    def tau(self, shape: TreeShape | None, temperature: float, context: int, ease: float = 1.0) -> float:
        """Tokens per step of a request whose drafts are accepted `ease` times as often as on average."""
        if shape is None:
            return 1.0
        tau = self.calibration.tau(shape, temperature, context // STEADY * STEADY)
        return min(1 + ease * (tau - 1), shape.window)

    def begin(self, request: Request) -> None:
        """Give a new request the acceptance of an average one."""
        noisy = request.sampling.temperature > 0
        middle = self.shapes[len(self.shapes) // 2]
        # Above 0, as the acceptance of requests is relative to it: of a poor head no draft may be accepted.
        usual = max(self.tau(middle, request.sampling.temperature, SHORT) - 1, 0.01)
        request.acceptance = Acceptance(usual, self._usual[noisy].value)

    def next(self, requests: list[Request], count: int) -> TreeShape | None:
        """Choose for the next step over `count` rows of the batch, which decodes these requests."""
        self.times.steps += 1
        if self._ahead:
            return self._ahead.popleft()
        noisy = any(r.sampling.temperature > 0 for r in requests)
        if not self.times.known:  # without `rehearse`
            if not self.live:
                return self.shapes[0]
            self._ahead.extend(kind for kind in (None, *self.shapes) for _ in range(PROBE))
            return self._ahead.popleft()
        group = (count, noisy, *map(id, requests))
        if group != self._group:
            self._group, self._held, self._probed = group, 0, (None, 0.0)
        current = self._current.get((count, noisy))
        self._plain += current is None
        if self._held:
            self._held -= 1
            return current
        speeds, seconds = self.speeds(requests, count, noisy)
        probed, expected = self._probed
        self._probed = None, 0.0
        if seconds.get(probed, expected) < FASTER * expected:  # trees are not what they were
            self._ahead.extend(kind for kind in speeds for _ in range(PROBE))
            return self._ahead.popleft()
        best = max(speeds, key=speeds.__getitem__)
        if (count, noisy) not in self._current or speeds[best] > MARGIN * speeds[current]:
            current = best
        self._current[count, noisy] = current
        self._held = (LOOK_PLAIN if current is None else LOOK) - 1
        if current:
            self._plain, self._rest = 0, FIRST_REST
        elif self._plain > self._rest and len(speeds) > 1:
            self._plain, self._rest = 0, min(2 * self._rest, LONGEST_REST)
            current = max((shape for shape in speeds if shape), key=speeds.__getitem__)
            self._ahead, self._held = deque([current] * (PROBE - 1)), 0  # then choose anew
            self._probed = current, seconds[current]
        return current

    def speeds(
        self, requests: list[Request], count: int, noisy: bool
    ) -> tuple[dict[TreeShape | None, float], dict[TreeShape | None, float]]:
        """Return by tree the expected tokens per second of each request, and the seconds of a step."""
        context = max(r.length for r in requests)
        temperature = statistics.fmean(r.sampling.temperature for r in requests)
        drafts = [r.acceptance.drafts for r in requests]
        ease = sum(d.found for d in drafts) / sum(d.expected for d in drafts)
        seconds = self.times.of(count, noisy, (None, *self.shapes), context)
        speeds = {s: self.tau(s, temperature, context, ease) / t for s, t in seconds.items()}
        speeds[None] *= statistics.fmean(r.acceptance.alone.value for r in requests)
        return speeds, seconds

    def record(self, request: Request, shape: TreeShape | None, emitted: int) -> None:
        """Record the tokens that a step with this tree emitted for a request."""
        if shape is None:
            request.acceptance.alone.record(emitted, 1.0)
        elif shape in self.shapes:
            usual = self.tau(shape, request.sampling.temperature, request.length) - 1
            request.acceptance.drafts.record(emitted - 1, usual)
            self._usual[request.sampling.temperature > 0].record(emitted - 1, usual)

    def rehearse(self, count: int, noisy: bool, run: Callable[[], None]) -> None:
        """Time a few steps of each kind, smallest trees first; larger ones only while they may pay.

        run: runs a step over `count` rows of the batch, at a short context, with the tree that `next` gives.
        """
        usual, kinds, best = copy.deepcopy(self._usual), [], 0.0
        for turn in range(REHEARSED - 1):  # in turns: a machine that is slow for a while is slow for all
            for shape in kinds if turn else (None, *self.shapes):
                for _ in range(1 if turn else 2):  # at first twice: one slow step does not end this
                    self._ahead = deque([shape])
                    run()
                if turn:
                    continue
                kinds.append(shape)
                if not (seconds := self.times.of(count, noisy, (shape,), SHORT)):
                    return  # sequences so short that no step is needed
                speed = self.tau(shape, float(noisy), SHORT, EASY) / seconds[shape]
                if speed < HOPELESS * best:
                    break
                best = max(best, speed)
        self.times.refresh()
        self._current.clear()  # it may have gone
        self._usual = usual

    def explain(self, count: int, noisy: bool) -> str:
        """Return a line about the tree of an average request, and the time of a step with it."""
        seconds = self.times.of(count, noisy, (None, *self.shapes), SHORT)
        if len(seconds) < 2:
            return "plain decoding (no step with a tree was timed)"
        speeds = {s: self.tau(s, float(noisy), SHORT) / t for s, t in seconds.items()}
        shape = max((s for s in seconds if s), key=speeds.__getitem__)
        ratio = seconds[shape] / seconds[None]
        what = f"just timed: a step with {shape.name} takes {ratio:.2f} x a plain one"
        drafts = speeds[shape] > speeds[None]
        return f"tree {shape.name} ({what})" if drafts else f"plain decoding ({what})"
