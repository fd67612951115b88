"""Cost-based scheduler: each step drafts nothing, or the tree with the least predicted time per token.

Drafting costs time in which plain decoding would produce tokens. `schedulers.costs.Costs` predicts the
seconds of a step: it starts from timed trials and is updated after each step.
`schedulers.acceptance.Acceptance` tracks the tokens that the steps of a request emit. A drafter with a
network is switched on and off (`Tuner.next`). A drafter without a network, such as prompt lookup, is almost
free: it drafts at every step, and `MarginalCosts` keep the nodes whose expected gain exceeds their cost,
often none. With our CPU kernels the choice never changes the output. Compiled and captured steps draft one of
a few trees (`Tuner.prunes` is False), or nothing.
"""
from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from common.errors import InputError
from common.heap import return_freed_memory
from engine.draft import Drafter, NetworkDrafter
from engine.engine import Choice, Engine, Scheduler
from engine.request import Request
from engine.runner import SlotRange
from engine.sampling import Sampling
from model import Transformer
from schedulers.acceptance import Acceptance, mean_accepted, pooled_ratio
from schedulers.costs import (
    MAX_FLAT_NODES,
    MAX_SLOWDOWN,
    PLAIN_TRIAL,
    REQUIRED_TRIALS,
    TRIALS,
    Costs,
    MarginalCosts,
    Size,
    Trial,
    Trials,
    fastest,
    trial_seconds,
)
from tree import Tree, TreeShape

MAX_TREES = NetworkDrafter.max_trees
# Trees that CUDA graphs are captured for, beside the default.
CAPTURED_TREES = TreeShape(8, 2, 4), TreeShape(16, 4, 5), TreeShape(32, 5, 8), TreeShape(60, 7, 10)
MIN_TRIAL_ROUNDS, MAX_TRIAL_ROUNDS = 2, 12  # each round times every tree once
REPEAT_SECONDS = 0.6  # if the trials take longer, only MIN_TRIAL_ROUNDS rounds are run
GROW_SECONDS = 3.0  # if the trials take longer, no larger tree is timed
SWITCH_RATIO = 1.03  # predicted speed / current speed above which drafting starts or stops
DRAFT_HOLD_STEPS, PLAIN_HOLD_STEPS = 4, 8  # steps for which a choice to draft, or not to draft, is kept
PROBE_STEPS = 3  # steps of a probe: of plain steps to time them, or of drafting to test acceptance again
# Plain steps between probes that draft. The interval doubles after each failed probe.
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 32, 256
MAX_PROBE_LOSS = 0.01  # seconds lost in failed probes / seconds of plain steps
MAX_PROBE_DEBT = 4.0  # in plain-step times: a new request is probed only if the debt is at most this


class TreePlan(NamedTuple):
    """The tree of a step. shape: its size; an upper bound if `costs` prune it."""

    shape: TreeShape
    costs: MarginalCosts | None = None


