"""The engine on the golden models, in float32: the reference's trees, plain text, exact ends; requests that
come and go, each of whose texts is what it is alone.
"""
import random

import pytest
import torch
from helpers import GOLDEN
from helpers.decoding import (
    alone,
    check_distribution,
    check_texts,
    decode,
    ids,
    plain,
    prompts,
    replay,
    requests,
    shape_of,
    speculative,
)
from helpers.drafters import make_drafter

from checkpoint.calibration import TEMPERATURES, Calibration
from drafters.eagle import Eagle
from engine import passes
from engine.autotune import Tuner
from engine.engine import Engine
from engine.request import Request
from sampling.options import Sampling
from tree import TreeShape

SHAPE = TreeShape(12, 3, 3)
SHAPES = [TreeShape(8, 2, 3), TreeShape(24, 5, 6)]
TRACES = sorted(GOLDEN.glob("eagle?.*.safetensors"))


# -- the reference's trees, lossless texts -------------------------------------------------------------------


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_golden_trace(models, models1, path):
    assert len(TRACES) == 7
    replay(speculative(models if path.stem.startswith("eagle3") else models1, shape_of(path)), path)


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
def test_distribution_of_speculative_text(models):
    check_distribution(models[0], speculative(models, TreeShape(8, 2, 3), batch=256))


# -- where a text ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, SHAPES[1]], ids=str)
def test_ends_are_exact(models, shape):
    make = lambda **o: plain(models, **o) if shape is None else speculative(models, shape, **o)  # noqa: E731
    prompt = prompts(1, seed=9)[0]
    free = ids(plain(models), [prompt], Sampling(60))[0]
    engine, cut = make(), 0
    for n in (1, 2, 3, 7, 20):
        (output,) = engine.generate([prompt], Sampling(n))
        assert output.ids == free[:n] and output.finish == "length"
        assert sum(output.accept_lengths) == n - 1
    (whole,) = engine.generate([prompt], Sampling(60))
    for stop in dict.fromkeys(free):
        (output,) = make(stop_ids=[299, stop]).generate([prompt], Sampling(60))
        assert output.ids == free[: free.index(stop) + 1] and output.finish == "stop", stop
        cut += output.accept_lengths != whole.accept_lengths[: len(output.accept_lengths)]
    assert cut or shape is None, "no text stops in the middle of a step"
    for room in (1, 2, 9):
        (output,) = make(max_seq_len=len(prompt) + room).generate([prompt], Sampling(60))
        assert output.ids == free[:room] and output.finish == "cache"


# -- requests that come and go -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thirty(models):
    """Requests, and what each emits alone."""
    made = requests(30, seed=3)
    return made, alone(models, made)


@pytest.mark.slow
@pytest.mark.parametrize("batch, lag", ((1, 0), (2, 2), (5, 1)))
def test_whatever_else_is_running(models, thirty, batch, lag):
    """Also where the host learns late what was emitted, and texts are left in the middle."""
    (target, head), (made, expected) = models, thirty
    engine = Engine(target, Eagle(head, SHAPE), batch=batch, max_seq_len=300, compile=False, lag=lag)
    for turn, leaving in enumerate((0.0, 0.03)):
        found = decode(engine, made, random.Random(turn), leaving)
        check_texts(found, expected, made)
        assert (None in found) == bool(leaving)
    assert engine.free == batch and not engine.busy


@pytest.mark.slow
@pytest.mark.parametrize("name, few", (("eagle3", True), ("lookahead", False), ("lookup", True)))
def test_plain_texts_beside_others(models, models1, name, few):
    """Each group takes its own steps. few: as on a GPU, there are steps for few numbers of sequences."""
    drafter = make_drafter(name, models[0], models[1], models1[1], lambda heads: None)
    engine = Engine(
        models[0], drafter, batch=5, max_seq_len=300, compile=False, lag=int(few),
        counts=(2, 5) if few else None,
    )
    made = requests(30, seed=4)
    found = decode(engine, made, random.Random(2), leaving=0.02, plain=0.4)
    check_texts(found, alone(models, made), made)
    one, other = engine.admit([5, 6], Sampling(20)), engine.admit([5, 6], Sampling(20), plain=True)
    while engine.busy:
        engine.step()
    assert one.ids == other.ids and sum(other.trees.values()) == 19
    assert sum(one.trees.values()) < 19 or name == "lookup"


def test_a_text_is_read_once(models):
    """The next turn of a chat, and another text that begins alike while the first is being written."""
    target, head = models
    engine = Engine(target, Eagle(head, SHAPE), batch=3, max_seq_len=300, compile=False)
    prompt = prompts(1, seed=5, shortest=100, longest=100)[0]
    first = engine.admit(prompt, Sampling(20))
    assert first.cached == 0
    while not first.ids:
        engine.step()
    beside = engine.admit([*prompt[:90], 3, 4], Sampling(5, seed=2))  # copied from the first
    assert beside.cached == 89 and first.place != beside.place
    while engine.busy:
        engine.step()
    other = engine.admit([9, 8, 7], Sampling(5))  # takes the place that is of least use
    assert other.cached == 0
    turn = engine.admit(prompt + first.ids + [5, 6], Sampling(10))
    assert turn.cached >= 119 - SHAPE.window - 1
    while engine.busy:
        engine.step()
    decoder = plain(models)
    for text in (first, beside, other, turn):
        assert text.ids == decoder.generate([text.prompt], [text.sampling])[0].ids


