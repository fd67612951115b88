"""The engine on the golden models, in float32: plain text, exact ends; requests that come and go, each with
the text that it has alone. The reference's trees: tests/test_core.py.
"""
import random

import pytest
from helpers.decoding import (
    alone,
    check_distribution,
    check_texts,
    decode,
    drafts,
    ids,
    plain,
    prompts,
    requests,
    speculative,
)
from helpers.drafters import make_drafter, small_models

from engine import runner
from engine.engine import Engine
from engine.sampling import Sampling
from schedulers.cost_model import CostScheduler, Plan, Tuner
from tree import TreeShape

SHAPE = TreeShape(12, 3, 3)
SHAPES = [TreeShape(8, 2, 3), TreeShape(24, 5, 6)]


# -- lossless texts ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_coupling_helps(models):
    """Statistical, seed fixed: with the shared noise the head guesses the target's samples more often."""
    texts, sampling = prompts(24, seed=3), [Sampling(40, temperature=1.0, seed=s) for s in range(24)]

    def decoded(coupled):
        outputs = speculative(models, SHAPES[1], coupled, batch=24).generate(texts, sampling)
        lengths = [n for o in outputs for n in o.accept_lengths]
        return sum(lengths) / len(lengths), [o.ids for o in outputs]

    (tau, found), (uncoupled_tau, same) = decoded(True), decoded(False)
    assert tau > 1.1 * uncoupled_tau and found == same == ids(plain(models, batch=24), texts, sampling)


@pytest.mark.slow
def test_distribution_of_speculative_text():
    small = small_models()
    check_distribution(small[0], speculative(small, TreeShape(8, 2, 3), batch=256))


# -- where a text ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, SHAPES[1]], ids=str)
def test_ends_are_exact(models, shape):
    make = lambda **o: plain(models, **o) if shape is None else speculative(models, shape, **o)  # noqa: E731
    prompt = prompts(1, seed=9)[0]
    free = ids(plain(models), [prompt], Sampling(30))[0]
    engine, cut = make(), 0
    for n in (1, 2, 3, 7, 20):
        (output,) = engine.generate([prompt], Sampling(n))
        assert output.ids == free[:n] and output.finish == "length"
        assert sum(output.accept_lengths) == n - 1
    (whole,) = engine.generate([prompt], Sampling(30))
    for stop in dict.fromkeys(free):
        (output,) = make(stop_ids=[299, stop]).generate([prompt], Sampling(30))
        assert output.ids == free[: free.index(stop) + 1] and output.finish == "stop", stop
        cut += output.accept_lengths != whole.accept_lengths[: len(output.accept_lengths)]
    assert cut or shape is None, "no text stops in the middle of a step"
    for room in (1, 2, 9):
        (output,) = make(max_seq_len=len(prompt) + room).generate([prompt], Sampling(30))
        assert output.ids == free[:room] and output.finish == "cache"


# -- requests that come and go -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(models):
    """Requests, and what each emits alone."""
    made = requests(18, seed=3)
    return made, alone(models, made)


@pytest.mark.slow
@pytest.mark.parametrize("batch, lag", ((1, 0), (2, 2), (5, 1)))
def test_whatever_else_is_running(models, asked, batch, lag):
    """Also where the host learns late what was emitted, and texts are left in the middle."""
    engine, (made, expected) = speculative(models, SHAPE, batch=batch, lag=lag), asked
    for turn, leaving in enumerate((0.0, 0.03)):
        found = decode(engine, made, random.Random(turn), leaving)
        check_texts(found, expected, made)
        assert (None in found) == bool(leaving)
    assert engine.free == batch and not engine.busy


@pytest.mark.slow
@pytest.mark.parametrize("name, few", (("eagle3", True), ("lookahead", False), ("lookup", True)))
def test_plain_texts_beside_others(models, models1, asked, name, few):
    """While a plain request decodes, nobody drafts. few: as captured ones on a GPU, there are steps for few
    numbers of sequences, from the first row on, and what was called first for a key runs for it ever after.
    """
    drafter, calls = make_drafter(name, *models, models1[1], lambda heads: None), {}
    options = {"lag": int(few), "batch_sizes": (2, 5) if few else None, "max_seq_len": 300, "compile": False}
    engine = Engine(models[0], drafter, batch=5, **options)
    if few:
        engine.runner.captured = lambda key, call, still: calls.setdefault(key, call)()
    made, expected = asked
    check_texts(decode(engine, made, random.Random(2), leaving=0.02, plain=0.4), expected, made)
    assert {key[-1] for key in calls} == ({1, 2, 5} if few else set())
    one, other = engine.admit([5, 6], Sampling(40)), engine.admit([5, 6], Sampling(20), plain=True)
    while engine.busy:
        engine.step()
    assert one.ids[:20] == other.ids and set(other.trees) == {"plain"} and other.trees["plain"] == 19
    assert sum(one.trees.values()) < 39 or name == "lookup"