class Tuner:
    """Decide per step whether the draft head runs, and with which tree.

    prunes: `MarginalCosts` prunes trees to their best nodes; else a step drafts one of `shapes` unpruned.
    shapes: with `prunes`, the largest trees of greedy and of sampled steps; else the trees to choose from,
    the default first. costs: fixed costs; None: measure them. A tuner holds the measured costs and the
    acceptance over all requests; the acceptance of one request is in `Request.acceptance`.
    """

    def __init__(
        self, shapes: tuple[TreeShape, ...] = MAX_TREES, prunes: bool = True, costs: Costs | None = None
    ):
        self.shapes, self.prunes, self.assumed_costs = shapes, prunes, costs
        sizes = sorted({shape.nodes for shape in shapes})
        self.candidates = PLAIN_TRIAL, *(Trial(nodes, True) for nodes in sizes)
        if prunes:
            self.candidates = tuple(t for t in TRIALS if t in REQUIRED_TRIALS or t.nodes <= sizes[-1])
        self.acceptance_by_temperature: dict[float, Acceptance] = defaultdict(Acceptance)
        self._costs: dict[tuple[int, bool], Costs] = {}  # by (sequences, sampled)
        self._measured: set[tuple[int, bool]] = set()  # keys of `_costs` that were timed, not interpolated
        self._trials: Trials = {}  # results of the current `run_trials`
        self._next_trial: Trial | None = None  # to run in the next step
        self._running_trial: Trial | None = None  # run by the current step
        self._drafts: dict[tuple[int, bool], bool] = {}  # latest decision, by key of `_costs`
        self._choice: TreePlan | None = None
        self._hold_steps = 0  # further steps that reuse `_choice`
        # Indexed by `sampled`.
        self._plain_steps, self._probe_interval = [0, 0], [MIN_PROBE_INTERVAL] * 2
        self._group: tuple = ()
        # Time lost by probes and not yet repaid by plain steps, in plain-step times: [greedy, sampled].
        self._debt, self._allowed_debt, self._probing = [0.0, 0.0], 0.0, False

    def start(self, request: Request) -> None:
        """Initialize the acceptance of a new request from that of all requests at its temperature."""
        request.acceptance = self._shared_acceptance(request).prior()

    def _shared_acceptance(self, request: Request) -> Acceptance:
        return self.acceptance_by_temperature[round(request.sampling.temperature, 1)]

    @property
    def in_trial(self) -> bool:
        """Whether the current step is a timed trial."""
        return self._running_trial is not None

    def start_next_trial(self, requests: list[Request], count: int) -> TreePlan | None:
        """Start the scheduled trial and return its tree; None for a plain step, or without a trial."""
        self._running_trial, self._next_trial = self._next_trial, None
        if not self.in_trial:
            return None
        return self._trial_plan(self._running_trial, self._default_shape(any_sampled(requests)), count)

    def _default_shape(self, sampled: bool) -> TreeShape:
        return self.shapes[sampled if self.prunes else 0]

    def headless_costs(self, requests: list[Request], count: int, shape: TreeShape) -> MarginalCosts | None:
        """Return the costs to prune a tree drafted without a network, or None if nothing was timed."""
        if not self._costs and self.assumed_costs is None:
            return None
        confidence = [r.acceptance.headless_confidence.value for r in requests]
        speed = pooled_ratio(r.acceptance.without_head for r in requests)
        return self._marginal(requests, count, shape, speed, confidence)

    def _marginal(
        self, requests: list[Request], count: int, shape: TreeShape, speed: float, confidence: list[float]
    ) -> MarginalCosts:
        """Return the costs to prune trees of `count` slots.

        speed: tokens per request in the time of a plain step. confidence: one value per request.
        """
        by_slot = [0.0] * count
        for request, value in zip(requests, confidence):
            by_slot[request.slot] = value
        costs = self.costs(count, any_sampled(requests))
        return costs.marginal(speed * len(requests), shape, by_slot)

    def next(self, requests: list[Request], count: int) -> TreePlan | None:
        """Choose the tree of the next step over `count` batch slots; None: do not run the head."""
        sampled = any_sampled(requests)
        key, plan = (count, sampled), self.start_next_trial(requests, count)
        if self.in_trial:
            return plan
        if not self._costs:
            return TreePlan(self._default_shape(sampled))
        self._start_group(key, requests)
        if self._drafts.get(key) is False:
            self._plain_steps[sampled] += 1
        if self._hold_steps:
            self._hold_steps -= 1
            return self._choice
        with_head = pooled_ratio(r.acceptance.with_head for r in requests)
        without_head = pooled_ratio(r.acceptance.without_head for r in requests)
        drafts, min_confidence = self._decide(key, with_head, without_head)
        speed = max(with_head, without_head)
        self._choice = self._plan(requests, key, speed, min_confidence) if drafts else None
        return self._choice

    def _start_group(self, key: tuple[int, bool], requests: list[Request]) -> None:
        """Drop a decision made for another set of requests. Probe a new single request at once."""
        group = (*key, *requests)
        if group != self._group:
            self._group, self._hold_steps = group, 0
            if key[0] == 1:
                self._plain_steps[key[1]] = self._probe_interval[key[1]]
                self._allowed_debt = MAX_PROBE_DEBT

    def _decide(self, key: tuple[int, bool], with_head: float, without_head: float) -> tuple[bool, float]:
        """Return (draft?, minimum confidence) for the next steps and set `_hold_steps`."""
        sampled = key[1]
        margin = {None: 1.0, True: 1 / SWITCH_RATIO, False: SWITCH_RATIO}[self._drafts.get(key)]
        drafts = self._drafts[key] = with_head > margin * without_head
        allowed_debt, self._allowed_debt, self._probing = self._allowed_debt, 0.0, False
        if drafts:
            self._plain_steps[sampled], self._probe_interval[sampled] = 0, MIN_PROBE_INTERVAL
            if self.costs(*key).stale:  # the load changed: time plain steps before drafting on
                self._hold_steps = PROBE_STEPS - 1
                return False, 0.0
            self._hold_steps = DRAFT_HOLD_STEPS - 1
            return True, 0.0
        # Probe whether drafts are accepted by now.
        interval = self._probe_interval[sampled]
        if self._plain_steps[sampled] >= interval and self._debt[sampled] <= allowed_debt:
            self._plain_steps[sampled], self._probing = 0, True
            self._probe_interval[sampled] = min(2 * interval, MAX_PROBE_INTERVAL)
            self._hold_steps = PROBE_STEPS - 1
            return True, 1.0
        self._hold_steps = PLAIN_HOLD_STEPS - 1
        return False, 0.0

    def _plan(
        self, requests: list[Request], key: tuple[int, bool], speed: float, min_confidence: float
    ) -> TreePlan:
        """Return the plan of a step that drafts. speed: see `_marginal`."""
        count, sampled = key
        confidence = [max(r.acceptance.confidence.value, min_confidence) for r in requests]
        if self.prunes:
            shape = self.shapes[sampled]
            return TreePlan(shape, self._marginal(requests, count, shape, speed, confidence))
        costs, mean_confidence = self.costs(*key), sum(confidence) / len(confidence)

        def tokens_per_time(shape: TreeShape) -> float:
            tokens = 1 + mean_confidence * mean_accepted(shape.nodes)
            return tokens / costs.relative_cost_of(Size(shape.nodes, 0))

        return TreePlan(max(self.shapes, key=tokens_per_time))

    def _trial_plan(self, trial: Trial, shape: TreeShape, count: int) -> TreePlan | None:
        if trial == PLAIN_TRIAL:
            return None
        if not self.prunes:
            return TreePlan(next(shape for shape in self.shapes if shape.nodes == trial.nodes))
        nodes = torch.full((shape.nodes - 1,), math.inf)
        nodes[: max(trial.nodes - 1, 0)] = -1.0
        return TreePlan(shape, MarginalCosts(0.0 if trial.deep else math.inf, nodes, torch.ones(count)))

    # -- measurements -------------------------------------------------------------------------

    def costs(self, count: int, sampled: bool) -> Costs:
        """Return the costs of steps over `count` slots, interpolated between timed batch sizes if needed."""
        key = count, sampled
        if self.assumed_costs is not None:
            return self.assumed_costs
        if key not in self._costs:
            timed = [k for k in self._measured if k[1] == sampled] or self._measured
            by_count = {k[0]: self._costs[k] for k in timed}
            low = max((n for n in by_count if n <= count), default=min(by_count))
            high = min((n for n in by_count if n >= count), default=low)
            fraction, scale = ((count - low) / (high - low), 1.0) if high > low else (0.0, count / low)
            self._costs[key] = by_count[low].interpolate(by_count[high], fraction, scale)
        return self._costs[key]

    def relative_cost(self, count: int, sampled: bool, size: Size, head: bool) -> float | None:
        """Predict step time / plain-step time; None during trials, and before the first trial."""
        has_costs = (self._costs or self.assumed_costs) and not self.in_trial
        return self.costs(count, sampled).relative_cost_of(size, head) if has_costs else None

    def add(self, count: int, sampled: bool, size: Size, head: bool, seconds: float) -> None:
        """Update the costs with the measured time of a step."""
        if self.assumed_costs is not None:
            return
        if self.in_trial:
            self._trials.setdefault(self._running_trial, []).append((size, seconds))
        elif self._costs:
            self.costs(count, sampled).add(size, head, seconds)

    def record(
        self, request: Request, head: bool, emitted: int, relative_cost: float | None, expected: float | None
    ) -> None:
        """Record the tokens that a step emitted for a request.

        expected: sum of exp(score) over the draft tokens; None if they have no scores.
        """
        if relative_cost is not None and (self._probing or not head):
            lost = relative_cost - emitted / request.acceptance.without_head.value
            sampled, paid = any_sampled([request]), MAX_PROBE_LOSS * relative_cost
            self._debt[sampled] = max(self._debt[sampled] + (lost if head else -paid), 0.0)
        for acceptance in (request.acceptance, self._shared_acceptance(request)):
            acceptance.record(head, emitted, relative_cost, expected)

    def run_trials(self, count: int, sampled: bool, run: Callable[[], None]) -> None:
        """Time steps with each candidate tree, smallest first. Stop at the first tree that is too slow.

        run: run one step over `count` batch slots at a short context; it calls `next`.
        """
        key = count, sampled
        if key in self._measured:
            return
        shared, order, completed = copy.deepcopy(self.acceptance_by_temperature), self.candidates, []
        trials = self._trials = {}
        try:
            for round_index in range(MAX_TRIAL_ROUNDS):  # interleave: a slow period then affects all trees
                if round_index >= MIN_TRIAL_ROUNDS and trial_seconds(trials) > REPEAT_SECONDS:
                    break
                for trial in order:
                    for _ in range(1 if round_index else 2):  # the first run may compile
                        self._next_trial = trial
                        run()
                    if round_index:
                        continue
                    if trial not in trials:
                        break  # no step was timed: max_seq_len is too small for this tree
                    completed.append(trial)
                    too_slow = fastest(trials[trial]) > MAX_SLOWDOWN * fastest(trials[PLAIN_TRIAL])
                    if trial.nodes >= MAX_FLAT_NODES and (too_slow or trial_seconds(trials) > GROW_SECONDS):
                        break
                completed.reverse()  # alternate the order: the previous step affects a step's time
                order = completed
        finally:
            self.acceptance_by_temperature = shared
            self._next_trial = self._running_trial = None
            self._drafts.clear()
        if trials.keys() >= (REQUIRED_TRIALS if self.prunes else {*self.candidates[:2]}):
            self._measured.add(key)
            self._costs[key] = (Costs.from_trials if self.prunes else Costs.of_trees)(trials)

    def describe(self, counts: list[int], sampled: bool) -> str:
        """Describe tree sizes and relative step costs per batch size, in one line."""
        shape = self._default_shape(sampled)
        trees = f"trees of up to {shape.nodes} nodes, sized by the cost model"
        if not self.prunes:
            names = " or ".join(dict.fromkeys(shape.name for shape in self.shapes))
            trees = f"tree {names}, chosen by the cost model"
        if not self._costs:
            return f"{trees} (not timed)"
        size = Size(MAX_FLAT_NODES, 1) if self.prunes else Size(shape.nodes, 0)
        (draft, verify), *more = (self.costs(n, sampled).overhead(size) for n in counts)
        others = (f", {1 + sum(parts):.2f}x for {n} requests" for parts, n in zip(more, counts[1:]))
        return (f"{trees} (measured: a {size.nodes}-node step takes {1 + draft + verify:.2f}x a plain step:"
                f" {draft:+.2f} drafting, {verify:+.2f} verification{''.join(others)})")


