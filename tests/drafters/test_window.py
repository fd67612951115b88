"""A head that attends to the last tokens of a text only: its drafts, and what its caches hold."""
from collections.abc import Callable

import pytest
import torch
from helpers.decoding import drafts, ids, plain, prompts
from helpers.drafters import make_drafter

from drafters.eagle import Eagle
from drafters.network import HeadDrafter, KeptTokens
from engine.engine import Engine
from sampling.options import Sampling
from tree import TreeShape

KINDS = ("eagle3", "eagle2", "eagle1", "p-eagle", "dflash", "dspark")
SHAPE = TreeShape(8, 2, 3)
PROMPTS = prompts(2, seed=3, shortest=30, longest=90)


@pytest.fixture(params=KINDS)
def make(request, models, models1) -> Callable[[int], HeadDrafter]:
    """make(reach) -> a drafter of each kind, the same head in all."""
    drafter = make_drafter(request.param, *models, models1[1], lambda model: None)
    return lambda reach: type(drafter)(drafter.head, drafter.shape, drafter.coupled, reach)


def engine_of(target, drafter, **options) -> Engine:
    options = {"batch": 2, "max_seq_len": 300, "compile": False, "chunks": (16,)} | options
    return Engine(target, drafter, **options)


@pytest.mark.parametrize("reach", (5, 70))
def test_the_ring_holds_the_last_tokens(models, make, reach):
    """Keys and values of a first layer do not depend on what it attends to, nor do any of DFlash's, which
    are of what it reads of the target: they are those of a cache of the whole text.
    """
    held = []
    for window in (0, reach):
        engine = engine_of(models[0], make(window))
        requests = [engine.admit(prompt, Sampling(50)) for prompt in PROMPTS]
        while min(len(request.accept_lengths) for request in requests) < 5:
            engine.step()
        held.append((engine, requests))
    (one, all_requests), (other, some_requests) = held
    deep = None if hasattr(one.drafter.head, "layers") else 1
    for a, b in zip(all_requests, some_requests):
        known, end = (int((e.state.length - e.state.n_new)[r.place]) for e, r in ((one, a), (other, b)))
        last = torch.arange(max(0, end - reach), min(known, end))  # later tokens are not read yet
        assert len(last) > min(reach, end) // 2
        for whole, ring in zip(one.drafter.caches[:deep], other.drafter.caches[:deep]):
            for every, some in zip(whole.buffers(), ring.buffers()):
                torch.testing.assert_close(some[b.place, last % reach], every[a.place, last])


def test_a_window_as_long_as_the_text_changes_no_draft(models, make):
    """Each row sees then what it sees without a window; of a longer text, all slots of the ring."""
    engines = [engine_of(models[0], make(reach), batch=1) for reach in (0, 250)]
    whole, windowed = ([draft[:3] for draft in drafts(e, PROMPTS[0], Sampling(30))] for e in engines)
    assert whole == windowed and any(len(draft[2]) > 1 for draft in whole)
    ring = KeptTokens(5)
    assert ring.first(torch.tensor([3, 5, 9])).tolist() == [3, 5, 5] and ring.count(99, 7) == 5 + 7 + 1


@pytest.mark.slow
def test_what_a_ring_has_lost_is_read_again(models):
    """Texts that begin alike, one after the other and at a time: drafts are those of a new engine."""
    long, short = PROMPTS[0] + PROMPTS[1], PROMPTS[0] + PROMPTS[1][:10]
    engine = engine_of(models[0], Eagle(models[1], SHAPE, reach=12), batch=1)
    drafts(engine, long)
    request = engine.admit(short, Sampling(1))
    assert request.cached == len(short) - 1 - 12
    engine.leave(request)
    drafts(engine, long)
    fresh = engine_of(models[0], Eagle(models[1], SHAPE, reach=12), batch=1)
    again, new = ([draft[:3] for draft in drafts(e, short, Sampling(30))] for e in (engine, fresh))
    assert again == new  # without scores: last bits depend on the rows read together
    texts = [long, long[:50] + [40, 41], short, *PROMPTS]
    samplings = [Sampling(20 + 7 * i, i % 2, seed=i) for i in range(len(texts))]
    several = engine_of(models[0], Eagle(models[1], SHAPE, reach=12))
    assert ids(several, texts, samplings) == ids(plain(models), texts, samplings)
