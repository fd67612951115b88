"""Trees by what they cost: costs are measured once, the best plan is made, steps switch as texts change."""
import itertools
import json
from collections import Counter

import pytest
import torch
from helpers.refusals import refused

from checkpoint.loading import load_head, load_model
from drafters.eagle import Eagle
from drafters.lookup import Lookup
from drafters.mixed import Mixed
from engine import body
from engine import costs as costing
from engine.calibration import LONG, SHORT, TEMPERATURES, Calibration, Far
from engine.costs import Costs, between, measured_once
from engine.decoder import REHEARSAL, Decoder
from engine.run import Run
from engine.switching import CHECK, FIRST_REST, FRESH, LOOK, LOOK_PLAIN, PROBE, Switch
from engine.tuning import Plan, make_plan
from kernels.choose import choose_backend
from sampling.options import Sampling
from tree import TreeShape

SMALL, LARGE = TreeShape(4, 1, 2), TreeShape(60, 7, 10)
UNREAD = 64  # room for unread tokens, that texts of these lengths fill
PROMPT = list(b"u:tell me\na:")


def known(small=1.8, large=3.0, ease=(0.8, 1.0, 1.2)) -> Calibration:
    return Calibration({t: {SMALL: small, LARGE: large} for t in TEMPERATURES}, ease)


def flat(row=0.0001, first=0.010, level=0.001) -> Costs:
    """Passes that cost `first` and `row` for every further row, at any context."""
    verify = {n: {rows: first + row * (rows - 1) for rows in (1, 8, 64)} for n in (SHORT, LONG)}
    head = {n: {1: level, 10: level} for n in (SHORT, LONG)}
    return Costs(verify, head, head)


def test_between():
    assert [between({4: 1.0, 8: 3.0}, n) for n in (4, 5, 8, 12)] == [1.0, 1.5, 3.0, 5.0]
    assert between({4: 1.0, 8: 3.0}, 1) == 1.0 and between({4: 2.0}, 9) == 2.0