def test_others_decode_while_a_prompt_is_read(models):
    engine = Engine(models[0], Eagle(models[1], SHAPE), batch=2, max_seq_len=300, compile=False, chunks=(16,))
    first = engine.admit([1, 2, 3], Sampling(100))
    while not first.ids:
        engine.step()
    second = engine.admit(prompts(1, seed=8, shortest=120, longest=120)[0], Sampling(5))
    progress = []
    while not second.ids:
        before = len(first.ids)
        engine.step()
        progress.append(len(first.ids) - before)
    assert len(progress) == 8 and all(progress)


def test_scores_of_a_prompt(models):
    target, _ = models
    prompt = prompts(1, seed=9, shortest=90, longest=90)[0]
    engine = Engine(target, None, batch=2, max_seq_len=300, compile=False)
    for _ in range(2):  # read anew, though it is there
        text = engine.admit(prompt, Sampling(1, logprobs=3), score_prompt=True)
        while engine.busy:
            engine.step()
        with torch.no_grad():
            p = target.logits(target.causal(torch.tensor([prompt]))[0])[0].log_softmax(-1)
        assert len(text.prompt_scores) == 89
        for i, score in enumerate(text.prompt_scores):
            assert score.logprob == pytest.approx(float(p[i, prompt[i + 1]]), abs=1e-4)
            assert [token for token, _ in score.top] == p[i].topk(3).indices.tolist()


def tuner_of(*shapes, choose) -> Tuner:
    """A tuner that takes whatever `choose(requests, count)` says, whatever this machine needs for it."""
    taus = {shape: 1 + shape.depth / 2 for shape in shapes}
    tuner = Tuner(Calibration(dict.fromkeys(TEMPERATURES, taus), (1.0,)), shapes)
    tuner.next = choose
    return tuner


@pytest.mark.slow
@pytest.mark.parametrize("tuned", (False, True))
def test_a_chat_may_go_from_plain_to_drafts_and_back(models, tuned):
    """Only the new turn is read, and the head knows what was decoded without it."""
    target, head = models
    tuner = tuner_of(SHAPE, choose=lambda requests, count: SHAPE) if tuned else None
    engine = Engine(target, Eagle(head, SHAPE), batch=2, max_seq_len=600, compile=False, tuner=tuner)
    text, before = prompts(1, seed=6, shortest=30)[0], []
    for turn, without in enumerate((True, False, True, False)):
        (made,) = engine.generate([text], Sampling(80), plain=without)
        if turn:
            assert made.cached >= len(before) - 3
        before = made.tokens
        text = before + [97, 98]
        if not without:
            alone = Engine(target, Eagle(head, SHAPE), max_seq_len=600, compile=False)
            (expected,) = alone.generate([made.prompt], Sampling(80))
            assert made.ids == expected.ids
            # As many steps as where the head has read everything itself.
            assert abs(len(made.accept_lengths) - len(expected.accept_lengths)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("room, temperature", ((64, 0.0), (512, 1.0)))
def test_the_tree_follows_the_number_of_requests(models, monkeypatch, room, temperature):
    """Large for one, small for two, none for more: a request that ends is replaced, until nobody waits.

    room: for tokens that the head has not read; requests in a crowd have more of them, or fewer.
    """
    monkeypatch.setattr(passes, "UNREAD", room)
    target, head = models
    large, small = TreeShape(12, 3, 3), TreeShape(3, 1, 1)
    engine = Engine(
        target, Eagle(head, large), batch=4, max_seq_len=300, compile=False,
        tuner=tuner_of(small, large, choose=lambda requests, count: {1: large, 2: small}.get(count)),
    )
    taken, step = {}, engine.passes.step

    def watched(rows, span, drafter, *modes):  # the nodes of the trees that steps draft, by their rows
        taken.setdefault(rows.count, set()).add(drafter.shape.nodes)
        return step(rows, span, drafter, *modes)

    engine.passes.step = watched
    made = [(prompt, Sampling(20 + 17 * i % 40, temperature, seed=i))
            for i, prompt in enumerate(prompts(7, seed=3, longest=90))]
    made.append((prompts(1, seed=4)[0], Sampling(150, temperature)))  # it outlives the others
    admitted: list[Request] = []
    waiting, at_last = list(made), None
    while waiting or engine.busy:
        while waiting and engine.free:
            admitted.append(engine.admit(*waiting.pop(0)))
        engine.step()
        last = admitted[-1]
        if len(last.ids) > 130 and last.here:
            cache = engine.drafter.caches[0]
            at_last = [x[last.place, : last.length - large.window].clone() for x in (cache.k, cache.v)]
    check_texts([request.ids for request in admitted], alone(models, made), made)
    assert taken == {1: {12}, 2: {3}, 3: {1}, 4: {1}} and len(last.ids) == 150
    # The head has read what was decoded without it, as in a text of its own.
    own = Engine(target, Eagle(head, large), max_seq_len=300, compile=False)
    own.generate([made[-1][0]], made[-1][1])
    for mine, theirs in zip(at_last, (own.drafter.caches[0].k, own.drafter.caches[0].v)):
        torch.testing.assert_close(mine, theirs[0, : len(mine)], rtol=1e-3, atol=1e-4)