NOMINAL_COSTS = Costs(1.0, 1.0, 0.25, (0.25,) * 31)  # fixed: all ranks must choose the same trees


def any_sampled(requests: list[Request]) -> bool:
    """Return whether a request samples."""
    return any(r.sampling.temperature > 0 for r in requests)


# -- scheduler ---------------------------------------------------------------------------------


class Record(NamedTuple):
    """Data of a launched step that the cost model needs when its time and tokens arrive."""

    step: tuple[int, bool, Size, bool]  # (count, sampled, size, head), see `Tuner.add`
    relative_cost: float | None  # see `Tuner.relative_cost`
    expected: list[float] | None  # per slot of the group: sum of exp(score) over its draft tokens


class CostScheduler(Scheduler):
    """Draft with the network if the tuner decides so, else with the headless drafter or not at all."""

    skips_head = True

    def __init__(self, tuner: Tuner | None = None):
        self.tuner = tuner or Tuner()

    def variants(self, drafter: Drafter) -> list[Drafter]:
        trees = [with_tree(drafter, shape) for shape in self.tuner.shapes]
        return [other for other in (*trees, drafter.headless) if other not in (drafter, None)]

    def attach(self, engine: Engine) -> None:
        super().attach(engine)
        runner, drafter = engine.runner, engine.runner.drafter
        self.counts = sorted({engine.batch_sizes[0], engine.batch})  # batch sizes that are timed
        # Compiled steps and drafters that cannot be pruned draft one of `trees` or nothing, never headless.
        headless = drafter.headless if self.tuner.prunes and not runner.on_cuda else None
        self.headless = headless if headless in (None, drafter) else runner.defer_head(copy.copy(headless))
        switched = drafter.network is not None or not self.tuner.prunes
        shapes = self.tuner.shapes if switched else ()
        self.trees = {shape: with_tree(drafter, shape) for shape in shapes}

    @property
    def drafters(self) -> list[Drafter]:
        return [*self.trees.values()]

    def add(self, request: Request) -> None:
        self.tuner.start(request)

    def next(self, requests: list[Request], group: SlotRange) -> Choice:
        tuner, runner = self.tuner, self.runner
        choose = tuner.next if self.trees else tuner.start_next_trial
        plan = choose(requests, group.count)
        if plan and self.trees:
            return Choice(self.trees[plan.shape], plan.costs, True)
        if self.headless is None or (tuner.in_trial and not plan):
            return Choice(runner.plain)
        costs = plan.costs if plan else tuner.headless_costs(requests, group.count, self.headless.shape)
        return Choice(self.headless, costs)

    def launched(self, choice: Choice, group: SlotRange, tree: Tree, sampled: bool) -> Record:
        size, expected = Size(tree.tokens.shape[1], 0), None
        if choice.costs:
            size = size._replace(levels=tree.levels if choice.head else 0)
            expected = [sum(map(math.exp, path[1:])) for path in tree.scores.tolist()]
        elif choice.head:  # do not synchronize with the GPU to read the scores
            expected = [mean_accepted(size.nodes)] * group.count
        step = group.count, sampled, size, choice.head
        return Record(step, self.tuner.relative_cost(*step), expected)

    def timed(self, record: Record, seconds: float) -> None:
        self.tuner.add(*record.step, seconds)

    def emitted(self, record: Record, index: int, request: Request, count: int) -> None:
        expected = record.expected and record.expected[index]
        self.tuner.record(request, record.step[-1], count, record.relative_cost, expected)

    def warm_up(self, engine: Engine, sampling: Sampling) -> None:
        long, lag = replace(sampling, max_new_tokens=engine.max_seq_len), engine.lag

        def run(count: int) -> None:
            while engine.batch - engine.free < count:
                engine.admit([0], long)
            engine.finish_prompts()
            engine.step()

        engine.lag = 0
        try:
            if self.tuner.assumed_costs is None:
                for count in self.counts:
                    self.tuner.run_trials(count, sampling.temperature > 0, lambda count=count: run(count))
        finally:
            engine.lag = lag
            for request in [*filter(None, engine.slots.requests)]:
                engine.remove(request)
            return_freed_memory()  # logits of trees that no later step has

    def describe(self, sampled: bool) -> str:
        return self.tuner.describe(self.counts, sampled)


