"""The scheduler chooses plain steps or trees by measured cost and acceptance."""
import random

import pytest
import torch

from engine.request import Request
from engine.sampling import Sampling
from schedulers import cost_model
from schedulers.acceptance import REQUEST_DECAY, Acceptance
from schedulers.cost_model import MAX_TREES, MIN_PROBE_INTERVAL, TRIALS, Costs, Size, TreePlan, Tuner
from tree import TreeShape


class Machine:
    """Simulates decoding of one request. A plain step takes `plain` milliseconds; drafting adds `head`, and
    more per level and per node. A top-1 draft token is accepted with its own probability times `acceptance`.
    """

    def __init__(self, tuner: Tuner, temperature: float = 0.0, **milliseconds):
        self.tuner, self.rng, self.sampled = tuner, random.Random(0), temperature > 0
        self.request = Request([1] * 20, Sampling(temperature=temperature))
        self.tuner.start(self.request)
        self.milliseconds = {"plain": 10.0, "head": 1.0, "level": 0.5, "node": 0.3} | milliseconds
        self.acceptance = 1.0

    def drafted(self, plan: TreePlan, probability: float) -> tuple[Size, list[float]]:
        """Return the size of the tree and the probabilities along its first path. Each best child has the
        same probability given its parent.
        """
        (shape, costs), k = plan, plan.shape.width
        scores = [torch.tensor([[probability, *((1 - probability) / 9 for _ in range(k - 1))]]).log()]
        while len(scores) <= shape.depth and costs.expand(scores[-1], k):
            scores.append(scores[-1][..., :1] + scores[0])
        count = costs.keep(torch.cat(scores, 1))
        best = sorted(((s, not n) for row in scores for n, s in enumerate(row[0].tolist())), reverse=True)
        return Size(count + 1, len(scores) - 1), [probability] * sum(first for _, first in best[:count])

    def step(self) -> Size | None:
        """Run one step. Returns the size of its tree; None for a plain step."""
        plan = self.tuner.next([self.request], 1)
        ms, emitted, probability = self.milliseconds, 1, self.rng.choice((0.4, 0.95))
        size, path = self.drafted(plan, probability) if plan else (Size(1, 0), [])
        for probability in path:
            if self.rng.random() > self.acceptance * probability:
                break
            emitted += 1
        total = ms["plain"] + (size.nodes - 1) * ms["node"]
        if plan:
            total += ms["head"] + size.levels * ms["level"]
        step = 1, self.sampled, size, plan is not None
        relative_cost = self.tuner.relative_cost(*step)
        self.tuner.add(*step, total / 1000 * self.rng.uniform(0.95, 1.05))
        expected = plan and sum(p ** (i + 1) for i, p in enumerate(path))
        self.tuner.record(self.request, plan is not None, emitted, relative_cost, expected)
        self.request.ids += [0] * emitted
        return plan and size

    def run(self, steps: int) -> list[Size | None]:
        return [self.step() for _ in range(steps)]


def timed_machine(temperature: float = 0.0, **milliseconds) -> Machine:
    """Return a machine whose tuner has run all trials."""
    machine = Machine(Tuner(), temperature, **milliseconds)
    machine.tuner.run_trials(1, temperature > 0, machine.step)
    machine.tuner.start(machine.request)
    return machine


SLOW = {"head": 9.0, "level": 5.0, "node": 5.0}  # drafting increases latency


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("phases", [
    # (step costs, acceptance, steps, last, drafts): of the `last` steps most are drafted, or most are plain.
    [({}, 1.0, 200, 190, True)], [(SLOW, 1.0, 200, 180, False)], [({}, 0.0, 100, 40, False)],
    [({}, 0.0, 80, 20, False), ({}, 1.0, 8 * MIN_PROBE_INTERVAL, 20, True)],  # acceptance rises
    # Load makes drafting slower than plain steps, then ends.
    [({}, 1.0, 60, 50, True), (SLOW, 1.0, 300, 80, False), ({}, 1.0, 60 * MIN_PROBE_INTERVAL, 40, True)],
], ids=("fast", "slow", "rejected", "rising acceptance", "changing load"))
def test_faster_type_of_step_is_chosen(phases, temperature):
    machine = timed_machine(temperature, **phases[0][0])
    default = Machine(machine.tuner).milliseconds
    for milliseconds, machine.acceptance, steps, last, drafts in phases:
        machine.milliseconds = default | milliseconds
        sizes = machine.run(steps)[-last:]
        assert sum((size is not None) == drafts for size in sizes) > 0.7 * last


