"""The scheduler of heads on a CPU: each step drafts nothing, or a tree whose levels and nodes reduce latency.

The time that drafting takes would emit tokens elsewhere: that is its price. `Costs` knows how long steps take
here and now: it tries them out, and then learns from all that run. `Acceptance` knows what the steps of a
request bring. On our CPU kernels the choice never changes the text. Compiled steps draft trees of one size,
or nothing.
"""
from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from common.errors import InputError
from engine.draft import Drafter
from engine.passes import Passes, Rows
from engine.request import Request
from engine.scheduler import Choice, Scheduler
from model import Transformer
from tree import Prices, Tree, TreeShape

# The largest trees: of greedy steps, and of those that sample, as noise is drawn for every level beforehand.
LIMITS = TreeShape(32, 7, 4), TreeShape(32, 3, 4)

# -- what steps bring --------------------------------------------------------------------------

MEMORY, LONG_MEMORY = 0.98, 0.998  # weight of a step relative to the one after it: of a request, of all
PRIOR = 12.0  # steps of the usual text that a request begins with
HOPED = 1.3  # `Acceptance.drafted` before any step has run
MOST = 1.5  # of `drafted` over `alone` that a request begins with; at least 1: few steps show if it differs
TRUSTING = 0.5  # the least trust that it begins with
DOUBT = 0.03  # of a step without drafts that trust gets nearer to 1: texts change


class Ratio:
    """A ratio of two sums over steps, found / expected; old steps fade."""

    def __init__(self, value: float, memory: float):
        self.found, self.expected, self.memory = PRIOR * value, PRIOR, memory

    def record(self, found: float, expected: float) -> None:
        """Add one step."""
        self.found = self.memory * self.found + found
        self.expected = self.memory * self.expected + expected

    @property
    def value(self) -> float:
        return self.found / self.expected


def over(ratios: Iterable[Ratio]) -> float:
    """Return the ratio of several texts together."""
    ratios = [*ratios]
    return sum(r.found for r in ratios) / sum(r.expected for r in ratios)


class Acceptance:
    """Tokens that the steps of one request bring, or those of all.

    drafted, alone: emitted in the time of a plain step by steps with the head, and by those without it; alone
    that is more than one where prompt lookup drafts. trust: accepted drafts over those that their scores
    promised.
    """

    def __init__(
        self, drafted: float = HOPED, alone: float = 1.0, trust: float = 1.0, memory: float = LONG_MEMORY
    ):
        self.drafted, self.alone = Ratio(drafted, memory), Ratio(alone, memory)
        self.trust = Ratio(trust, memory)

    def next(self) -> Acceptance:
        """Return that of the next request, before it has run: it may be easier or harder than others."""
        alone = self.alone.value
        drafted = min(max(self.drafted.value, alone), MOST * alone)
        return Acceptance(drafted, alone, max(self.trust.value, TRUSTING), MEMORY)

    def record(self, head: bool, emitted: int, took: float | None, promised: float | None) -> None:
        """Add a step. See `Tuner.record`."""
        if promised:
            self.trust.record(emitted - 1, promised)
        else:
            self.trust.record(DOUBT, DOUBT)
        if took is not None:
            (self.drafted if head else self.alone).record(emitted, took)
            if not head:
                self.drafted.record(DOUBT * self.drafted.value, DOUBT)


# -- what steps take ---------------------------------------------------------------------------

FLAT = 5  # nodes of the largest tree that is tried on one level
TURNS, MOST_TURNS = 2, 12  # how often each kind is tried: at least, and at most
FIRST = 2  # the same where trials are the first steps of a text
ENOUGH, LONG = 0.6, 3.0  # seconds of trials after which none is repeated; no larger tree is tried
HOPELESS = 3.0  # seconds of a step over those of a plain one; if a step takes more, no larger tree is tried
LATE = 1.5  # seconds of a step over those expected that count at most: other programs take more
DRAWN = 5.0  # steps that the assumption of `Costs` about nodes counts for
CHEAPEST = 0.002  # seconds of a level or a node over those of a plain step: at least, as all has a price
RECENT = 0.96  # weight of a step's seconds relative to those of the one after it
PLAIN = 0.3  # weight of a plain step
STALE = 1.1  # pace over that when plain steps ran; if it is more, these are tried again
FRESH = 16  # drafted steps after a plain one that tell nothing about its time
GUESS = 0.25  # of a drafted step that did not run: its seconds are guessed


