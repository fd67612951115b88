"""The engine on the golden models in float32: output equals plain decoding, also if requests arrive and leave
at any time. Trees against the reference: tests/test_core.py.
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


# -- lossless outputs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_coupled_drafting_increases_tau_by_a_tenth(models):
    """With a fixed seed: shared Gumbel noise makes drafts match the target's samples. Outputs are equal."""
    inputs, sampling = prompts(24, seed=3), [Sampling(40, temperature=1.0, seed=s) for s in range(24)]

    def decoded(coupled):
        outputs = speculative(models, SHAPES[1], coupled, batch=24).generate(inputs, sampling)
        lengths = [n for o in outputs for n in o.accept_lengths]
        return sum(lengths) / len(lengths), [o.ids for o in outputs]

    (tau, coupled), (uncoupled_tau, uncoupled) = decoded(True), decoded(False)
    assert tau > 1.1 * uncoupled_tau
    assert coupled == uncoupled == ids(plain(models, batch=24), inputs, sampling)


# -- the end of an output ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, SHAPES[1]], ids=str)
def test_outputs_end_at_the_limit_the_stop_id_or_the_end_of_the_cache(models, shape):
    make = lambda **o: plain(models, **o) if shape is None else speculative(models, shape, **o)  # noqa: E731
    prompt = prompts(1, seed=9)[0]
    expected = ids(plain(models), [prompt], Sampling(30))[0]
    engine, ends_in_step = make(), 0
    for n in (1, 2, 3, 7, 20):
        (output,) = engine.generate([prompt], Sampling(n))
        assert output.ids == expected[:n] and output.finish == "length"
        assert sum(output.accept_lengths) == n - 1
    (whole,) = engine.generate([prompt], Sampling(30))
    for stop in dict.fromkeys(expected):
        (output,) = make(stop_ids=[299, stop]).generate([prompt], Sampling(30))
        assert output.ids == expected[: expected.index(stop) + 1] and output.finish == "stop", stop
        ends_in_step += output.accept_lengths != whole.accept_lengths[: len(output.accept_lengths)]
    assert ends_in_step or shape is None, "no output stops in the middle of a step"
    for n in (1, 2, 9):
        (output,) = make(max_seq_len=len(prompt) + n).generate([prompt], Sampling(30))
        assert output.ids == expected[:n] and output.finish == "cache"


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_logprobs_equal_one_pass_over_prompt_and_output(models, temperature):
    """Before penalties; also of the prompt, which is then not taken from the prefix cache."""
    target, _ = models
    prompt = prompts(1, seed=24, shortest=90, longest=90)[0]
    sampling = Sampling(25, temperature, logprobs=4, frequency_penalty=1, seed=2)
    engines = plain(models), speculative(models, SHAPE)
    outputs = [x for engine in engines * 2 for x in engine.generate([prompt], sampling, score_prompt=True)]
    assert outputs[0].ids == outputs[1].ids and max(outputs[1].accept_lengths) > 1
    tokens = prompt + outputs[0].ids
    with torch.no_grad():
        p = target.logits(causal(target, torch.tensor([tokens]))[0])[0, :-1].log_softmax(-1)
    for output in outputs:
        scores = output.prompt_scores + output.scores
        assert len(scores) == len(tokens) - 1 and output.cached == 0
        for row, token, score in zip(p, tokens[1:], scores):
            assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [i for i, _ in score.top] == row.topk(4).indices.tolist()
            assert [x for _, x in score.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


# -- requests that arrive and leave --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs_and_outputs(models):
    """Return (prompt, sampling) of requests, and the plain output of each."""
    jobs = requests(12, seed=3)
    return jobs, alone(models, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name, batch, lag, captured", (
    ("eagle3", 1, 0, False), ("eagle3", 5, 1, True), ("lookahead", 2, 2, False), ("lookup", 5, 1, True),
))
def test_output_does_not_depend_on_the_batch(
    models, models1, jobs_and_outputs, name, batch, lag, captured
):
    """Also if the host reads outputs late and requests are cancelled. A plain request disables drafting.

    captured: as with CUDA graphs, steps exist for two batch sizes only, start at slot 0, and replay the first
    call of their key.
    """
    drafter, calls = make_drafter(name, *models, models1[1], lambda heads: None), {}
    options = {"lag": lag, "batch_sizes": (2, 5) if captured else None, "max_seq_len": 300, "compile": False}
    engine = Engine(models[0], drafter, batch=batch, plain_requests=True, **options)
    if captured:
        engine.runner.captured = lambda key, call, frozen: calls.setdefault(key, call)()
    jobs, expected = jobs_and_outputs
    for cancelled, plain_fraction in ((0.0, 0.4), (0.03, 0.0)):
        outputs = decode(engine, jobs, random.Random(2), cancelled, plain_fraction)
        check_outputs(outputs, expected, jobs)
        assert (None in outputs) == bool(cancelled) and engine.free == batch and not engine.busy
    assert {key[-1] for key in calls} == ({1, 2, 5} if captured else set())
    if batch == 1:
        return
    drafted, undrafted = engine.admit([5, 6], Sampling(40)), engine.admit([5, 6], Sampling(20), plain=True)
    while engine.busy:
        engine.step()
    assert drafted.ids[:20] == undrafted.ids and undrafted.trees == {"plain": 19}
    assert sum(drafted.trees.values()) < 39 or name == "lookup"


