"""Cost-based scheduler of draft heads on a CPU: each step drafts nothing, or the tree that reduces latency.

Drafting takes time in which plain decoding would emit tokens: that is its cost. `Costs` predicts the seconds
of a step. It starts from timed trials and learns from every step. `Acceptance` tracks the tokens that the
steps of a request emit. With our CPU kernels the choice never changes the text. Compiled steps draft trees of
one size, or nothing.
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
from engine.engine import Engine
from engine.passes import Rows
from engine.request import Request
from engine.scheduler import Choice, Scheduler
from model import Transformer
from sampling.options import Sampling
from schedulers.marginal_costs import MarginalCosts
from tree import Tree, TreeShape

# Largest tree of a greedy step and of a sampled one. Sampling draws the noise of every level in advance.
MAX_TREES = TreeShape(32, 7, 4), TreeShape(32, 3, 4)

# -- accepted tokens per step -------------------------------------------------------------------

# Weight of a step relative to the next one: in the ratios of a request, and in those of all requests.
REQUEST_DECAY, GLOBAL_DECAY = 0.98, 0.998
PRIOR_STEPS = 12.0  # weight of the initial value of a ratio, in steps
INITIAL_SPEEDUP = 1.3  # `Acceptance.with_head` before the first measurement
# Limit of `with_head` / `without_head` in a new request, at least 1. A few steps show whether it differs.
MAX_INITIAL_RATIO = 1.5
MIN_CONFIDENCE = 0.5  # of a new request
PRIOR_DECAY = 0.03  # weight of a step without drafts, which moves the confidence towards 1: text changes


class Ratio:
    """An exponentially weighted ratio of two sums over steps: found / expected."""

    def __init__(self, value: float, memory: float):
        self.found, self.expected, self.memory = PRIOR_STEPS * value, PRIOR_STEPS, memory

    def record(self, found: float, expected: float) -> None:
        """Add one step."""
        self.found = self.memory * self.found + found
        self.expected = self.memory * self.expected + expected

    @property
    def value(self) -> float:
        return self.found / self.expected


def pooled(ratios: Iterable[Ratio]) -> float:
    """Return the ratio of several requests together."""
    ratios = [*ratios]
    return sum(r.found for r in ratios) / sum(r.expected for r in ratios)


class Acceptance:
    """Tokens that the steps of one request emit, or those of all requests.

    with_head, without_head: tokens emitted in the time of a plain step, by steps with the head and by those
    without it. without_head is above 1 where prompt lookup drafts. confidence: accepted drafts / drafts that
    their scores predict.
    """

    def __init__(
        self, with_head: float = INITIAL_SPEEDUP, without_head: float = 1.0, confidence: float = 1.0,
        memory: float = GLOBAL_DECAY,
    ):
        self.with_head, self.without_head = Ratio(with_head, memory), Ratio(without_head, memory)
        self.confidence = Ratio(confidence, memory)

    def next(self) -> Acceptance:
        """Return the prior of a new request. It may be easier or harder than others."""
        without_head = self.without_head.value
        with_head = min(max(self.with_head.value, without_head), MAX_INITIAL_RATIO * without_head)
        return Acceptance(with_head, without_head, max(self.confidence.value, MIN_CONFIDENCE), REQUEST_DECAY)

    def record(self, head: bool, emitted: int, relative_cost: float | None, expected: float | None) -> None:
        """Add a step, as in `Tuner.record`."""
        if expected:
            self.confidence.record(emitted - 1, expected)
        else:
            self.confidence.record(PRIOR_DECAY, PRIOR_DECAY)
        if relative_cost is not None:
            (self.with_head if head else self.without_head).record(emitted, relative_cost)
            if not head:
                self.with_head.record(PRIOR_DECAY * self.with_head.value, PRIOR_DECAY)


# -- seconds per step --------------------------------------------------------------------------

MAX_FLAT_NODES = 5  # nodes of the largest tree with one level that is timed
MIN_TRIAL_ROUNDS, MAX_TRIAL_ROUNDS = 2, 12  # each round times every tree once
INLINE_TRIALS = 2  # steps per tree if the first steps of a request are the trials
REPEAT_SECONDS = 0.6  # if the trials take longer, MIN_TRIAL_ROUNDS rounds are run
GROW_SECONDS = 3.0  # if the trials take longer, no larger tree is timed
MAX_SLOWDOWN = 3.0  # a step / a plain step; above it no larger tree is timed
MAX_DELAY = 1.5  # measured / predicted seconds, clamped: other programs delay single steps
PRIOR_FIT_STEPS = 5.0  # weight of the prior `node_load_factor == load_factor`, in steps
MIN_COST_RATIO = 0.002  # seconds of a level or a node / seconds of a plain step: nothing is free
FIT_DECAY = 0.96  # weight of a step relative to the next one in the fit of the load factors
PLAIN_STEP_WEIGHT = 0.3  # of a plain step in the moving average of `Costs.plain`
MAX_LOAD_DRIFT = 1.1  # change of the load factor, either way, after which plain steps are timed again
PLAIN_VALID_STEPS = 16  # drafted steps after a plain one that leave `Costs.plain` as measured
ESTIMATED_STEP_WEIGHT = 0.25  # of a drafted step that did not run: its seconds are estimated


class Size(NamedTuple):
    """Size of a drafted tree: nodes, root included, and levels grown after the first."""

    nodes: int
    levels: int


class Trial(NamedTuple):
    """A tree to time: nodes, root included, and whether all levels are grown, or only the first.

    0 nodes: plain decoding.
    """

    nodes: int
    deep: bool = False


PLAIN_TRIAL = Trial(0)
TRIALS = (
    PLAIN_TRIAL, Trial(1), Trial(MAX_FLAT_NODES),
    *(Trial(n, True) for n in (MAX_FLAT_NODES, 8, 12, 16, 24, 32)),
)
REQUIRED_TRIALS = {*TRIALS[:3]}
Trials = dict[Trial, list[tuple[Size, float]]]  # size and seconds of each step


def fastest(steps: list[tuple[Size, float]]) -> float:
    """Return the least seconds: other programs only add delay."""
    return min(seconds for _, seconds in steps)


def _trial_seconds(trials: Trials) -> float:
    """Return the seconds of all trials."""
    return sum(seconds for steps in trials.values() for _, seconds in steps)


class Costs:
    """Seconds of steps over one number of sequences: plain steps, and drafted ones by tree size.

    A drafted step takes `base` seconds, plus more for each level and each node. Two load factors, measured /
    predicted seconds, are fitted to real steps by least squares: `load_factor` of all but the nodes, and
    `node_load_factor` of the nodes, whose attention grows with the context. The prior is that both are equal,
    as steps with small trees of similar size do not separate them. Steps that do not run are assumed to
    change by the same factor as those that do.
    """

    def __init__(self, plain: float, base: float, level: float = 0.0, node_seconds: Iterable[float] = (0.0,)):
        """node_seconds: of the first drafted node, of the second, and so on."""
        self.plain, self.measured_plain = plain, plain  # now, and in the trials
        self.base, self.level, self.node_seconds = base, level, [*node_seconds]
        self.cumulative = [0.0, *accumulate(self.node_seconds)]
        self.prior_weight = PRIOR_FIT_STEPS * self._nodes(MAX_FLAT_NODES) ** 2
        self.sums = [0.0] * 5
        self._learn(base + level, self._nodes(MAX_FLAT_NODES), base + level + self._nodes(MAX_FLAT_NODES))
        self.load_drift, self.steps_since_plain = 1.0, 0  # since the last plain step

    @property
    def stale(self) -> bool:
        """True if the load has changed and no plain step has been timed since."""
        return not 1 / MAX_LOAD_DRIFT < self.load_drift < MAX_LOAD_DRIFT

    @classmethod
    def from_trials(cls, trials: Trials) -> Costs:
        """Build costs from trials, which include REQUIRED_TRIALS.

        The cost of a node does not fall with the size of the tree. Measurements that say so are noise and are
        averaged (isotonic regression).
        """
        seconds = {trial: fastest(steps) for trial, steps in trials.items()}
        plain, base, flat = (seconds[trial] for trial in TRIALS[:3])
        deep = [t for t in TRIALS if t.deep and t in trials]
        pools: list[tuple[float, int]] = []  # seconds of nodes, and their number
        for s, t in (TRIALS[1:3], *pairwise(deep)):
            more, nodes = seconds[t] - seconds[s], t.nodes - s.nodes
            while pools and pools[-1][0] / pools[-1][1] > more / nodes:
                before = pools.pop()
                more, nodes = more + before[0], nodes + before[1]
            pools.append((more, nodes))
        floor = MIN_COST_RATIO * plain
        node_seconds = [max(more / nodes, floor) for more, nodes in pools for _ in range(nodes)]
        levels = trials[deep[0]][0][0].levels if deep else 0
        level = (seconds[deep[0]] - flat) / levels if levels else base - plain
        return cls(plain, max(base, plain), max(level, floor), node_seconds)

    def interpolate(self, other: Costs, fraction: float, scale: float) -> Costs:
        """Return costs between these and `other`, for another number of sequences. scale: of the nodes."""
        def now(c: Costs) -> list[float]:
            return [c.plain, c.load_factor * c.base, c.load_factor * c.level] + [
                c.node_load_factor * x * scale for x in c.node_seconds
            ]

        plain, base, level, *node_seconds = (
            one + (two - one) * fraction for one, two in zip(now(self), now(other))
        )
        return Costs(plain, base, level, node_seconds)

    def _nodes(self, count: int) -> float:
        """Return the seconds of a tree's nodes in the trials. count: with the root, which takes none."""
        known = len(self.node_seconds)
        return (
            self.cumulative[count - 1] if count <= known
            else self.cumulative[-1] + (count - 1 - known) * self.node_seconds[-1]
        )

    def seconds(self, size: Size, head: bool) -> float:
        """Predict the seconds of a step under the present load. head: the draft head runs."""
        bare = self.load_factor * (self.base + self.level * size.levels) if head else self.plain
        return bare + self.node_load_factor * self._nodes(size.nodes)

    def relative_cost_of(self, size: Size, head: bool = True) -> float:
        """Predict the seconds of a step / the seconds of a plain step."""
        return self.seconds(size, head) / self.plain

    def marginal(self, speed: float, shape: TreeShape, confidence: list[float]) -> MarginalCosts:
        """Return costs in tokens. speed: tokens emitted in the time of a plain step."""
        rate = speed / self.plain
        nodes = [rate * self.node_load_factor * node for node in self.node_seconds[: shape.nodes - 1]]
        nodes += [math.inf] * (shape.nodes - 1 - len(nodes))
        level = rate * self.load_factor * self.level
        return MarginalCosts(level, torch.tensor(nodes), torch.tensor(confidence))

    def add(self, size: Size, head: bool, seconds: float) -> None:
        """Update the load factors, or `plain`, from a measured step."""
        seconds, nodes = min(seconds, MAX_DELAY * self.seconds(size, head)), self._nodes(size.nodes)
        before = self.load_factor
        if head:
            self._learn(self.base + self.level * size.levels, nodes, seconds)
            self.steps_since_plain += 1
            self.plain *= self.load_factor / before if self.steps_since_plain > PLAIN_VALID_STEPS else 1.0
            self.load_drift *= self.load_factor / before
        else:
            self.steps_since_plain = 0
            measured = max(seconds - self.node_load_factor * nodes, self.plain / 2)
            self.plain += PLAIN_STEP_WEIGHT * (measured - self.plain)
            self.load_drift += PLAIN_STEP_WEIGHT * (1 - self.load_drift)
            self._learn(
                ESTIMATED_STEP_WEIGHT * self.base, 0.0,
                ESTIMATED_STEP_WEIGHT * self.base * self.plain / self.measured_plain,
            )

    def _learn(self, bare: float, nodes: float, seconds: float) -> None:
        """Fit load_factor * bare + node_load_factor * nodes to the seconds of recent steps.

        bare: seconds of all but the nodes in the trials.
        """
        new = bare * bare, bare * nodes, nodes * nodes, bare * seconds, nodes * seconds
        self.sums = [FIT_DECAY * old + x for old, x in zip(self.sums, new)]
        a, b, c, x, y = self.sums
        a, b, c = a + self.prior_weight, b - self.prior_weight, c + self.prior_weight
        self.load_factor = self.node_load_factor = x / self.sums[0]
        if (area := a * c - b * b) > 1e-9 * a * c:
            self.load_factor = max((c * x - b * y) / area, self.load_factor / 2)
            self.node_load_factor = max((a * y - b * x) / area, self.load_factor / 2)