class Size(NamedTuple):
    """Size of a drafted tree: its nodes, root included, and the levels grown after the first."""

    nodes: int
    levels: int


class Trial(NamedTuple):
    """A tree to be timed: its nodes, root included, and whether all levels are grown, or the first alone.

    0 nodes: plain decoding.
    """

    nodes: int
    deep: bool = False


PLAINLY = Trial(0)
TRIALS = PLAINLY, Trial(1), Trial(FLAT), *(Trial(n, True) for n in (FLAT, 8, 12, 16, 24, 32))
NEEDED = {*TRIALS[:3]}
Trials = dict[Trial, list[tuple[Size, float]]]  # size and seconds of each kind's steps


def quickest(steps: list[tuple[Size, float]]) -> float:
    """Return the least seconds: other programs delay steps, none is too fast."""
    return min(seconds for _, seconds in steps)


def _spent(trials: Trials) -> float:
    """Return the seconds of all trials."""
    return sum(seconds for steps in trials.values() for _, seconds in steps)


class Costs:
    """Seconds of steps over one number of sequences: of plain ones, and by the size of the tree.

    A step with a tree takes `base`, and more for each level and each drafted node. Real steps tell how much
    slower all this is now than when it was tried (`pace`), and how much slower nodes are, whose attention
    grows with the text (`slower`): by least squares. As trees are small and alike, nodes are assumed to be
    slower by as much as the rest, until steps say otherwise. Kinds of steps that do not run are assumed to
    change as those that do.
    """

    def __init__(self, plain: float, base: float, level: float = 0.0, each: Iterable[float] = (0.0,)):
        """each: seconds of the first drafted node, of the second, and so on."""
        self.plain, self.plain_then = plain, plain  # now, and when it was tried
        self.base, self.level, self.each = base, level, [*each]
        self.upto = [0.0, *accumulate(self.each)]
        self.drawn = DRAWN * self._nodes(FLAT) ** 2
        self.sums = [0.0] * 5
        self._learn(base + level, self._nodes(FLAT), base + level + self._nodes(FLAT))
        self.drift, self.since = 1.0, 0  # change of the pace since plain steps ran; the steps since then

    @property
    def stale(self) -> bool:
        """True if steps have become slower or faster, and no plain one has shown yet if it has, too."""
        return not 1 / STALE < self.drift < STALE

    @classmethod
    def of_trials(cls, trials: Trials) -> Costs:
        """Make them of trials: those that are NEEDED, and more.

        A node of a larger tree is taken not to be cheaper than one of a smaller tree. If it seems to be, that
        is chance, and both get their mean (isotonic regression).
        """
        seconds = {kind: quickest(steps) for kind, steps in trials.items()}
        plain, base, flat = (seconds[kind] for kind in TRIALS[:3])
        deep = [t for t in TRIALS if t.deep and t in trials]
        pools: list[tuple[float, int]] = []  # seconds of nodes, and their number
        for s, t in (TRIALS[1:3], *pairwise(deep)):
            more, nodes = seconds[t] - seconds[s], t.nodes - s.nodes
            while pools and pools[-1][0] / pools[-1][1] > more / nodes:
                before = pools.pop()
                more, nodes = more + before[0], nodes + before[1]
            pools.append((more, nodes))
        floor = CHEAPEST * plain
        each = [max(more / nodes, floor) for more, nodes in pools for _ in range(nodes)]
        levels = trials[deep[0]][0][0].levels if deep else 0
        level = (seconds[deep[0]] - flat) / levels if levels else base - plain
        return cls(plain, max(base, plain), max(level, floor), each)

    def towards(self, other: Costs, share: float, rows: float) -> Costs:
        """Return costs between these and those of other numbers of sequences. rows: factor of nodes."""
        def now(c: Costs) -> list[float]:
            return [c.plain, c.pace * c.base, c.pace * c.level] + [c.slower * x * rows for x in c.each]

        plain, base, level, *each = (one + (two - one) * share for one, two in zip(now(self), now(other)))
        return Costs(plain, base, level, each)

    def _nodes(self, count: int) -> float:
        """Return the seconds that nodes took when they were tried. count: with the root, which takes none."""
        known = len(self.each)
        return self.upto[count - 1] if count <= known else self.upto[-1] + (count - 1 - known) * self.each[-1]

    def of(self, size: Size, head: bool) -> float:
        """Return the seconds of a step now. head: it runs."""
        bare = self.pace * (self.base + self.level * size.levels) if head else self.plain
        return bare + self.slower * self._nodes(size.nodes)

    def over_plain(self, size: Size, head: bool = True) -> float:
        """Return the same over those of a plain step."""
        return self.of(size, head) / self.plain

    def prices(self, speed: float, shape: TreeShape, trust: list[float]) -> Prices:
        """Return prices where `speed` tokens are emitted in the time of a plain step."""
        rate = speed / self.plain
        nodes = [rate * self.slower * node for node in self.each[: shape.nodes - 1]]
        nodes += [math.inf] * (shape.nodes - 1 - len(nodes))
        return Prices(rate * self.pace * self.level, torch.tensor(nodes), torch.tensor(trust))

    def add(self, size: Size, head: bool, seconds: float) -> None:
        """Learn from a step."""
        seconds, nodes = min(seconds, LATE * self.of(size, head)), self._nodes(size.nodes)
        before = self.pace
        if head:
            self._learn(self.base + self.level * size.levels, nodes, seconds)
            self.since += 1
            self.plain *= self.pace / before if self.since > FRESH else 1.0
            self.drift *= self.pace / before
        else:
            self.since = 0
            alone = max(seconds - self.slower * nodes, self.plain / 2)
            self.plain += PLAIN * (alone - self.plain)
            self.drift += PLAIN * (1 - self.drift)
            self._learn(GUESS * self.base, 0.0, GUESS * self.base * self.plain / self.plain_then)

    def _learn(self, bare: float, nodes: float, seconds: float) -> None:
        """Set pace and slower so that pace * bare + slower * nodes is near the seconds of the last steps.

        bare: seconds of all but the nodes, when they were tried.
        """
        new = bare * bare, bare * nodes, nodes * nodes, bare * seconds, nodes * seconds
        self.sums = [RECENT * old + x for old, x in zip(self.sums, new)]
        a, b, c, x, y = self.sums
        a, b, c = a + self.drawn, b - self.drawn, c + self.drawn
        self.pace = self.slower = x / self.sums[0]
        if (area := a * c - b * b) > 1e-9 * a * c:
            self.pace = max((c * x - b * y) / area, self.pace / 2)
            self.slower = max((a * y - b * x) / area, self.pace / 2)