def test_tree_size_follows_cost_and_acceptance():
    """Trees are larger if nodes or levels are cheaper, or acceptance or scores higher."""
    def mean(field: int, **milliseconds) -> float:
        sizes = [size for size in timed_machine(**milliseconds).run(300) if size]
        return sum(size[field] for size in sizes) / len(sizes)

    low_cost, default_cost, high_cost = (mean(0, node=x) for x in (0.05, 0.3, 1.5))
    assert low_cost > default_cost + 1 > high_cost + 1.5
    assert mean(1) > mean(1, level=2.0) + 1
    costs = timed_machine().tuner.costs(1, False)
    low, high = (costs.marginal(1.5, MAX_TREES[0], [confidence]) for confidence in (0.3, 1.0))
    scores = torch.tensor([[0.5, 0.2, 0.1, 0.04]]).log()
    assert low.keep(scores) < high.keep(scores) and low.expand(scores, 4) < high.expand(scores, 4)
    assert high.keep(scores - 2) < high.keep(scores)


def test_rejected_drafts_reduce_drafting():
    """Within a request and in the next one, which still starts with a few drafts. Statistics are separate per
    temperature.
    """
    first = timed_machine(1.0)
    first.acceptance = 0.0
    drafted = [steps - first.run(steps).count(None) for steps in (30, 70, 500, 500, 500)]
    assert drafted[0] < 30 and 12 >= drafted[2] >= drafted[-1]
    second = Machine(first.tuner, 1.0)
    second.acceptance = 0.0
    assert 96 - second.run(96).count(None) <= 4
    accepting, colder = Machine(first.tuner, 1.0), Machine(first.tuner, 0.3)
    assert accepting.run(30).count(None) < 10
    assert colder.request.acceptance.confidence.value == 1.0
    assert accepting.request.acceptance.confidence.value < 2.0


def test_probes_of_expensive_drafts_lose_at_most_one_and_a_half_percent():
    """Over 40 requests of 100 steps, once acceptance is known. A cheap draft is probed in most requests."""
    for head, max_loss in ((35.0, 0.015 * 4000), (1.0, 0.1 * 4000)):
        machine, lost, probed = timed_machine(head=head), 0.0, 0
        machine.acceptance = 0.0
        machine.run(60)
        for _ in range(40):
            machine = Machine(machine.tuner, head=head)
            machine.acceptance = 0.0
            sizes = [size for size in machine.run(100) if size]
            lost += sum(head + 0.5 * size.levels + 0.3 * (size.nodes - 1) for size in sizes) / 10
            probed += bool(sizes)
        assert 0 < lost < max_loss and (head > 9 or probed > 15), (head, lost, probed)


