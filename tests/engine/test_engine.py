"""The engine on the golden models in float32: output equals plain decoding; requests join and leave without
changing others. Trees against the reference: tests/test_core.py.
"""
import random

import pytest
import torch
from helpers.decoding import alone, check_outputs, decode, drafts, ids, plain, prompts, requests, speculative
from helpers.drafters import make_drafter

from drafters.mixed import Mixed
from drafters.ngram import NGram
from engine import engine as engines
from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling
from families.mixed import causal
from schedulers.cost_model import MAX_TREES, CostScheduler, TreePlan, Tuner
from tree import TreeShape

SHAPE = TreeShape(12, 3, 3)
SHAPES = [TreeShape(8, 2, 3), TreeShape(24, 5, 6)]


# -- lossless texts ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_coupling_helps(models):
    """Statistical, with a fixed seed: with shared Gumbel noise more of the target's samples are drafted."""
    texts, sampling = prompts(24, seed=3), [Sampling(40, temperature=1.0, seed=s) for s in range(24)]

    def decoded(coupled):
        outputs = speculative(models, SHAPES[1], coupled, batch=24).generate(texts, sampling)
        lengths = [n for o in outputs for n in o.accept_lengths]
        return sum(lengths) / len(lengths), [o.ids for o in outputs]

    (tau, found), (uncoupled_tau, same) = decoded(True), decoded(False)
    assert tau > 1.1 * uncoupled_tau and found == same == ids(plain(models, batch=24), texts, sampling)


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


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_logprobs_are_the_targets(models, temperature):
    """Against one pass over the whole text, before penalties; also of the prompt, which is then not taken
    from the prefix cache.
    """
    target, _ = models
    prompt = prompts(1, seed=24, shortest=90, longest=90)[0]
    request = Sampling(25, temperature, logprobs=4, frequency_penalty=1, seed=2)
    engines = plain(models), speculative(models, SHAPE)
    found = [x for engine in engines * 2 for x in engine.generate([prompt], request, score_prompt=True)]
    assert found[0].ids == found[1].ids and max(found[1].accept_lengths) > 1
    text = prompt + found[0].ids
    with torch.no_grad():
        p = target.logits(causal(target, torch.tensor([text]))[0])[0, :-1].log_softmax(-1)
    for output in found:
        scores = output.prompt_scores + output.scores
        assert len(scores) == len(text) - 1 and output.cached == 0
        for row, token, score in zip(p, text[1:], scores):
            assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [i for i, _ in score.top] == row.topk(4).indices.tolist()
            assert [x for _, x in score.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


# -- requests that come and go -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(models):
    """Return requests, and the output of each alone."""
    made = requests(12, seed=3)
    return made, alone(models, made)


@pytest.mark.slow
@pytest.mark.parametrize("name, batch, lag, few", (
    ("eagle3", 1, 0, False), ("eagle3", 5, 1, True), ("lookahead", 2, 2, False), ("lookup", 5, 1, True),
))
def test_output_does_not_depend_on_the_batch(models, models1, asked, name, batch, lag, few):
    """Also when the host reads results one step late and requests are cancelled. While a plain request
    decodes, drafting is off. few: as with captured graphs on a GPU, steps exist for a few batch sizes only,
    starting at row 0, and the first call for a key is replayed forever.
    """
    drafter, calls = make_drafter(name, *models, models1[1], lambda heads: None), {}
    options = {"lag": lag, "batch_sizes": (2, 5) if few else None, "max_seq_len": 300, "compile": False}
    engine = Engine(models[0], drafter, batch=batch, plain_requests=True, **options)
    if few:
        engine.runner.captured = lambda key, call, still: calls.setdefault(key, call)()
    made, expected = asked
    for leaving, plain_share in ((0.0, 0.4), (0.03, 0.0)):
        found = decode(engine, made, random.Random(2), leaving, plain_share)
        check_outputs(found, expected, made)
        assert (None in found) == bool(leaving) and engine.free == batch and not engine.busy
    assert {key[-1] for key in calls} == ({1, 2, 5} if few else set())
    if batch == 1:
        return
    one, other = engine.admit([5, 6], Sampling(40)), engine.admit([5, 6], Sampling(20), plain=True)
    while engine.busy:
        engine.step()
    assert one.ids[:20] == other.ids and set(other.trees) == {"plain"} and other.trees["plain"] == 19
    assert sum(one.trees.values()) < 39 or name == "lookup"


def test_prefix_cache(models):
    """The prefix cache serves the next turn of a chat, and a prompt that shares its start with a running
    request.
    """
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
    check_outputs([text.ids for text in texts], alone(models, made), made)


def test_chunked_prefill_does_not_block_decoding(models):
    engine = speculative(models, SHAPE, batch=2, chunks=(16,))
    first = engine.admit([1, 2, 3], Sampling(100))
    while not first.ids:
        engine.step()
    second, progress = engine.admit(list(range(120)), Sampling(5)), []
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        engine.admit([3])
    while not second.ids:
        before = len(first.ids)
        engine.step()
        progress.append(len(first.ids) - before)
    assert len(progress) == 8 and all(progress)


def scheduler_of(*shapes, choose) -> CostScheduler:
    """Return a scheduler that uses the tree `choose(requests, count)` returns, whatever the costs."""
    scheduler = CostScheduler(Tuner(shapes, prunes=False))
    scheduler.tuner.next = lambda *step: (shape := choose(*step)) and TreePlan(shape)
    return scheduler


def trees(engine: Engine, prompt: list[int]) -> list[list[int]]:
    """Return the tokens of each step's tree: they depend on everything the head has read."""
    return [draft.tokens for draft in drafts(engine, prompt, Sampling(30))]


@pytest.mark.slow
@pytest.mark.parametrize("tuned", (False, True))
def test_a_chat_may_go_from_plain_to_drafts_and_back(models, tuned):
    """Only the new turn is computed, and the head catches up on tokens decoded without it."""
    scheduler = scheduler_of(SHAPE, choose=lambda requests, count: SHAPE) if tuned else None
    engine = speculative(
        models, SHAPE, batch=2, max_seq_len=600, scheduler=scheduler, plain_requests=not tuned)
    text = prompts(1, seed=6)[0]
    for turn in range(2):
        (made,) = engine.generate([text], Sampling(80), plain=True)
        assert made.cached == (len(text) - 1 if turn else 0)
        text = made.tokens + [97, 98]
        assert trees(engine, text) == trees(speculative(models, SHAPE, max_seq_len=600), text)


@pytest.mark.slow
@pytest.mark.parametrize("room, temperature", ((64, 0.0), (512, 1.0)))
def test_the_tree_follows_the_number_of_requests(models, monkeypatch, room, temperature):
    """Large for one request, small for two, no drafts for more; finished requests are replaced until the
    queue is empty. room: maximum of tokens that the head has not read; at large batches there are more than
    that, or fewer.
    """
    monkeypatch.setattr(engines, "MAX_UNREAD_TOKENS", room)
    large, small = TreeShape(12, 3, 3), TreeShape(3, 1, 1)
    scheduler = scheduler_of(small, large, choose=lambda requests, count: {1: large, 2: small}.get(count))
    made = [(prompt, Sampling(20 + 17 * i % 40, temperature, seed=i))
            for i, prompt in enumerate(prompts(7, seed=3, longest=90))]
    made.append((prompts(1, seed=4)[0], Sampling(150, temperature)))  # it outlives the others
    engine = speculative(models, large, batch=4, scheduler=scheduler)
    found = engine.generate(*map(list, zip(*made)))
    check_outputs([request.ids for request in found], alone(models, made), made)
    assert set(found[0].trees) == {"plain"} and set(found[-1].trees) == {"plain", "3/1/1", "12/3/3"}
    turn = [*found[-1].tokens, 97, 98]
    assert trees(engine, turn) == trees(speculative(models, large), turn)


# -- engines that nobody warmed up, tiny caches, Ctrl-C anywhere --------------------------------------------


SMALL = TreeShape(8, 2, 3)


def tuned(models, drafter=None, max_seq_len=300, **options) -> Engine:
    options["scheduler"] = CostScheduler()
    drafter = drafter or HeadDrafter(models[1], SMALL)
    return Engine(models[0], drafter, max_seq_len=max_seq_len, compile=False, **options)


@pytest.mark.parametrize("temperature", (0.0, 1.7))
@pytest.mark.parametrize("warm", (False, True))
def test_tree_choice_without_timings(models, warm, temperature):
    """The batch shrinks to sizes whose steps have never been timed."""
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
    """Wherever it interrupts, no slot is lost, and later requests decode correctly."""
    draw = random.Random(seed)
    texts, batch = prompts(8, seed=3, longest=90), draw.choice((1, 3))
    kinds = *map(TreePlan, MAX_TREES), None, None
    how = [Sampling(24, i % 2, seed=i) for i in range(8)]
    expected = ids(plain(models), texts, how)
    drafter = Mixed(NGram(min_match=1), HeadDrafter(models[1], SMALL))
    engine = tuned(models, drafter, batch=batch, lag=draw.choice((0, 1)), chunks=(8, 16))
    engine.scheduler.tuner.next = lambda requests, count: draw.choice(kinds)

    def fragile(call):
        def called(*args, **options):
            if draw.random() < 0.006:
                raise KeyboardInterrupt
            out = call(*args, **options)
            if draw.random() < 0.006:
                raise KeyboardInterrupt
            return out
        return called

    runner, deferred = engine.runner, engine.slots.deferred
    for part, name in (runner, "step"), (runner, "prefill"), (runner, "to_host"), (deferred, "prefill"):
        setattr(part, name, fragile(getattr(part, name)))
    interrupted = 0
    for _ in range(20):
        some, requests = [draw.randrange(8) for _ in range(4)], []
        try:
            for _ in engine.run([texts[i] for i in some], [how[i] for i in some], requests):
                pass
        except KeyboardInterrupt:
            interrupted += 1
        assert not engine.busy and engine.free == batch
        for i, request in zip(some, requests):
            assert request.ids == expected[i][: len(request.ids) if request.finish is None else None]
    assert 0 < interrupted < 20


def test_steps_are_timed_with_lag(models):
    """As on a GPU, where `--tree auto` has only the warm-up's trials."""
    engine = tuned(models, lag=1)
    engine.scheduler.tuner = Tuner((SMALL, SMALL), prunes=False)
    engine.scheduler.attach(engine)
    engine.warm_up()
    assert engine.lag == 1 and engine.scheduler.tuner._costs and not engine.busy


def test_lookup_alone_drafts_deeper_than_the_joint_tree(models):
    """Buffers fit the longest commit of any drafter that a step may use."""
    small = TreeShape(3, 1, 1)
    scheduler = CostScheduler(Tuner((small, small)))
    scheduler.tuner.next = lambda requests, count: None  # the head is off: lookup drafts alone
    drafter = Mixed(NGram(min_match=1), HeadDrafter(models[1], small))
    engine = Engine(models[0], drafter, max_seq_len=300, compile=False, scheduler=scheduler)
    text = list(b"abcabcabcabc")
    (request,), (alone,) = (one.generate([text], Sampling(60)) for one in (engine, plain(models)))
    assert request.ids == alone.ids and "12 nodes" in request.trees