# -- the choice --------------------------------------------------------------------------------

MARGIN = 1.03  # speed over the current one's that makes drafting, or not drafting, worth a change
LOOK, LOOK_PLAIN = 4, 8  # steps that a choice to draft, or to decode plainly, holds
PROBE = 3  # steps of the other kind: plain ones whose times are stale, or drafts that may be accepted again
FIRST_REST, LONGEST_REST = 32, 256  # plain steps before that; doubled each time in vain


class Plan(NamedTuple):
    """The tree of a step: its size, the largest one if it is cut by prices."""

    shape: TreeShape
    prices: Prices | None = None


class Tuner:
    """Chooses what each step drafts, None for a step without the head.

    shapes: of the trees of greedy steps and of those that sample. cuts: they are cut by prices. It keeps what
    it learns of the machine and of the usual request; what it learns of a request stays in
    `Request.acceptance`.
    """

    def __init__(self, shapes: tuple[TreeShape, TreeShape] = LIMITS, cuts: bool = True):
        self.shapes, self.cuts = shapes, cuts
        self.kinds = TRIALS if cuts else (PLAINLY, Trial(shapes[0].nodes, True))
        self.live = True  # steps are timed as they run
        self.usual: dict[float, Acceptance] = defaultdict(Acceptance)  # by temperature
        self._costs: dict[tuple[int, bool], Costs] = {}  # by sequences, and whether noise is drawn
        self._tried: set[tuple[int, bool]] = set()  # those that trials have shown; others come from these
        self._trials: dict[tuple[int, bool], Trials] = {}
        self._ahead: deque[Trial] = deque()  # trials of the next steps
        self._trying: Trial | None = None  # that of the step that runs
        self._drafts: dict[tuple[int, bool], bool] = {}  # the latest choice
        self._choice: Plan | None = None
        self._held = 0
        self._plain, self._rest = [0, 0], [FIRST_REST] * 2  # of steps that do not sample, and that do
        self._group: tuple = ()

    def begin(self, request: Request) -> None:
        """Give a new request the acceptance of the usual one."""
        request.acceptance = self._usual_of(request).next()

    def _usual_of(self, request: Request) -> Acceptance:
        return self.usual[round(request.sampling.temperature, 1)]

    def next(self, requests: list[Request], count: int) -> Plan | None:
        """Choose for the next step over `count` rows of the batch. These requests are in the first ones."""
        noisy = any(r.sampling.temperature > 0 for r in requests)
        shape, key = self.shapes[noisy], (count, noisy)
        if self._trials and not self._ahead:
            self._finish()
        if not self._costs and not self._ahead:  # without `rehearse`
            if not self.live:
                return Plan(shape)
            self._ahead.extend(kind for kind in self.kinds for _ in range(FIRST))
        self._trying = self._ahead.popleft() if self._ahead else None
        if self._trying:
            return self._of_trial(self._trying, shape, count)
        group = (*key, *requests)
        if group != self._group:
            self._group, self._held = group, 0
            if count == 1:  # another text: drafts may be accepted
                self._plain[noisy] = self._rest[noisy]
        drafts = self._drafts.get(key)
        self._plain[noisy] += drafts is False
        if self._held:
            self._held -= 1
            return self._choice
        drafted = over(r.acceptance.drafted for r in requests)
        alone = over(r.acceptance.alone for r in requests)
        margin = 1.0 if drafts is None else 1 / MARGIN if drafts else MARGIN
        drafts = self._drafts[key] = drafted > margin * alone
        self._held, least = (LOOK if drafts else LOOK_PLAIN) - 1, 0.0
        if drafts:
            self._plain[noisy], self._rest[noisy] = 0, FIRST_REST
            if self.costs(*key).stale:
                drafts, self._held = False, PROBE - 1
        elif self._plain[noisy] >= self._rest[noisy]:
            self._plain[noisy], self._rest[noisy] = 0, min(2 * self._rest[noisy], LONGEST_REST)
            drafts, self._held, least = True, PROBE - 1, 1.0
        self._choice = Plan(shape) if drafts else None
        if drafts and self.cuts:
            trust = [max(r.acceptance.trust.value, least) for r in requests] + [0.0] * (count - len(requests))
            speed = max(drafted, alone) * len(requests)
            self._choice = Plan(shape, self.costs(*key).prices(speed, shape, trust))
        return self._choice

    def _of_trial(self, trial: Trial, shape: TreeShape, count: int) -> Plan | None:
        if trial == PLAINLY:
            return None
        if not self.cuts:
            return Plan(shape)
        nodes = torch.full((shape.nodes - 1,), math.inf)
        nodes[: max(trial.nodes - 1, 0)] = -1.0
        return Plan(shape, Prices(0.0 if trial.deep else math.inf, nodes, torch.ones(count)))

    # -- learning -----------------------------------------------------------------------------

    def costs(self, count: int, noisy: bool) -> Costs:
        """Return those of steps over `count` sequences; if none has run, between or beyond the nearest."""
        key = count, noisy
        if key not in self._costs:
            tried = [of for of in self._tried if of[1] == noisy] or self._tried
            known = {of[0]: self._costs[of] for of in tried}
            few = max((n for n in known if n <= count), default=min(known))
            many = min((n for n in known if n >= count), default=few)
            share, rows = ((count - few) / (many - few), 1.0) if many > few else (0.0, count / few)
            self._costs[key] = known[few].towards(known[many], share, rows)
        return self._costs[key]

    def took(self, count: int, noisy: bool, size: Size, head: bool) -> float | None:
        """Return what such a step takes over a plain one; None as long as that is tried."""
        known = self._costs and not self._trying
        return self.costs(count, noisy).over_plain(size, head) if known else None

    def add(self, count: int, noisy: bool, size: Size, head: bool, seconds: float) -> None:
        """Learn the seconds of a step."""
        if self._trying:
            trials = self._trials.setdefault((count, noisy), {})
            trials.setdefault(self._trying, []).append((size, seconds))
        elif self._costs:
            self.costs(count, noisy).add(size, head, seconds)

    def record(
        self, request: Request, head: bool, emitted: int, took: float | None, promised: float | None
    ) -> None:
        """Record the tokens that a step emitted for a request.

        took: see `took`. promised: the sum of exp(score) of its drafts; None: they have no scores.
        """
        for acceptance in (request.acceptance, self._usual_of(request)):
            acceptance.record(head, emitted, took, promised)

    def rehearse(self, count: int, noisy: bool, run: Callable[[], None]) -> None:
        """Try steps of each kind, smallest trees first; larger ones only while they may pay.

        run: runs a step over `count` rows of the batch, at a short context, with what `next` chooses.
        """
        key = count, noisy
        if key in self._tried:
            return
        usual, order, kinds = copy.deepcopy(self.usual), self.kinds, []
        trials = self._trials[key] = {}  # without those of a process's first steps, which may be slow
        try:
            for turn in range(MOST_TURNS):  # a machine that is slow for a while is slow for all
                if turn >= TURNS and _spent(trials) > ENOUGH:
                    break
                for kind in order:
                    for _ in range(1 if turn else 2):
                        self._ahead = deque([kind])
                        run()
                    if turn:
                        continue
                    if kind not in trials:
                        break  # sequences so short that no step is needed
                    kinds.append(kind)
                    hopeless = quickest(trials[kind]) > HOPELESS * quickest(trials[PLAINLY])
                    if kind.nodes >= FLAT and (hopeless or _spent(trials) > LONG):
                        break
                order = kinds = kinds[::-1]  # to and fro: what ran before a step tells on its time
        finally:
            self.usual = usual
            self._finish()

    def _finish(self) -> None:
        """Make costs of what was tried."""
        for key, trials in self._trials.items():
            if self.cuts and trials.keys() >= NEEDED:
                self._costs[key] = Costs.of_trials(trials)
            elif not self.cuts and trials.keys() == {*self.kinds}:
                self._costs[key] = Costs(*(quickest(trials[kind]) for kind in self.kinds))
            else:
                continue
            self._tried.add(key)
        self._trials, self._trying = {}, None
        self._ahead.clear()
        self._drafts.clear()

    def explain(self, counts: Iterable[int], noisy: bool) -> str:
        """Return a line about what is drafted, and the time of a step with a tree, by number of texts."""
        shape = self.shapes[noisy]
        what = f"trees of up to {shape.nodes} nodes" if self.cuts else f"tree {shape.name}"
        if not self._costs:
            return f"{what}, as they pay (no step with one was timed)"
        size = Size(FLAT, 1) if self.cuts else Size(shape.nodes, shape.depth)
        one, *more = ((self.costs(n, noisy).over_plain(size), n) for n in counts)
        line = f"just timed: a step with {size.nodes} nodes takes {one[0]:.2f} x a plain one"
        return f"{what}, as they pay ({line}{''.join(f', {x:.2f} x with {n} texts' for x, n in more)})"