def test_costs_follow_measured_steps():
    """After trials; when all steps, or only nodes, become slower; with single outliers."""
    def measured(size: Size, node_factor: float = 1.0) -> float:
        return 11 + 0.5 * size.levels + node_factor * 0.3 * (size.nodes - 1)

    trial_sizes = {trial: Size(trial.nodes, 7 * trial.deep) for trial in TRIALS[1:]}
    trials = {trial: [(size, measured(size))] for trial, size in trial_sizes.items()}
    costs = Costs.from_trials(trials | {cost_model.PLAIN_TRIAL: [(Size(1, 0), 10.0)]})
    sizes = [Size(n, n // 3) for n in range(1, 12)] * 40
    assert [costs.seconds(size, True) for size in sizes] == pytest.approx([*map(measured, sizes)])
    assert costs.seconds(Size(40, 2), True) == pytest.approx(measured(Size(40, 2)))  # larger than any trial
    for factor, node_factor in ((2.0, 1.0), (1.0, 3.0)):
        for i, size in enumerate(sizes):
            costs.add(size, True, factor * measured(size, node_factor) * (20 if i % 80 == 7 else 1))
        expected = [factor * measured(size, node_factor) for size in sizes]
        assert [costs.seconds(size, True) for size in sizes] == pytest.approx(expected, rel=0.12)
    plain = costs.seconds(Size(1, 0), False)
    for _ in range(60):
        costs.add(Size(1, 0), False, 1.3 * plain)
    assert costs.seconds(Size(1, 0), False) == pytest.approx(1.3 * plain, rel=0.01)


def test_costs_of_other_batch_sizes():
    """Costs are interpolated between measured batch sizes and extrapolated beyond."""
    tuner = Tuner()
    for count in (2, 6):
        size = Size(cost_model.MAX_FLAT_NODES, 1)
        tuner._costs[count, False] = Costs(10.0 * count, 12.0 * count, 1.0 * count, [0.5 * count] * 31)
        tuner._measured.add((count, False))
    for count, sampled in ((4, False), (4, True)):
        assert tuner.costs(count, sampled).seconds(size, True) == pytest.approx(15.0 * count)
    more = tuner.costs(12, False)
    assert [more.seconds(s, True) for s in (Size(1, 0), size)] == pytest.approx([72, 72 + 6 + 24])


def test_interpolated_costs_are_measured_once():
    """Sampled steps may run before they are timed, as in warmup. No trial runs twice."""
    machine, sizes = Machine(Tuner(), 1.0), []
    machine.tuner.run_trials(1, False, Machine(machine.tuner).step)
    machine.run(2)
    machine.tuner.run_trials(1, True, lambda: sizes.append(machine.step()))
    steps = len(sizes)
    machine.tuner.run_trials(1, True, lambda: sizes.append(machine.step()))
    assert len(sizes) == steps > len(TRIALS)


def test_node_costs_of_a_batch():
    """With two requests a node costs twice as many tokens; idle slots have confidence 0."""
    tuner = timed_machine().tuner
    requests = [Request([1] * 20, Sampling()) for _ in range(2)]
    for slot, request in enumerate(requests):
        request.slot = slot
        tuner.start(request)
    tuner._costs[3, False] = tuner.costs(1, False)
    two, one = (tuner.next(batch, 3).costs for batch in (requests, requests[:1]))
    assert two.nodes[:30].tolist() == pytest.approx((2 * one.nodes[:30]).tolist())
    assert one.confidence[0] > 0 and one.confidence.tolist()[1:] == [0, 0] and two.confidence[2] == 0


def test_trials_stop_at_the_first_tree_that_is_too_slow():
    sizes = []
    machine = Machine(Tuner(), node=3.0)
    machine.tuner.run_trials(1, False, lambda: sizes.append(machine.step()))
    largest = next(trial for trial in TRIALS if 10 + 3.0 * trial.nodes > cost_model.MAX_SLOWDOWN * 10)
    assert max(size.nodes for size in sizes if size) == largest.nodes <= cost_model.MAX_FLAT_NODES + 3
    rounds, remainder = divmod(len(sizes), TRIALS.index(largest) + 1)
    assert not remainder and rounds > cost_model.MIN_TRIAL_ROUNDS


def test_compiled_tree_of_fixed_size():
    """The tree has a fixed size, and the step gets no node costs."""
    shape = MAX_TREES[1]
    tuner, request = Tuner((shape, shape), prunes=False), Request([1] * 20, Sampling())
    plans = []

    def step(emitted: int = 1) -> None:
        plan = tuner.next([request], 1)
        plans.append(plan)
        size = Size(shape.nodes, shape.depth) if plan else Size(1, 0)
        record = 1, False, size, plan is not None
        relative_cost = tuner.relative_cost(*record)
        tuner.add(*record, 15.0 if plan else 10.0)
        tuner.record(request, plan is not None, emitted if plan else 1, relative_cost, None)

    tuner.start(request)
    tuner.run_trials(1, False, step)
    assert {*plans} == {None, TreePlan(shape)}
    assert "tree 32/3/4, chosen by the cost model" in tuner.describe([1], False)
    for emitted, drafts in ((3, True), (1, False)):
        for _ in range(100):
            step(emitted)
        assert (plans[-1] is not None) == drafts


@pytest.mark.parametrize("times, expected_trees", (
    ({0: 10, 8: 11.4, 16: 12.3, 60: 13.9}, (60, 16, 0)),  # an H200: nodes are almost free
    ({0: 10, 8: 12, 16: 15, 60: 40}, (8, 8, 0)),  # a small card
))
def test_captured_trees_are_chosen_by_time_and_acceptance(times, expected_trees):
    """The gain of other trees is predicted from the current tree's; the choice may also be not to draft."""
    shapes = TreeShape(16, 4, 5), TreeShape(8, 2, 4), TreeShape(60, 7, 10)
    tuner, request = Tuner(shapes, prunes=False), Request([1] * 20, Sampling())
    chosen = []

    def step(acceptance: float = 1.0) -> None:
        plan = tuner.next([request], 1)
        nodes = plan.shape.nodes if plan else 0
        chosen.append(nodes)
        record = 1, False, Size(nodes or 1, 0), plan is not None
        expected = cost_model.mean_accepted(nodes) if plan else None
        tuner.add(*record, times[nodes] / 1000)
        emitted = 1 + acceptance * (expected or 0.0)
        tuner.record(request, plan is not None, emitted, tuner.relative_cost(*record), expected)

    tuner.start(request)
    tuner.run_trials(1, False, step)
    assert {*chosen} == times.keys()
    for acceptance, tree in zip((1.0, 0.3, 0.05), expected_trees):
        for _ in range(150):
            step(acceptance)
        assert sorted(chosen[-40:])[20] == tree


@pytest.mark.parametrize("head", (False, True))
def test_confidence_recovers_without_drafts(head):
    """While nothing is drafted, confidence returns to 1, so that drafting is tried again."""
    acceptance = Acceptance(0.7, 1.0, 0.2, decay=REQUEST_DECAY)
    for _ in range(3000):
        acceptance.record(head, 1, 1.0, 0.0 if head else None)
    assert acceptance.confidence.value == pytest.approx(1, abs=0.01)
    assert acceptance.with_head.value == pytest.approx(1.0 if head else 0.7)