# -- the choice --------------------------------------------------------------------------------

SWITCH_RATIO = 1.03  # predicted speed / current speed above which drafting starts or stops
DRAFT_HOLD_STEPS, PLAIN_HOLD_STEPS = 4, 8  # steps that a choice to draft, or not to draft, is kept
PROBE_STEPS = 3  # of the other choice, to time plain steps or to test whether drafts are accepted again
# Plain steps before a probe drafts. The interval doubles after each probe that fails.
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 32, 256


class Plan(NamedTuple):
    """The tree of a step. shape: its size, or its maximum size if `costs` cut it."""

    shape: TreeShape
    costs: MarginalCosts | None = None


class Tuner:
    """Chooses what each step drafts, None for a step without the head.

    shapes: trees of greedy steps and of sampled steps. cuts: `MarginalCosts` cut them. The tuner holds the
    costs of the machine and the acceptance of all requests. `Request.acceptance` holds that of one request.
    """

    def __init__(self, shapes: tuple[TreeShape, TreeShape] = MAX_TREES, cuts: bool = True):
        self.shapes, self.cuts = shapes, cuts
        self.candidates = TRIALS if cuts else (PLAIN_TRIAL, Trial(shapes[0].nodes, True))
        self.is_timed = True  # every step is timed
        self.shared: dict[float, Acceptance] = defaultdict(Acceptance)  # by temperature
        self._costs: dict[tuple[int, bool], Costs] = {}  # by (sequences, sampled)
        self._measured: set[tuple[int, bool]] = set()  # keys with trials; other costs are interpolated
        self._trials: dict[tuple[int, bool], Trials] = {}
        self._pending_trials: deque[Trial] = deque()  # trials of the next steps
        self._running_trial: Trial | None = None  # of the present step
        self._drafts: dict[tuple[int, bool], bool] = {}  # the latest choice
        self._choice: Plan | None = None
        self._hold_steps = 0  # steps for which `_choice` is still kept
        # Of greedy steps, of sampled steps.
        self._plain_steps, self._probe_interval = [0, 0], [MIN_PROBE_INTERVAL] * 2
        self._group: tuple = ()

    def start(self, request: Request) -> None:
        """Give a new request the prior of its temperature."""
        request.acceptance = self._shared_acceptance(request).next()

    def _shared_acceptance(self, request: Request) -> Acceptance:
        return self.shared[round(request.sampling.temperature, 1)]

    def next(self, requests: list[Request], count: int) -> Plan | None:
        """Choose the tree of the next step over `count` batch slots, which hold these requests."""
        noisy = any(r.sampling.temperature > 0 for r in requests)
        shape, key = self.shapes[noisy], (count, noisy)
        if self._trials and not self._pending_trials:
            self._finish()
        if not self._costs and not self._pending_trials:  # without `run_trials`
            if not self.is_timed:
                return Plan(shape)
            self._pending_trials.extend(trial for trial in self.candidates for _ in range(INLINE_TRIALS))
        self._running_trial = self._pending_trials.popleft() if self._pending_trials else None
        if self._running_trial:
            return self._trial_plan(self._running_trial, shape, count)
        group = (*key, *requests)
        if group != self._group:
            self._group, self._hold_steps = group, 0
            if count == 1:  # a new request: drafts may be accepted
                self._plain_steps[noisy] = self._probe_interval[noisy]
        drafts = self._drafts.get(key)
        self._plain_steps[noisy] += drafts is False
        if self._hold_steps:
            self._hold_steps -= 1
            return self._choice
        with_head = pooled(r.acceptance.with_head for r in requests)
        without_head = pooled(r.acceptance.without_head for r in requests)
        margin = 1.0 if drafts is None else 1 / SWITCH_RATIO if drafts else SWITCH_RATIO
        drafts = self._drafts[key] = with_head > margin * without_head
        self._hold_steps, min_confidence = (DRAFT_HOLD_STEPS if drafts else PLAIN_HOLD_STEPS) - 1, 0.0
        if drafts:
            self._plain_steps[noisy], self._probe_interval[noisy] = 0, MIN_PROBE_INTERVAL
            if self.costs(*key).stale:
                drafts, self._hold_steps = False, PROBE_STEPS - 1
        elif self._plain_steps[noisy] >= self._probe_interval[noisy]:
            self._plain_steps[noisy], self._probe_interval[noisy] = (
                0, min(2 * self._probe_interval[noisy], MAX_PROBE_INTERVAL)
            )
            drafts, self._hold_steps, min_confidence = True, PROBE_STEPS - 1, 1.0
        self._choice = Plan(shape) if drafts else None
        if drafts and self.cuts:
            confidence = [0.0] * count
            for r in requests:
                confidence[r.slot] = max(r.acceptance.confidence.value, min_confidence)
            speed = max(with_head, without_head) * len(requests)
            self._choice = Plan(shape, self.costs(*key).marginal(speed, shape, confidence))
        return self._choice

    def _trial_plan(self, trial: Trial, shape: TreeShape, count: int) -> Plan | None:
        if trial == PLAIN_TRIAL:
            return None
        if not self.cuts:
            return Plan(shape)
        nodes = torch.full((shape.nodes - 1,), math.inf)
        nodes[: max(trial.nodes - 1, 0)] = -1.0
        return Plan(shape, MarginalCosts(0.0 if trial.deep else math.inf, nodes, torch.ones(count)))

    # -- learning -----------------------------------------------------------------------------

    def costs(self, count: int, noisy: bool) -> Costs:
        """Return the costs of steps over `count` sequences, interpolated if there are no trials of them."""
        key = count, noisy
        if key not in self._costs:
            tried = [k for k in self._measured if k[1] == noisy] or self._measured
            known = {k[0]: self._costs[k] for k in tried}
            low = max((n for n in known if n <= count), default=min(known))
            high = min((n for n in known if n >= count), default=low)
            fraction, scale = ((count - low) / (high - low), 1.0) if high > low else (0.0, count / low)
            self._costs[key] = known[low].interpolate(known[high], fraction, scale)
        return self._costs[key]

    def relative_cost(self, count: int, noisy: bool, size: Size, head: bool) -> float | None:
        """Predict the seconds of a step / those of a plain step; None while trials run."""
        known = self._costs and not self._running_trial
        return self.costs(count, noisy).relative_cost_of(size, head) if known else None

    def add(self, count: int, noisy: bool, size: Size, head: bool, seconds: float) -> None:
        """Learn the seconds of a step."""
        if self._running_trial:
            trials = self._trials.setdefault((count, noisy), {})
            trials.setdefault(self._running_trial, []).append((size, seconds))
        elif self._costs:
            self.costs(count, noisy).add(size, head, seconds)

    def record(
        self, request: Request, head: bool, emitted: int, relative_cost: float | None, expected: float | None
    ) -> None:
        """Record the tokens that a step emitted for a request.

        expected: sum of exp(score) over the drafts; None: they have no scores.
        """
        for acceptance in (request.acceptance, self._shared_acceptance(request)):
            acceptance.record(head, emitted, relative_cost, expected)

    def run_trials(self, count: int, noisy: bool, run: Callable[[], None]) -> None:
        """Time steps with each candidate tree, smallest first. Stop at trees that are too slow.

        run: runs a step over `count` batch slots, at a short context, with what `next` chooses.
        """
        key = count, noisy
        if key in self._measured:
            return
        shared, order, completed = copy.deepcopy(self.shared), self.candidates, []
        trials = self._trials[key] = {}  # drops trials of a process's first steps, which may be slow
        try:
            for turn in range(MAX_TRIAL_ROUNDS):  # interleaved: a slow period affects all trees
                if turn >= MIN_TRIAL_ROUNDS and _trial_seconds(trials) > REPEAT_SECONDS:
                    break
                for trial in order:
                    for _ in range(1 if turn else 2):
                        self._pending_trials = deque([trial])
                        run()
                    if turn:
                        continue
                    if trial not in trials:
                        break  # the sequences are too short for a step
                    completed.append(trial)
                    too_slow = fastest(trials[trial]) > MAX_SLOWDOWN * fastest(trials[PLAIN_TRIAL])
                    if trial.nodes >= MAX_FLAT_NODES and (too_slow or _trial_seconds(trials) > GROW_SECONDS):
                        break
                order = completed = completed[::-1]  # back and forth: a step's time depends on the one before
        finally:
            self.shared = shared
            self._finish()

    def _finish(self) -> None:
        """Build costs from complete trials."""
        for key, trials in self._trials.items():
            if self.cuts and trials.keys() >= REQUIRED_TRIALS:
                self._costs[key] = Costs.from_trials(trials)
            elif not self.cuts and trials.keys() == {*self.candidates}:
                self._costs[key] = Costs(*(fastest(trials[trial]) for trial in self.candidates))
            else:
                continue
            self._measured.add(key)
        self._trials, self._running_trial = {}, None
        self._pending_trials.clear()
        self._drafts.clear()

    def describe(self, counts: Iterable[int], noisy: bool) -> str:
        """Describe the trees, and the relative cost of a step by number of requests, in one line."""
        shape = self.shapes[noisy]
        what = f"trees of up to {shape.nodes} nodes" if self.cuts else f"tree {shape.name}"
        if not self._costs:
            return f"{what}, as they pay (no step with one was timed)"
        size = Size(MAX_FLAT_NODES, 1) if self.cuts else Size(shape.nodes, shape.depth)
        one, *more = ((self.costs(n, noisy).relative_cost_of(size), n) for n in counts)
        line = f"just timed: a step with {size.nodes} nodes takes {one[0]:.2f} x a plain one"
        return f"{what}, as they pay ({line}{''.join(f', {x:.2f} x with {n} texts' for x, n in more)})"