# -- the schedulers ----------------------------------------------------------------------------


class Record(NamedTuple):
    """What a step was: its place in the cost model, and what its drafts promised to each request."""

    kind: tuple[int, bool, Size, bool]  # see `Tuner.add`
    took: float | None  # see `Tuner.took`
    promised: list[float] | None  # by request: the sum of exp(score) of its drafts


class CostScheduler(Scheduler):
    """Drafts with the head of the engine's drafter as `Tuner` says; else without the head, or nothing."""

    def __init__(self, tuner: Tuner | None = None):
        self.tuner = tuner or Tuner()

    def variants(self, drafter: Drafter) -> list[Drafter]:
        return [drafter.with_tree(shape) for shape in self.tuner.shapes]

    def attach(self, passes: Passes, timed: bool) -> None:
        super().attach(passes, timed)
        self.tuner.live, drafter = timed, passes.drafter
        # On a CPU, where asking for a draft costs no synchronisation.
        headless = None if passes.on_cuda else copy.copy(drafter.headless)
        self.headless = headless and passes.without_head(headless)
        self.trees = {shape: drafter.with_tree(shape) for shape in self.tuner.shapes}
        # While prompt lookup has no draft, joining its trees would only cost time.
        self.alone = {shape: tree.grown for shape, tree in self.trees.items() if self.headless}
        self.asks = True  # that `headless` may have a draft

    @property
    def drafters(self) -> list[Drafter]:
        return [*self.trees.values()]

    def add(self, request: Request) -> None:
        self.tuner.begin(request)

    def next(self, requests: list[Request], rows: Rows, slots: torch.Tensor) -> Choice:
        plan, passes = self.tuner.next(requests, rows.count), self.passes
        drafts = self.headless is not None and self.asks
        drafts = drafts and self.headless.has_draft(passes.device_step, rows.state, slots)
        if plan:
            trees = self.trees if drafts or not self.headless else self.alone
            return Choice(trees[plan.shape], plan.prices, True)
        return Choice(self.headless if drafts else passes.plain)

    def launched(
        self, choice: Choice, requests: list[Request], rows: Rows, first: int, tree: Tree, noisy: bool
    ) -> Record:
        size, promised = Size(tree.tokens.shape[1], 0), None
        if choice.prices:
            size = size._replace(levels=rows.state.levels)
            scores = tree.scores.tolist()[first : first + len(requests)]
            promised = [sum(map(math.exp, each[1:])) for each in scores]
        kind = rows.count, noisy, size, choice.head
        return Record(kind, self.tuner.took(*kind), promised)

    def timed(self, record: Record, seconds: float) -> None:
        self.tuner.add(*record.kind, seconds)

    def emitted(self, record: Record, index: int, request: Request, count: int) -> None:
        promised = record.promised and record.promised[index]
        self.tuner.record(request, record.kind[-1], count, record.took, promised)

    def warm_up(self, counts: list[int], noisy: bool, run: Callable[[int], None]) -> None:
        self.asks = False  # the text of a rehearsal repeats itself as no other does
        try:
            for count in counts:
                self.tuner.rehearse(count, noisy, lambda count=count: run(count))
        finally:
            self.asks = True

    def describe(self, counts: list[int], noisy: bool) -> str:
        return self.tuner.explain(counts, noisy)


