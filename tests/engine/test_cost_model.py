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
    more per level and per node. The top-1 draft token is accepted with its own probability times `ease`.
    """

    def __init__(self, tuner: Tuner, temperature: float = 0.0, **seconds):
        self.tuner, self.draw, self.sampled = tuner, random.Random(0), temperature > 0
        self.request = Request([1] * 20, Sampling(temperature=temperature))
        self.tuner.start(self.request)
        self.seconds = {"plain": 10.0, "head": 1.0, "level": 0.5, "node": 0.3} | seconds
        self.ease = 1.0

    def drafted(self, choice: TreePlan, chance: float) -> tuple[Size, list[float]]:
        """Return the size of the tree and the probabilities along its first path, where each best child has
        this one.
        """
        (shape, costs), k = choice, choice.shape.width
        scores = [torch.tensor([[chance, *((1 - chance) / 9 for _ in range(k - 1))]]).log()]
        while len(scores) <= shape.depth and costs.expand(scores[-1], k):
            scores.append(scores[-1][..., :1] + scores[0])
        kept = costs.keep(torch.cat(scores, 1))
        best = sorted(((s, not n) for row in scores for n, s in enumerate(row[0].tolist())), reverse=True)
        return Size(kept + 1, len(scores) - 1), [chance] * sum(first for _, first in best[:kept])

    def step(self) -> Size | None:
        """Run one step; return the size of its tree."""
        choice = self.tuner.next([self.request], 1)
        s, emitted, chance = self.seconds, 1, self.draw.choice((0.4, 0.95))
        size, path = self.drafted(choice, chance) if choice else (Size(1, 0), [])
        for chance in path:
            if self.draw.random() > self.ease * chance:
                break
            emitted += 1
        seconds = s["plain"] + (size.nodes - 1) * s["node"]
        if choice:
            seconds += s["head"] + size.levels * s["level"]
        of = 1, self.sampled, size, choice is not None
        relative_cost = self.tuner.relative_cost(*of)
        self.tuner.add(*of, seconds / 1000 * self.draw.uniform(0.95, 1.05))
        expected = choice and sum(chance ** (i + 1) for i, chance in enumerate(path))
        self.tuner.record(self.request, choice is not None, emitted, relative_cost, expected)
        self.request.ids += [0] * emitted
        return choice and size

    def run(self, steps: int) -> list[Size | None]:
        return [self.step() for _ in range(steps)]


def rehearsed(temperature: float = 0.0, **seconds) -> Machine:
    """Return a machine on which each kind of step has been timed."""
    machine = Machine(Tuner(), temperature, **seconds)
    machine.tuner.run_trials(1, temperature > 0, machine.step)
    machine.tuner.start(machine.request)
    return machine


SLOW = {"head": 9.0, "level": 5.0, "node": 5.0}  # drafting increases latency


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("phases", [
    # Seconds of a step's parts, ease of the text, steps; of how many at the end most are drafted, or not.
    [({}, 1.0, 200, 190, True)], [(SLOW, 1.0, 200, 180, False)], [({}, 0.0, 100, 40, False)],
    [({}, 0.0, 80, 20, False), ({}, 1.0, 8 * MIN_PROBE_INTERVAL, 20, True)],  # a hard text that becomes easy
    # Other work makes drafting slower than plain steps, and later no longer.
    [({}, 1.0, 60, 50, True), (SLOW, 1.0, 300, 80, False), ({}, 1.0, 60 * MIN_PROBE_INTERVAL, 40, True)],
], ids=("pays", "slow", "never", "hard", "slower"))
def test_faster_kind_of_step_is_chosen(phases, temperature):
    machine = rehearsed(temperature, **phases[0][0])
    usual = Machine(machine.tuner).seconds
    for seconds, machine.ease, steps, last, drafts in phases:
        machine.seconds = usual | seconds
        taken = machine.run(steps)[-last:]
        assert sum((size is not None) == drafts for size in taken) > 0.7 * last


def test_tree_size_follows_cost_and_acceptance():
    """Larger if nodes and levels are cheaper, the text is easier, or the draft is more confident."""
    def mean(at: int, **seconds) -> float:
        sizes = [size for size in rehearsed(**seconds).run(300) if size]
        return sum(size[at] for size in sizes) / len(sizes)

    cheap, usual, high = (mean(0, node=x) for x in (0.05, 0.3, 1.5))
    assert cheap > usual + 1 > high + 1.5
    assert mean(1) > mean(1, level=2.0) + 1
    costs = rehearsed().tuner.costs(1, False)
    hard, easy = (costs.marginal(1.5, MAX_TREES[0], [confidence]) for confidence in (0.3, 1.0))
    scores = torch.tensor([[0.5, 0.2, 0.1, 0.04]]).log()
    assert hard.keep(scores) < easy.keep(scores) and hard.expand(scores, 4) < easy.expand(scores, 4)
    assert easy.keep(scores - 2) < easy.keep(scores)


def test_rejected_drafts_back_off():
    """Within a request and in the next one, which still starts with a few drafts if it is easy. Estimates are
    separate per temperature.
    """
    hard = rehearsed(1.0)
    hard.ease = 0.0
    tried = [steps - hard.run(steps).count(None) for steps in (30, 70, 500, 500, 500)]
    assert tried[0] < 30 and 12 >= tried[2] >= tried[-1]
    another = Machine(hard.tuner, 1.0)
    another.ease = 0.0
    assert 96 - another.run(96).count(None) <= 4  # it is remembered
    easy, cold = Machine(hard.tuner, 1.0), Machine(hard.tuner, 0.3)
    assert easy.run(30).count(None) < 10
    assert cold.request.acceptance.confidence.value == 1.0 > easy.request.acceptance.confidence.value - 1


def test_probes_of_expensive_drafts_lose_one_percent():
    """Over many short requests, once acceptance is known. A cheap draft is probed in each request."""
    for head, most in ((35.0, 0.015 * 4000), (1.0, 0.1 * 4000)):
        machine, lost, tried = rehearsed(head=head), 0.0, 0
        machine.ease = 0.0
        machine.run(60)
        for _ in range(40):
            machine = Machine(machine.tuner, head=head)
            machine.ease = 0.0
            sizes = [size for size in machine.run(100) if size]
            lost += sum(head + 0.5 * size.levels + 0.3 * (size.nodes - 1) for size in sizes) / 10
            tried += bool(sizes)
        assert 0 < lost < most and (head > 9 or tried > 15), (head, lost, tried)


def test_costs_follow_measured_steps():
    """As measured in trials; when all steps, or only nodes, become slower; with single outliers."""
    def took(size: Size, nodes: float = 1.0) -> float:
        return 11 + 0.5 * size.levels + nodes * 0.3 * (size.nodes - 1)

    sizes = {kind: Size(kind.nodes, 7 * kind.deep) for kind in TRIALS[1:]}
    trials = {kind: [(size, took(size))] for kind, size in sizes.items()}
    costs = Costs.from_trials(trials | {cost_model.PLAIN_TRIAL: [(Size(1, 0), 10.0)]})
    some = [Size(n, n // 3) for n in range(1, 12)] * 40
    assert [costs.seconds(size, True) for size in some] == pytest.approx([*map(took, some)])
    assert costs.seconds(Size(40, 2), True) == pytest.approx(took(Size(40, 2)))  # larger than any trial
    for slower, nodes in ((2.0, 1.0), (1.0, 3.0)):
        for i, size in enumerate(some):
            costs.add(size, True, slower * took(size, nodes) * (20 if i % 80 == 7 else 1))
        expected = [slower * took(size, nodes) for size in some]
        assert [costs.seconds(size, True) for size in some] == pytest.approx(expected, rel=0.12)
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


def test_estimated_costs_are_measured_later():
    """A sampled step may run before its kind is timed, as in warm-up. Nothing is timed twice."""
    machine, ran = Machine(Tuner(), 1.0), []
    machine.tuner.run_trials(1, False, Machine(machine.tuner).step)
    machine.run(2)
    machine.tuner.run_trials(1, True, lambda: ran.append(machine.step()))
    steps = len(ran)
    machine.tuner.run_trials(1, True, lambda: ran.append(machine.step()))
    assert len(ran) == steps > len(TRIALS)


def test_node_costs_of_a_batch():
    """With two requests a node costs twice as much; one that is frozen costs nothing."""
    tuner = rehearsed().tuner
    requests = [Request([1] * 20, Sampling()) for _ in range(2)]
    for slot, request in enumerate(requests):
        request.slot = slot
        tuner.start(request)
    tuner._costs[3, False] = tuner.costs(1, False)
    both, one = (tuner.next(some, 3).costs for some in (requests, requests[:1]))
    assert both.nodes[:30].tolist() == pytest.approx((2 * one.nodes[:30]).tolist())
    assert one.confidence[0] > 0 and one.confidence.tolist()[1:] == [0, 0] and both.confidence[2] == 0


def test_large_trees_that_cannot_pay_are_not_tried():
    ran = []
    machine = Machine(Tuner(), node=3.0)
    machine.tuner.run_trials(1, False, lambda: ran.append(machine.step()))
    largest = next(kind for kind in TRIALS if 10 + 3.0 * kind.nodes > cost_model.MAX_SLOWDOWN * 10)
    assert max(size.nodes for size in ran if size) == largest.nodes <= cost_model.MAX_FLAT_NODES + 3
    turns, more = divmod(len(ran), TRIALS.index(largest) + 1)
    assert not more and turns > cost_model.MIN_TRIAL_ROUNDS


def test_compiled_tree_of_fixed_size():
    """The tree has a fixed size, and the step gets no node costs."""
    shape = MAX_TREES[1]
    tuner, request = Tuner((shape, shape), prunes=False), Request([1] * 20, Sampling())
    kinds = []

    def step(emitted: int = 1) -> None:
        choice = tuner.next([request], 1)
        kinds.append(choice)
        of = 1, False, Size(shape.nodes if choice else 1, shape.depth if choice else 0), choice is not None
        relative_cost = tuner.relative_cost(*of)
        tuner.add(*of, 15.0 if choice else 10.0)
        tuner.record(request, choice is not None, emitted if choice else 1, relative_cost, None)

    tuner.start(request)
    tuner.run_trials(1, False, step)
    assert {*kinds} == {None, TreePlan(shape)}
    assert "tree 32/3/4, chosen by the cost model" in tuner.describe([1], False)
    for emitted, drafts in ((3, True), (1, False)):
        for _ in range(100):
            step(emitted)
        assert (kinds[-1] is not None) == drafts


@pytest.mark.parametrize("times, expected_trees", (
    ({0: 10, 8: 11.4, 16: 12.3, 60: 13.9}, (60, 16, 0)),  # an H200: nodes are almost free
    ({0: 10, 8: 12, 16: 15, 60: 40}, (8, 8, 0)),  # a small card
))
def test_captured_trees_are_chosen_by_time_and_acceptance(times, expected_trees):
    """The gain of other trees is predicted from that of the one in use; the choice may also be not to draft.
    """
    shapes = TreeShape(16, 4, 5), TreeShape(8, 2, 4), TreeShape(60, 7, 10)
    tuner, request = Tuner(shapes, prunes=False), Request([1] * 20, Sampling())
    chosen = []

    def step(acceptance: float = 1.0) -> None:
        plan = tuner.next([request], 1)
        nodes = plan.shape.nodes if plan else 0
        chosen.append(nodes)
        of = 1, False, Size(nodes or 1, 0), plan is not None
        expected = cost_model.mean_accepted(nodes) if plan else None
        tuner.add(*of, times[nodes] / 1000)
        emitted = 1 + acceptance * (expected or 0.0)
        tuner.record(request, plan is not None, emitted, tuner.relative_cost(*of), expected)

    tuner.start(request)
    tuner.run_trials(1, False, step)
    assert {*chosen} == times.keys()
    for acceptance, tree in zip((1.0, 0.3, 0.05), expected_trees):
        for _ in range(150):
            step(acceptance)
        assert sorted(chosen[-40:])[20] == tree


@pytest.mark.parametrize("head", (False, True))
def test_confidence_recovers_without_drafts(head):
    """While nothing is drafted, confidence recovers, so that drafting is tried again; acceptance estimates
    are kept.
    """
    acceptance = Acceptance(0.7, 1.0, 0.2, decay=REQUEST_DECAY)
    for _ in range(3000):
        acceptance.record(head, 1, 1.0, 0.0 if head else None)
    assert acceptance.confidence.value == pytest.approx(1, abs=0.01)
    assert acceptance.with_head.value == pytest.approx(1.0 if head else 0.7)