def with_tree(drafter: Drafter, shape: TreeShape) -> Drafter:
    """Return the drafter with another tree shape, or itself if its tree is not resizable."""
    return drafter.with_tree(shape) if drafter.resizable_part and drafter.shape != shape else drafter


def fits(shape: TreeShape, grown: Drafter, default: TreeShape) -> bool:
    """Return whether a drafter can grow `shape`, and `shape` has another size than its default tree."""
    levels = math.inf if grown.max_levels is None else grown.max_levels
    return shape.nodes != default.nodes and shape.width <= grown.vocabulary and shape.depth < levels


def schedule(
    drafter: Drafter, target: Transformer, tree: object, compiles: bool
) -> tuple[Drafter, Scheduler | None]:
    """Return the drafter with its largest tree, and its scheduler (None: always draft the drafter's tree).

    tree: the value of --tree. The cost model sizes trees if it is "auto", or if it is None and steps run
    uncompiled on a CPU. compiles: steps are compiled. Raises InputError for "auto" with several ranks: their
    timings, and so their trees, would differ.
    """
    on_cuda = target.embed.device.type == "cuda"
    fixed_trees = on_cuda or compiles
    if target.ranks is not None:
        if tree == "auto":
            raise InputError("--tree auto: not supported with several ranks yet; use --tree T,D,K")
        if fixed_trees or not drafter.prunable or drafter.network is not None:
            return drafter, None
        shapes = drafter.shape, drafter.shape
        return drafter, CostScheduler(Tuner(shapes, costs=NOMINAL_COSTS))
    grown, fixed = drafter.resizable_part, (drafter.shape, drafter.shape)
    if fixed_trees:
        if tree != "auto" or grown is None:
            return drafter, None
        others = [shape for shape in CAPTURED_TREES if on_cuda and fits(shape, grown, drafter.shape)]
        return drafter, CostScheduler(Tuner((drafter.shape, *others), prunes=False))
    if tree not in (None, "auto"):
        return drafter, None
    if grown is None:
        return drafter, CostScheduler(Tuner(fixed, prunes=drafter.prunable))
    levels = grown.max_trees[0].depth if grown.max_levels is None else grown.max_levels - 1
    if grown.vocabulary < grown.max_trees[0].width or levels < 2:
        return drafter, None
    shapes = tuple(replace(shape, depth=min(shape.depth, levels)) for shape in grown.max_trees)
    return with_tree(drafter, shapes[0]), CostScheduler(Tuner(shapes))