class AskingScheduler(Scheduler):
    """For a drafter without a head on a CPU: ask it first whether it has a draft, else decode plainly.

    There, verifying more tokens costs time, and host checks are free.
    """

    def next(self, requests: list[Request], rows: Rows, slots: torch.Tensor) -> Choice:
        drafter = self.passes.drafter
        drafts = rows.drafter(drafter).has_draft(self.passes.device_step, rows.state, slots)
        return Choice(drafter if drafts else self.passes.plain)


def schedule(
    drafter: Drafter, target: Transformer, tree: object, compiles: bool
) -> tuple[Drafter, Scheduler | None]:
    """Return the drafter with its largest tree, and its scheduler; None: always the drafter's own tree.

    tree: the option --tree; "auto", and None where no step is compiled: a head's trees are sized by time.
    Raises InputError on "auto" for several ranks: each measures other times, and would choose another tree.
    """
    on_gpu = target.embed.weight.is_cuda
    asking = AskingScheduler() if drafter.may_pass and not on_gpu else None
    if target.ranks is not None:
        if tree == "auto":
            raise InputError("--tree auto: several ranks cannot choose trees by time yet; give T,D,K")
        return drafter, asking
    static, grower = on_gpu or compiles, drafter.grown
    wanted = tree == "auto" or (tree is None and not static)
    if not wanted or grower is None or grower.head.args.draft_vocab_size < LIMITS[0].width:
        return drafter, asking
    deepest = LIMITS[0].depth if grower.deepest is None else grower.deepest
    if deepest < 2:
        return drafter, asking
    shapes = tuple(replace(shape, depth=min(shape.depth, deepest)) for shape in LIMITS)
    tuner = Tuner((grower.shape, grower.shape), cuts=False) if static else Tuner(shapes)
    return drafter.with_tree(tuner.shapes[0]), CostScheduler(tuner)