def test_the_cost_of_a_step():
    costs = flat()
    assert costs.step(None, SHORT) == pytest.approx(0.010)
    assert costs.step(SMALL, 1000) == pytest.approx(0.010 + 3 * 0.0001 + 2 * 0.001)
    assert costs.step(SMALL, SHORT, batch=4) == pytest.approx(0.010 + 15 * 0.0001 + 2 * 0.001)
    free = {SHORT: {1: 0.0, 2: 0.0}}
    long = Costs({SHORT: {1: 1.0, 2: 1.0}, LONG: {1: 3.0, 2: 3.0}}, free, free)
    assert long.step(None, (SHORT + LONG) // 2) == pytest.approx(2.0)


def test_another_text_costs_the_reading_of_its_keys_and_values():
    plain = flat()
    beside = Costs(plain.verify, plain.read, plain.level, {SHORT: {8: plain.verify[SHORT][8] + 7 * 0.002}})
    for context, more in ((SHORT, 0.002), (2 * SHORT, 0.004)):
        for shape in (None, SMALL):
            assert beside.step(shape, context) == plain.step(shape, context)
            added = beside.step(shape, context, 5) - plain.step(shape, context, 5)
            assert added == pytest.approx(4 * more)
    faster = Costs(plain.verify, plain.read, plain.level, {SHORT: {8: 0.001}})  # a moody machine
    assert faster.step(None, SHORT, 5) == plain.step(None, SHORT, 5)


@pytest.mark.parametrize("batch, tree", ((1, "8/2/4"), (2, "4/1/2"), (3, "2/0/1"), (4, "2/0/1"), (16, None)))
def test_trees_by_the_number_of_texts(batch, tree):
    """Eight rows cost what one costs; each further row costs a tenth of that."""
    taus = {TreeShape(8, 2, 4): 2.4, TreeShape(4, 1, 2): 2.1, TreeShape(2, 0, 1): 1.6}
    verify = {SHORT: {1: 0.010, 8: 0.010, 9: 0.011, 64: 0.066}}
    head = {SHORT: {1: 0.0005, 4: 0.0005}}
    costs = Costs(verify, head, head, {SHORT: {8: 0.010 + 7 * 0.0002}})
    plan = make_plan(Calibration(dict.fromkeys(TEMPERATURES, taus), (1.0,)), costs, batch, 300, 320)
    assert [shape.name for shape in plan.trees[False][:1]] == ([tree] if tree else [])
    speeds = {shape: plan.speed(shape, 0.0, SHORT) for shape in (None, *taus)}
    assert max(speeds, key=speeds.get) == (plan.trees[False] or (None,))[0]


def test_cheap_rows_want_the_large_tree_and_dear_ones_the_small_one_or_none():
    assert make_plan(known(), flat(row=1e-6), 1, 4096, 320).trees[False][0] == LARGE
    assert make_plan(known(), flat(row=0.001), 1, 4096, 320).trees[False] == (SMALL,)
    plan = make_plan(known(), flat(row=0.01), 1, 4096, 320)
    assert plan.trees == {False: (), True: ()} and not plan.shapes and "plain decoding" in str(plan)
    assert make_plan(known(), flat(row=1e-6), 1, 4096, widest=4).shapes == (SMALL,)
    assert "tree 4/1/2 (1.80 tokens a step" in str(make_plan(known(), flat(row=0.001), 1, 4096, 320))


class Same(Costs):
    """However many texts: a step with a tree takes 1.65 plain ones."""

    def step(self, shape, context, batch=1, reads=0):
        return 1.0 if shape is None else 1.65


def test_what_texts_have_in_common_differs_less_than_they_do():
    """A tree that pays for every fourth text is kept for one at a time, not for sixteen together."""
    calibration = Calibration({t: {SMALL: 1.6} for t in TEMPERATURES}, (0.6, 0.8, 1.0, 1.2, 1.4))
    plans = {batch: make_plan(calibration, Same({}, {}, {}), batch, SHORT, 320) for batch in (1, 16)}
    assert plans[1].trees[False] == (SMALL,) and plans[16].trees[False] == ()


def test_two_trees_where_texts_differ():
    plan = make_plan(known(2.2, 7.0, ease=(0.3, 0.4, 1.5, 1.6)), flat(row=0.0003), 1, 4096, 320)
    assert set(plan.trees[False]) == {SMALL, LARGE}


def switch(small=1.8, large=3.0, **costs) -> Switch:
    return Switch(Plan(known(small, large), flat(**costs), 1, {False: (SMALL,), True: (SMALL, LARGE)}))


def test_a_hard_text_is_decoded_plainly_and_tried_again_ever_less_often():
    s = switch(row=0.001)
    s.begin([0.0])
    taken = []
    for _ in range(1200):
        shape = s.next(100)
        s.record(shape, 100, [1])
        taken.append(shape)
    assert taken[0] == SMALL and None in taken[:20]
    drafted = [i for i, shape in enumerate(taken) if shape][taken.index(None) :]
    probes = [i for i in drafted if i - 1 not in drafted]
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert len(drafted) == PROBE * len(probes) and gaps == sorted(gaps) and gaps[-1] > 4 * FIRST_REST


def test_a_text_that_turns_easy_is_drafted_again():
    s = switch(row=0.001)
    s.begin([0.0])
    for _ in range(60):
        s.record(s.next(100), 100, [1])
    for _ in range(2 * FIRST_REST):
        shape = s.next(100)
        s.record(shape, 100, [3 if shape else 1])
    assert shape == SMALL and s.ease > 1


def test_what_a_switch_does_is_forgotten_with_the_text():
    s = switch(row=0.001)
    first = [s.next(100)]
    for _ in range(100):
        s.record(s.next(100), 100, [1])
    s.begin([0.0])
    assert s.next(100) == first[0]
    s.begin([0.0, 1.0])
    assert s.trees == (SMALL, LARGE)


def test_a_text_that_goes_on_keeps_what_was_accepted():
    s = switch(row=0.001)
    for _ in range(100):
        s.record(s.next(100), 100, [1])
    s.begin([0.0], goes_on=True)
    assert s.next(100) is None and s.ease < 0.8
    s.begin([1.0], goes_on=True)  # at another temperature it is another text
    assert s.ease == 1 and s.trees == (SMALL, LARGE)


def test_after_long_texts_less_is_expected():
    usual = known(ease=(1.0,))
    calibration = Calibration(usual.taus, usual.ease, Far(2048, {0.0: 0.5, 1.0: 0.25}))
    middle = (SHORT + 2048) // 2
    taus = [calibration.tau(SMALL, 0.0, n) for n in (9, SHORT, middle, 2048, LONG)]
    assert taus == pytest.approx([1.8, 1.8, 1.6, 1.4, 1.4]) and calibration.tau(SMALL, 1.0, 2048) == 1.2
    s = Switch(Plan(calibration, flat(), 1, {False: (SMALL,), True: ()}))
    for _ in range(200):
        s.record(SMALL, 2048, [1, 1, 2, 2, 1])  # 0.4 drafted tokens a step
    assert s.ease == pytest.approx(1.0, abs=0.01)


def take(s: Switch, steps: int, slow: dict) -> list:
    """What a switch takes on an average text, where steps take so many times what is expected of them."""
    taken = []
    for i in range(steps):
        shape = s.next(100)
        s.time(shape, 100, slow.get(shape, 1.0) * s.plan.seconds(shape, 100))
        s.record(shape, 100, [2 if shape and i % 5 else 1])
        taken.append(shape)
    return taken


def test_a_tree_that_is_slower_than_expected_is_left_and_taken_again_when_it_is_not():
    s = switch(row=0.001)
    s.begin([0.0])
    taken = take(s, 100, {SMALL: 2.0})
    assert taken[0] == SMALL and taken.count(None) > 80
    s.begin([0.0])  # the next text does not begin from nothing
    assert take(s, 2 * FIRST_REST + FRESH, {})[-1] == SMALL
    assert take(switch(row=0.001), 100, {SMALL: 2.0, None: 2.0}).count(None) < 10  # all is slow


def test_what_may_be_faster_is_timed_now_and_then():
    s = switch(small=1.8, row=0.0015)  # 1.09 x plain
    s.begin([0.0])
    taken = take(s, 4 * FRESH, {})
    assert 2 * CHECK < taken.count(None) <= 5 * CHECK and taken[-1] == SMALL
    assert take(s, 4 * FRESH, {None: 0.5}).count(None) > 2 * FRESH
    sure = switch(small=1.9, row=0.0001)
    assert None not in take(sure, 4 * FRESH, {})


def test_what_was_timed_at_another_context_is_not_known():
    s = switch()
    s.begin([0.0])
    s.time(SMALL, 100, 3 * s.plan.seconds(SMALL, 100))
    slow, unknown = s.slowness(200)
    assert slow[SMALL] == slow[None] == pytest.approx(3) and SMALL not in unknown and None in unknown
    slow, unknown = s.slowness(4000)
    assert slow[SMALL] == slow[None] == 1 and {SMALL, None} <= unknown


def test_a_choice_holds_for_a_while_but_not_after_a_try():
    s = switch(row=0.001)
    looks, steps, look = [], [], s.slowness

    def counted(context: int):
        looks.append(len(steps))
        return look(context)

    s.slowness = counted
    s.begin([0.0])
    s.time(None, 100, s.plan.seconds(None, 100))  # or plain decoding is tried for being unknown
    for _ in range(3 * FIRST_REST):
        steps.append(s.next(100))
        s.time(steps[-1], 100, s.plan.seconds(steps[-1], 100))
        s.record(steps[-1], 100, [1])
    first = steps.index(None)
    probe = steps.index(SMALL, first)
    assert [i for i in looks if i < first] == [*range(0, first, LOOK)] and probe - first > FIRST_REST
    assert [i for i in looks if first <= i < probe] == [*range(first, probe, LOOK_PLAIN)]
    assert steps[probe : probe + PROBE] == [SMALL] * PROBE and probe + PROBE in looks


def test_a_rehearsal_takes_every_kind_of_step():
    s = switch()
    s.begin([1.0])
    s.rehearse(2)
    assert s.rehearsing and [s.next(9) for _ in range(6)] == [None, SMALL, LARGE] * 2 and not s.rehearsing


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_warming_up_times_every_kind_of_step(models, temperature):
    target, head = models
    plan = Plan(known(), flat(), 1, {False: (SMALL,), True: (SMALL, LARGE)})
    decoder = Decoder(target, Eagle(head, SMALL), max_seq_len=400, compile=False, plan=plan)
    decoder.switch = Timed(plan)
    decoder.warm_up(Sampling(9, temperature))
    kinds = {None, SMALL, LARGE} if temperature else {None, SMALL}
    timed = Counter(shape for shape, context, seconds in decoder.switch.times if seconds > 0)
    assert timed.keys() == kinds and min(timed.values()) >= REHEARSAL and not decoder.switch.rehearsing


class Timed(Switch):
    """Remembers what it is told of time."""

    def __init__(self, plan):
        super().__init__(plan)
        self.times = []

    def time(self, *step):
        super().time(*step)
        self.times.append(step)


class Every(Switch):
    """Takes the trees and plain decoding in turn, as long as told."""

    def begin(self, temperatures, goes_on=False):
        super().begin(temperatures, goes_on)
        small, large = self.trees[0], self.trees[-1]
        self.turns = iter([large, *[None] * 3, small, *[None] * (2 * UNREAD), small, large, None] * 9)

    def next(self, context):
        return next(self.turns)


KERNELS = pytest.param(torch.bfloat16, marks=pytest.mark.compile)


@pytest.fixture
def little_room(monkeypatch):
    """Decoders have little room for tokens that the head has not read."""
    monkeypatch.setattr(body, "UNREAD", UNREAD)


@pytest.fixture(params=(None, KERNELS), ids=("torch", "kernels"))
def either(request, golden, models):
    """(target, EAGLE-3 head): in float32, and in bfloat16 on the kernels."""
    if request.param is None:
        return models
    target, _ = load_model(golden, dtype=request.param)
    head = load_head(golden / "eagle3", target, "eagle3")
    assert choose_backend("cpu").prepare(target, head)
    return target, head


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_switching_never_changes_the_text(either, little_room, temperature):
    """Through trees, plain steps, and more plain steps than the head's unread tokens have room for."""
    target, head = either
    plan = Plan(known(), flat(), 2, {False: (SMALL, LARGE), True: (SMALL, LARGE)})
    decoder = Decoder(target, Eagle(head, SMALL), batch=2, max_seq_len=400, compile=False, plan=plan)
    decoder.switch = Every(plan)
    prompts, sampling = [PROMPT, PROMPT[3:]], [Sampling(300, temperature, seed=i) for i in range(2)]
    outputs = decoder.generate(prompts, sampling)
    plain = Decoder(target, batch=2, max_seq_len=400, compile=False).generate(prompts, sampling)
    assert [o.ids for o in outputs] == [o.ids for o in plain]
    assert sum(decoder.taken.values()) > 2 * UNREAD and len(decoder.taken) == 3


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_where_the_head_rests_the_other_drafter_goes_on(either, little_room, temperature):
    """Of a joint tree prompt lookup needs no head. It drafts where there is a match, else a step is plain."""
    target, head = either
    plan = Plan(known(), flat(), 2, {False: (SMALL, LARGE), True: (SMALL, LARGE)})
    joint = Mixed(Lookup(shortest=1), Eagle(head, SMALL))
    decoder = Decoder(target, joint, batch=2, max_seq_len=400, compile=False, plan=plan)
    decoder.switch = Every(plan)
    prompts, sampling = [PROMPT * 3, PROMPT[3:]], [Sampling(300, temperature, seed=i) for i in range(2)]
    outputs = decoder.generate(prompts, sampling)
    plain = Decoder(target, batch=2, max_seq_len=400, compile=False).generate(prompts, sampling)
    assert [o.ids for o in outputs] == [o.ids for o in plain]
    assert decoder.taken[decoder.headless] > 9 and decoder.taken[decoder.trees[LARGE]] > 0


@pytest.mark.parametrize("trees", [(SMALL,), (SMALL, TreeShape(7, 1, 2))], ids=len)
def test_there_is_room_for_the_deepest_of_all_steps(either, little_room, trees):
    """A joint tree is deeper than the head's own of as many nodes, and prompt lookup alone drafts deeper
    ones.
    """
    target, head = either
    calibration = Calibration({t: dict.fromkeys(trees, 1.8) for t in TEMPERATURES}, (1.0,))
    plan = Plan(calibration, flat(), 1, {False: trees, True: trees})
    decoder = Decoder(
        target, Mixed(Lookup(shortest=1), Eagle(head, SMALL)), max_seq_len=400, compile=False, plan=plan
    )
    kinds = [decoder.usual, decoder.headless, *decoder.trees.values()]
    assert {kind.drafter.shape.window for kind in kinds} == {4, 8, *(tree.nodes for tree in trees)}
    assert decoder.window == decoder.state.window == 8
    decoder.switch = Every(plan)
    (output,) = decoder.generate([PROMPT * 3], Sampling(200))
    (plain,) = Decoder(target, max_seq_len=400, compile=False).generate([PROMPT * 3], Sampling(200))
    assert output.ids == plain.ids and decoder.taken[decoder.headless] > 9


def test_a_head_rests_where_the_text_itself_drafts_better():
    """It is left on a hard text, and taken again when that turns easy, if steps without it emit fewer."""
    rested = []
    for emitted in (1, 4):
        s = switch(row=0.001)
        s.begin([0.0])
        taken = []
        for i in range(400):
            taken.append(s.next(100))
            s.record(taken[-1], 100, [(3 if i > 60 else 1) if taken[-1] else emitted])
        assert None in taken[:60]
        rested.append(taken[-200:].count(None))
    assert rested[0] == 0 and rested[1] > 180


@pytest.mark.parametrize("reach", (0, 50))
@pytest.mark.parametrize("room", (UNREAD, body.UNREAD))
def test_the_head_reads_what_plain_steps_left(models, monkeypatch, room, reach):
    """Its cache, also one of the last tokens only, is that of a head which has always drafted, but for the
    rounding of other passes.
    """
    target, head = models
    monkeypatch.setattr(body, "UNREAD", room)
    plan = Plan(known(), flat(), 1, {False: (SMALL,), True: ()})
    caches = []
    for turns in (itertools.repeat(SMALL), iter([None] * (2 * UNREAD + 9) + [SMALL] * 400)):
        decoder = Decoder(target, Eagle(head, SMALL, reach=reach), max_seq_len=400, compile=False, plan=plan)
        decoder.switch.next = lambda context, turns=turns: next(turns)
        decoder.generate([PROMPT], Sampling(2 * UNREAD + 40))
        caches.append(decoder.drafter.caches[0])
    committed = reach or len(PROMPT) + 2 * UNREAD + 30
    for a, b in zip(*([cache.k, cache.v] for cache in caches)):
        torch.testing.assert_close(a[:, :committed], b[:, :committed], rtol=1e-3, atol=1e-4)
        assert a[:, :committed].abs().amin(dim=(0, 2, 3)).amax() > 0


def test_the_next_turn_of_a_plain_text_reads_what_is_new(models):
    """The head then reads what it has left, and the caches of both hold the turn before."""
    target, head = models
    plan = Plan(known(), flat(), 1, {False: (SMALL,), True: ()})
    decoder = Decoder(target, Eagle(head, SMALL), max_seq_len=400, compile=False, plan=plan)
    decoder.switch.next = lambda context: None
    first, = decoder.generate([PROMPT], Sampling(150))
    talk = PROMPT + first.ids + [5, 6]
    run = Run(decoder, [talk], Sampling(60), reuse=True)
    assert decoder._start[0] >= len(talk) - 5
    decoder.switch.next = lambda context: SMALL
    for _ in run:
        pass
    fresh = Decoder(target, Eagle(head, SMALL), max_seq_len=400, compile=False)
    expected, = fresh.generate([talk], Sampling(60))
    assert run.ids[0] == expected.ids and run.accept_lengths[0] == expected.accept_lengths


def test_costs_are_measured_once(models, tmp_path, monkeypatch):
    target, head = models
    measured, said = [], []
    original = costing.measure
    monkeypatch.setattr(costing, "MAX_REPEAT", 1)
    monkeypatch.setattr(costing, "VERIFY_ROWS", (1, 3))
    monkeypatch.setattr(costing, "measure", lambda *a: measured.append(a[-1]) or original(*a))

    def costs(longest=300, batches=False):
        drafter = Eagle(head, SMALL)
        return measured_once(target, drafter, False, longest, tmp_path, said.append, batches)

    first = costs()
    assert first.verify.keys() == {SHORT, 300} and first.verify[SHORT].keys() == {1, 3} and len(measured) == 1
    again = costs()
    assert len(measured) == 1 and again.step(SMALL, 200) == pytest.approx(first.step(SMALL, 200), rel=0.01)
    monkeypatch.setattr(costing, "processor_name", lambda: "another")
    assert costs() and len(measured) == 2 and len(json.loads((tmp_path / "costs.json").read_text())) == 2
    assert costs(longest=40).verify.keys() == {SHORT} and len(measured) == 3
    for _ in range(2):
        batches = costs(batches=True)
        assert batches.verify[300].keys() == {1, 3, *costing.BATCH_ROWS} and len(measured) == 4
        assert {n: {*by_count} for n, by_count in batches.texts.items()} == {SHORT: {costing.TEXTS}}
    assert measured == [False, False, False, True] and not costs().texts


DAMAGE = {  # what costs.json may hold of the target's passes: what is said about it
    '{"1": 2.0}': "verify_ms.128 is [1]; expected 1, 3, all of them",
    "{}": "verify_ms.128 is []; expected 1, 3, all of them",
    '{"x": 1}': "a name in costs.verify_ms.128 is 'x'; expected a whole number of at most 8 digits",
    "7": "verify_ms.128 is 7; expected an object",
    '{"1": 0, "3": 1}': "verify_ms.128.1 is 0; expected a number above 0",
    '{"1": NaN, "3": 1}': "verify_ms.128.1 is nan; expected", '{"1": -1, "3": 1}': "verify_ms.128.1 is -1;",
    '{"1": "x", "3": 1}': "verify_ms.128.1 is 'x'; expected",
}


@pytest.fixture
def costs_file(models, tmp_path, monkeypatch):
    """A file of costs, and what reads it; `said` has its lines."""
    monkeypatch.setattr(costing, "MAX_REPEAT", 1)
    monkeypatch.setattr(costing, "VERIFY_ROWS", (1, 3))
    said: list[str] = []

    def read() -> list[str]:
        said.clear()
        drafter = Eagle(models[1], SMALL)
        costs = measured_once(models[0], drafter, False, 40, tmp_path, said.append)
        assert costs.verify[SHORT].keys() == {1, 3}
        return said

    read()
    return tmp_path / "costs.json", read


@pytest.mark.parametrize("rows, words", DAMAGE.items(), ids=DAMAGE)
def test_damaged_costs_are_refused(costs_file, rows, words):
    """As a damaged calibration is. What was measured under other conditions is not looked at."""
    file, read = costs_file
    (made_by, kept), = json.loads(file.read_text()).items()
    (context,) = kept["verify_ms"]
    damaged = kept | {"verify_ms": {context: json.loads(rows)}}
    file.write_text(json.dumps({made_by: kept, "other": damaged}))
    assert not read()
    file.write_text(json.dumps({made_by: damaged}))
    with refused(f"{file}: damaged: ") as e:
        read()
    assert words in str(e.value) and str(e.value).endswith("; delete it")
    file.unlink()
    assert "measuring" in read()[0] and not read()


@pytest.mark.parametrize("content", (b"", b"{", b"[]", b"\xff\0"))
def test_a_file_that_is_no_file_of_costs_is_refused(costs_file, content):
    file, read = costs_file
    file.write_bytes(content)
    with refused(f"{file}: ") as e:
        read()
    assert str(e.value).endswith("; delete it")


@pytest.mark.parametrize("turn, turns", ((0.1, 15), (0.3, 7), (0.9, 3), (2.1, 1)))
def test_slow_passes_take_fewer_turns(models, monkeypatch, turn, turns):
    """turn: seconds that all passes take once; turns: how often each is timed."""
    clock, timed = itertools.count(), []
    passes = len(costing.VERIFY_ROWS) + 2 * len(costing.LEVEL_ROWS)  # each asks for the time twice
    monkeypatch.setattr(costing.time, "perf_counter", lambda: next(clock) * turn / 2 / passes)
    verify = costing.Passes._verify
    monkeypatch.setattr(costing.Passes, "_verify", lambda *a: timed.append(a[1].shape[1]) or verify(*a))
    costing.measure(models[0], Eagle(models[1], SMALL), False, (SHORT,))
    assert timed.count(costing.VERIFY_ROWS[-1]) == turns + 1  # once before any is timed


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_costs(models, monkeypatch):
    """Without kernels: every size compiled on its own."""
    monkeypatch.setattr(costing, "VERIFY_ROWS", (1, 3))
    monkeypatch.setattr(costing, "LEVEL_ROWS", (2,))
    costs = costing.measure(models[0], Eagle(models[1], SMALL), True, (SHORT,))
    assert costs.verify[SHORT].keys() == {1, 3} and costs.level[SHORT].keys() == {2}
    assert all(t > 0 for part in (costs.verify, costs.level) for t in part[SHORT].values())


@pytest.mark.compile
@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_a_catch_up_reads_what_there_is(golden, monkeypatch, temperature):
    """On the kernels it has as many rows as there are unread tokens, and drafts what W rows draft."""
    target, _ = load_model(golden, dtype=torch.bfloat16)
    head = load_head(golden / "eagle3", target, "eagle3")
    assert choose_backend("cpu").prepare(target, head)
    outputs, rows = [], set()
    few = target.backend.unread_rows

    def counted(state) -> int:
        rows.add(few(state))
        return few(state)

    for unread_rows in (counted, lambda state: state.window):
        monkeypatch.setattr(target.backend, "unread_rows", unread_rows)
        decoder = Decoder(target, Eagle(head, LARGE), max_seq_len=400, compile=False)
        outputs.append(decoder.generate([PROMPT], Sampling(100, temperature, seed=5))[0])
    assert outputs[0].accept_lengths == outputs[1].accept_lengths and outputs[0].ids == outputs[1].ids
    assert len(rows) > 1 and max(rows) <= LARGE.window