def test_prefix_cache(models):
    """It serves the next turn of a chat, and a prompt that shares a prefix with a running request."""
    engine = speculative(models, SHAPE, batch=3)
    prompt = prompts(1, seed=5, shortest=100, longest=100)[0]
    first = engine.admit(prompt, Sampling(20))
    while not first.ids:
        engine.step()
    concurrent = engine.admit([*prompt[:90], 3, 4], Sampling(5, seed=2))  # copied from the first
    while engine.busy:
        engine.step()
    unrelated = engine.admit([9, 8, 7], Sampling(5))  # takes the least recently used slot
    (next_turn,) = engine.generate([prompt + first.ids + [5, 6]], Sampling(10))
    assert first.cached == unrelated.cached == 0
    assert concurrent.cached == 89 and first.slot != concurrent.slot
    assert next_turn.cached >= 119 - SHAPE.max_commit - 1
    outputs = [first, concurrent, unrelated, next_turn]
    jobs = [(r.prompt, r.sampling) for r in outputs]
    check_outputs([r.ids for r in outputs], alone(models, jobs), jobs)


def test_chunked_prefill_does_not_block_decoding(models):
    engine = speculative(models, SHAPE, batch=2, chunks=(16,))
    first = engine.admit([1, 2, 3], Sampling(100))
    while not first.ids:
        engine.step()
    second, progress = engine.admit(list(range(120)), Sampling(5)), []
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        engine.admit([3])
    while not second.ids:
        count = len(first.ids)
        engine.step()
        progress.append(len(first.ids) - count)
    assert len(progress) == 8 and all(progress)


def scheduler_of(*shapes, choose) -> CostScheduler:
    """Return a scheduler that uses the tree `choose(requests, count)` returns, whatever the costs."""
    scheduler = CostScheduler(Tuner(shapes, prunes=False))
    scheduler.tuner.next = lambda *step: (shape := choose(*step)) and TreePlan(shape)
    return scheduler


def trees(engine: Engine, prompt: list[int]) -> list[list[int]]:
    """Return the tokens of each step's tree. They depend on all tokens that the head has read."""
    return [draft.tokens for draft in drafts(engine, prompt, Sampling(30))]


