"""What hostile callers do: engines that nobody warmed up, tiny caches, Ctrl-C anywhere."""
import random

import pytest
from helpers.decoding import ids, plain, prompts

from drafters.mixed import Mixed
from drafters.ngram import NGram
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from schedulers.cost_model import MAX_TREES, CostScheduler, Plan, Tuner
from tree import TreeShape

SMALL = TreeShape(8, 2, 3)


def tuned(models, drafter=None, max_seq_len=300, **options) -> Engine:
    options["scheduler"] = CostScheduler()
    drafter = drafter or HeadDrafter(models[1], SMALL)
    return Engine(models[0], drafter, max_seq_len=max_seq_len, compile=False, **options)


@pytest.mark.parametrize("temperature", (0.0, 1.7))
@pytest.mark.parametrize("warm", (False, True))
def test_trees_are_chosen_without_a_rehearsal(models, warm, temperature):
    """Requests become fewer while no step of so few sequences has been timed."""
    engine, texts = tuned(models, batch=4), prompts(9, seed=4)
    if warm:
        engine.warm_up()  # greedy: steps with noise are not timed
    how = [Sampling(3 + 5 * i, temperature, seed=i) for i in range(9)]
    assert ids(engine, texts, how) == ids(plain(models, batch=4), texts, how)


@pytest.mark.parametrize("kind, room", (("tuned", 2), ("tuned", 8), ("lookup", 2), ("mixed", 3)))
def test_caches_of_few_tokens(models, kind, room):
    if kind == "lookup":
        engine = Engine(models[0], NGram(), max_seq_len=room, compile=False)
    else:
        engine = tuned(models, kind == "mixed" and Mixed(NGram(), HeadDrafter(models[1], SMALL)), room)
    engine.warm_up()
    assert not engine.busy
    engines = engine, plain(models, max_seq_len=room)
    (request,), (alone,) = (one.generate([[40]], Sampling(9)) for one in engines)
    assert request.ids == alone.ids and request.finish == "cache"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_anywhere(models, seed):
    """Whatever was interrupted, no place is lost, and what is decoded afterwards is right."""
    draw = random.Random(seed)
    texts, batch = prompts(8, seed=3, longest=90), draw.choice((1, 3))
    kinds = *map(Plan, MAX_TREES), None, None
    how = [Sampling(40, i % 2, seed=i) for i in range(8)]
    expected = ids(plain(models), texts, how)
    drafter = Mixed(NGram(min_match=1), HeadDrafter(models[1], SMALL))
    engine = tuned(models, drafter, batch=batch, lag=draw.choice((0, 1)), chunks=(8, 16))
    engine.scheduler.tuner.next = lambda requests, count: draw.choice(kinds)

    def fragile(call):
        def called(*args, **options):
            if draw.random() < 0.003:
                raise KeyboardInterrupt
            out = call(*args, **options)
            if draw.random() < 0.003:
                raise KeyboardInterrupt
            return out
        return called

    for name in ("step", "prefill", "to_host", "prefill_unread"):
        setattr(engine.runner, name, fragile(getattr(engine.runner, name)))
    interrupted = 0
    for _ in range(30):
        some, requests = [draw.randrange(8) for _ in range(4)], []
        try:
            for _ in engine.run([texts[i] for i in some], [how[i] for i in some], requests):
                pass
        except KeyboardInterrupt:
            interrupted += 1
        assert not engine.busy and engine.free == batch
        for i, request in zip(some, requests):
            assert request.ids == expected[i][: len(request.ids) if request.finish is None else None]
    assert 0 < interrupted < 30


def test_steps_are_timed_where_the_host_reads_late(models):
    """As on a GPU, where `--tree auto` has nothing but the trials of the warmup to go by."""
    engine = tuned(models, lag=1)
    engine.scheduler.tuner = Tuner((SMALL, SMALL), prunes=False)
    engine.scheduler.attach(engine)
    engine.warm_up()
    assert engine.lag == 1 and engine.scheduler.tuner._costs and not engine.busy


def test_lookup_alone_drafts_deeper_than_the_joint_tree(models):
    """Buffers are as large as the longest commit of any drafter that a step may run."""
    small = TreeShape(3, 1, 1)
    scheduler = CostScheduler(Tuner((small, small)))
    scheduler.tuner.next = lambda requests, count: None  # the head is off: lookup drafts alone
    drafter = Mixed(NGram(min_match=1), HeadDrafter(models[1], small))
    engine = Engine(models[0], drafter, max_seq_len=300, compile=False, scheduler=scheduler)
    text = list(b"abcabcabcabc")
    (request,), (alone,) = (one.generate([text], Sampling(60)) for one in (engine, plain(models)))
    assert request.ids == alone.ids and "12 nodes" in request.trees