# -- the schedulers ----------------------------------------------------------------------------


class Record(NamedTuple):
    """A launched step, for the cost model."""

    step: tuple[int, bool, Size, bool]  # count, noisy, size and head of `Tuner.add`
    relative_cost: float | None  # see `Tuner.relative_cost`
    expected: list[float] | None  # by request: sum of exp(score) over its drafts


class CostScheduler(Scheduler):
    """Drafts with the head if the tuner chooses to; else with prompt lookup if it has a draft, or nothing."""

    def __init__(self, tuner: Tuner | None = None):
        self.tuner = tuner or Tuner()

    def variants(self, drafter: Drafter) -> list[Drafter]:
        headless = [drafter.headless] if drafter.headless else []
        return [drafter.with_tree(shape) for shape in self.tuner.shapes] + headless

    def attach(self, engine: Engine) -> None:
        super().attach(engine)
        passes = engine.passes
        self.tuner.is_timed, drafter = engine.lag == 0, passes.drafter
        self.counts = sorted({engine.step_counts[0], engine.batch})  # numbers of sequences that are timed
        # On a CPU only: there, asking for a draft costs no synchronization.
        headless = None if passes.on_cuda else copy.copy(drafter.headless)
        self.headless = headless and passes.without_head(headless)
        self.trees = {shape: drafter.with_tree(shape) for shape in self.tuner.shapes}
        # While prompt lookup has no draft, joining its tree only costs time.
        self.trees_without_lookup = {shape: tree.grown for shape, tree in self.trees.items() if self.headless}
        self.uses_lookup = True

    @property
    def drafters(self) -> list[Drafter]:
        return [*self.trees.values()]

    def add(self, request: Request) -> None:
        self.tuner.start(request)

    def next(self, requests: list[Request], rows: Rows, slots: torch.Tensor) -> Choice:
        plan, passes = self.tuner.next(requests, rows.count), self.passes
        drafts = self.headless is not None and self.uses_lookup
        drafts = drafts and self.headless.has_draft(passes.device_step, rows.state, slots)
        if plan:
            trees = self.trees if drafts or not self.headless else self.trees_without_lookup
            return Choice(trees[plan.shape], plan.costs, True)
        return Choice(self.headless if drafts else passes.plain)

    def launched(self, choice: Choice, rows: Rows, tree: Tree, noisy: bool) -> Record:
        size, expected = Size(tree.tokens.shape[1], 0), None
        if choice.costs:
            size = size._replace(levels=rows.state.levels)
            expected = [sum(map(math.exp, path[1:])) for path in tree.scores.tolist()]
        step = rows.count, noisy, size, choice.head
        return Record(step, self.tuner.relative_cost(*step), expected)

    def timed(self, record: Record, seconds: float) -> None:
        self.tuner.add(*record.step, seconds)

    def emitted(self, record: Record, row: int, request: Request, count: int) -> None:
        expected = record.expected and record.expected[row]
        self.tuner.record(request, record.step[-1], count, record.relative_cost, expected)

    def warm_up(self, engine: Engine, sampling: Sampling) -> None:
        long, lag = replace(sampling, max_new_tokens=engine.max_seq_len), engine.lag

        def run(count: int) -> None:
            while len(engine.requests) < count:
                engine.admit([0], long)
            engine.finish_prompts()
            engine.step()

        engine.lag, self.uses_lookup = 0, False  # warmup text repeats itself, so lookup would always draft
        try:
            for count in self.counts:
                self.tuner.run_trials(count, sampling.temperature > 0, lambda count=count: run(count))
        finally:
            engine.lag, self.uses_lookup = lag, True
            for request in engine.requests:
                engine.leave(request)

    def describe(self, noisy: bool) -> str:
        return self.tuner.describe(self.counts, noisy)


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

    tree: the option --tree. "auto", and None if no step is compiled: trees are sized by measured time.
    Raises InputError on "auto" for several ranks: each measures other times and would choose another tree.
    """
    on_gpu = target.embed.weight.is_cuda
    asking = AskingScheduler() if drafter.may_pass and not on_gpu else None
    if target.ranks is not None:
        if tree == "auto":
            raise InputError("--tree auto: several ranks cannot choose trees by time yet; give T,D,K")
        return drafter, asking
    static, grower = on_gpu or compiles, drafter.grown
    tuned = tree == "auto" or (tree is None and not static)
    if not tuned or grower is None or grower.head.args.draft_vocab_size < MAX_TREES[0].width:
        return drafter, asking
    deepest = MAX_TREES[0].depth if grower.deepest is None else grower.deepest
    if deepest < 2:
        return drafter, asking
    shapes = tuple(replace(shape, depth=min(shape.depth, deepest)) for shape in MAX_TREES)
    tuner = Tuner((grower.shape, grower.shape), cuts=False) if static else Tuner(shapes)
    return drafter.with_tree(tuner.shapes[0]), CostScheduler(tuner)