def test_a_text_is_read_once(models):
    """The next turn of a chat, and another text that begins alike while the first is being written."""
    engine = speculative(models, SHAPE, batch=3)
    prompt = prompts(1, seed=5, shortest=100, longest=100)[0]
    first = engine.admit(prompt, Sampling(20))
    while not first.ids:
        engine.step()
    beside = engine.admit([*prompt[:90], 3, 4], Sampling(5, seed=2))  # copied from the first
    while engine.busy:
        engine.step()
    other = engine.admit([9, 8, 7], Sampling(5))  # takes the place that is of least use
    (turn,) = engine.generate([prompt + first.ids + [5, 6]], Sampling(10))
    assert first.cached == other.cached == 0 and beside.cached == 89 and first.slot != beside.slot
    assert turn.cached >= 119 - SHAPE.max_commit - 1
    texts = [first, beside, other, turn]
    made = [(text.prompt, text.sampling) for text in texts]
    check_texts([text.ids for text in texts], alone(models, made), made)


def test_others_decode_while_a_prompt_is_read(models):
    engine = speculative(models, SHAPE, batch=2, chunks=(16,))
    first = engine.admit([1, 2, 3], Sampling(100))
    while not first.ids:
        engine.step()
    second, progress = engine.admit(list(range(120)), Sampling(5)), []
    while not second.ids:
        before = len(first.ids)
        engine.step()
        progress.append(len(first.ids) - before)
    assert len(progress) == 8 and all(progress)


def scheduler_of(*shapes, choose) -> CostScheduler:
    """A scheduler that takes the tree that `choose(requests, count)` returns, whatever it costs here."""
    scheduler = CostScheduler(Tuner(shapes, prunes=False))
    scheduler.tuner.next = lambda *step: (shape := choose(*step)) and Plan(shape)
    return scheduler


def trees(engine: Engine, prompt: list[int]) -> list[list[int]]:
    """The tokens of the trees of a text's steps: they depend on all that the head has read."""
    return [draft.tokens for draft in drafts(engine, prompt, Sampling(30))]


@pytest.mark.slow
@pytest.mark.parametrize("tuned", (False, True))
def test_a_chat_may_go_from_plain_to_drafts_and_back(models, tuned):
    """Only the new turn is read, and the head knows what was decoded without it."""
    scheduler = scheduler_of(SHAPE, choose=lambda requests, count: SHAPE) if tuned else None
    engine = speculative(models, SHAPE, batch=2, max_seq_len=600, scheduler=scheduler)
    text = prompts(1, seed=6)[0]
    for turn in range(2):
        (made,) = engine.generate([text], Sampling(80), plain=True)
        assert made.cached == (len(text) - 1 if turn else 0)
        text = made.tokens + [97, 98]
        assert trees(engine, text) == trees(speculative(models, SHAPE, max_seq_len=600), text)


@pytest.mark.slow
@pytest.mark.parametrize("room, temperature", ((64, 0.0), (512, 1.0)))
def test_the_tree_follows_the_number_of_requests(models, monkeypatch, room, temperature):
    """Large for one, small for two, none for more: a request that ends is replaced, until nobody waits.

    room: for tokens that the head has not read; requests in a crowd have more of them, or fewer.
    """
    monkeypatch.setattr(runner, "MAX_UNREAD_TOKENS", room)
    large, small = TreeShape(12, 3, 3), TreeShape(3, 1, 1)
    scheduler = scheduler_of(small, large, choose=lambda requests, count: {1: large, 2: small}.get(count))
    made = [(prompt, Sampling(20 + 17 * i % 40, temperature, seed=i))
            for i, prompt in enumerate(prompts(7, seed=3, longest=90))]
    made.append((prompts(1, seed=4)[0], Sampling(150, temperature)))  # it outlives the others
    engine = speculative(models, large, batch=4, scheduler=scheduler)
    found = engine.generate(*map(list, zip(*made)))
    check_texts([request.ids for request in found], alone(models, made), made)
    assert set(found[0].trees) == {"plain"} and set(found[-1].trees) == {"plain", "3/1/1", "12/3/3"}
    turn = [*found[-1].tokens, 97, 98]
    assert trees(engine, turn) == trees(speculative(models, large), turn)