@pytest.mark.slow
@pytest.mark.parametrize("scheduled", (False, True))
def test_plain_and_drafted_turns_of_a_chat_alternate(models, scheduled):
    """Only the new turn is prefilled. The head has read the tokens decoded without it: trees are equal."""
    scheduler = scheduler_of(SHAPE, choose=lambda requests, count: SHAPE) if scheduled else None
    engine = speculative(
        models, SHAPE, batch=2, max_seq_len=600, scheduler=scheduler, plain_requests=not scheduled)
    prompt = prompts(1, seed=6)[0]
    for turn in range(2):
        (request,) = engine.generate([prompt], Sampling(80), plain=True)
        assert request.cached == (len(prompt) - 1 if turn else 0)
        prompt = request.tokens + [97, 98]
        assert trees(engine, prompt) == trees(speculative(models, SHAPE, max_seq_len=600), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("max_unread, temperature", ((64, 0.0), (512, 1.0)))
def test_trees_chosen_by_batch_size(models, monkeypatch, max_unread, temperature):
    """A large tree for one request, a small one for two, no drafts for more. Outputs equal plain decoding.

    max_unread: maximum number of tokens that the head has not read; some requests exceed 64, none 512.
    """
    monkeypatch.setattr(engines, "MAX_UNREAD_TOKENS", max_unread)
    large, small = TreeShape(12, 3, 3), TreeShape(3, 1, 1)
    scheduler = scheduler_of(small, large, choose=lambda requests, count: {1: large, 2: small}.get(count))
    jobs = [(prompt, Sampling(20 + 17 * i % 40, temperature, seed=i))
            for i, prompt in enumerate(prompts(7, seed=3, longest=90))]
    jobs.append((prompts(1, seed=4)[0], Sampling(150, temperature)))  # finishes last
    engine = speculative(models, large, batch=4, scheduler=scheduler)
    outputs = engine.generate(*map(list, zip(*jobs)))
    check_outputs([request.ids for request in outputs], alone(models, jobs), jobs)
    assert set(outputs[0].trees) == {"plain"} and set(outputs[-1].trees) == {"plain", "3/1/1", "12/3/3"}
    prompt = [*outputs[-1].tokens, 97, 98]
    assert trees(engine, prompt) == trees(speculative(models, large), prompt)


# -- engines without warmup, tiny caches, interrupts --------------------------------------------------------


SMALL = TreeShape(8, 2, 3)


def scheduled_engine(models, drafter=None, max_seq_len=300, **options) -> Engine:
    """Return an engine with the cost scheduler."""
    options["scheduler"] = CostScheduler()
    drafter = drafter or HeadDrafter(models[1], SMALL)
    return Engine(models[0], drafter, max_seq_len=max_seq_len, compile=False, **options)


@pytest.mark.parametrize("temperature", (0.0, 1.7))
@pytest.mark.parametrize("warm", (False, True))
def test_output_with_a_scheduler_that_has_no_timings(models, warm, temperature):
    """The batch shrinks to sizes whose steps have never been timed."""
    engine, inputs = scheduled_engine(models, batch=4), prompts(9, seed=4)
    if warm:
        engine.warm_up()  # greedy: sampled steps are not timed
    samplings = [Sampling(3 + 5 * i, temperature, seed=i) for i in range(9)]
    assert ids(engine, inputs, samplings) == ids(plain(models, batch=4), inputs, samplings)


@pytest.mark.parametrize("drafting, max_seq_len", (("head", 2), ("head", 8), ("lookup", 2), ("mixed", 3)))
def test_caches_of_few_tokens(models, drafting, max_seq_len):
    """Warmup and decoding work; output equals plain decoding and ends with "cache"."""
    if drafting == "lookup":
        engine = Engine(models[0], NGram(), max_seq_len=max_seq_len, compile=False)
    else:
        mixed = drafting == "mixed" and Mixed(NGram(), HeadDrafter(models[1], SMALL))
        engine = scheduled_engine(models, mixed, max_seq_len)
    engine.warm_up()
    assert not engine.busy
    engines = engine, plain(models, max_seq_len=max_seq_len)
    (request,), (expected,) = (x.generate([[40]], Sampling(9)) for x in engines)
    assert request.ids == expected.ids and request.finish == "cache"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_interrupts_lose_no_slot(models, seed):
    """After Ctrl-C at any point all slots are free, and later requests decode correctly."""
    rng = random.Random(seed)
    inputs, batch = prompts(8, seed=3, longest=90), rng.choice((1, 3))
    plans = *map(TreePlan, MAX_TREES), None, None
    samplings = [Sampling(24, i % 2, seed=i) for i in range(8)]
    expected = ids(plain(models), inputs, samplings)
    drafter = Mixed(NGram(min_match=1), HeadDrafter(models[1], SMALL))
    engine = scheduled_engine(models, drafter, batch=batch, lag=rng.choice((0, 1)), chunks=(8, 16))
    engine.scheduler.tuner.next = lambda requests, count: rng.choice(plans)

    def interruptible(call):
        def called(*args, **options):
            if rng.random() < 0.006:
                raise KeyboardInterrupt
            out = call(*args, **options)
            if rng.random() < 0.006:
                raise KeyboardInterrupt
            return out
        return called

    runner, deferred = engine.runner, engine.slots.deferred
    for owner, name in (runner, "step"), (runner, "prefill"), (runner, "to_host"), (deferred, "prefill"):
        setattr(owner, name, interruptible(getattr(owner, name)))
    interrupted = 0
    for _ in range(20):
        chosen, requests = [rng.randrange(8) for _ in range(4)], []
        try:
            for _ in engine.run([inputs[i] for i in chosen], [samplings[i] for i in chosen], requests):
                pass
        except KeyboardInterrupt:
            interrupted += 1
        assert not engine.busy and engine.free == batch
        for i, request in zip(chosen, requests):
            assert request.ids == expected[i][: len(request.ids) if request.finish is None else None]
    assert 0 < interrupted < 20


def test_warm_up_times_steps_of_an_engine_with_lag(models):
    """As on a GPU, where `--tree auto` has the timings of warmup only."""
    engine = scheduled_engine(models, lag=1)
    engine.scheduler.tuner = Tuner((SMALL, SMALL), prunes=False)
    engine.scheduler.attach(engine)
    engine.warm_up()
    assert engine.lag == 1 and engine.scheduler.tuner._costs and not engine.busy


def test_lookup_may_draft_deeper_than_the_joint_tree(models):
    """Buffers fit the longest commit of all drafters: with the head off, lookup's tree is deeper."""
    small = TreeShape(3, 1, 1)
    scheduler = CostScheduler(Tuner((small, small)))
    scheduler.tuner.next = lambda requests, count: None  # the head is off: lookup drafts alone
    drafter = Mixed(NGram(min_match=1), HeadDrafter(models[1], small))
    engine = Engine(models[0], drafter, max_seq_len=300, compile=False, scheduler=scheduler)
    prompt = list(b"abcabcabcabc")
    (request,), (expected,) = (x.generate([prompt], Sampling(60)) for x in (engine, plain(models)))
    assert request.ids == expected.ids and "12 nodes" in request.trees
