"""The step on the golden models, in float32: the reference's trees, plain text, exact ends."""
import pytest
from helpers import GOLDEN
from helpers.decoding import check_distribution, ids, plain, prompts, replay, shape_of, speculative

from engine.run import Run
from sampling.options import Sampling
from tree import TreeShape

TRACES = sorted(GOLDEN.glob("eagle?.*.safetensors"))
SHAPES = [TreeShape(8, 2, 3), TreeShape(24, 5, 6), TreeShape(60, 7, 10), TreeShape(4, 2, 1)]


# -- the reference's trees -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_golden_trace(models, models1, path):
    replay(speculative(models if path.stem.startswith("eagle3") else models1, shape_of(path)), path)


def test_there_are_golden_traces():
    assert len(TRACES) == 7


# -- lossless ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [
    pytest.param(shape, marks=[pytest.mark.slow] * (shape.nodes == 60), id=str(shape)) for shape in SHAPES
])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 1.7, "top_k": 12},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.7},
    ],
    ids=str,
)
def test_same_seed_same_text(models, shape, settings):
    """16 prompts, 16 seeds: speculative text equals plain text, coupled or not."""
    texts = prompts(16, longest=90)
    sampling = [Sampling(40, seed=s * 7919, **settings) for s in range(16)]
    want = ids(plain(models, batch=16), texts, sampling)
    outputs = speculative(models, shape, batch=16).generate(texts, sampling)
    assert [o.ids for o in outputs] == want
    if settings.get("temperature"):
        assert ids(speculative(models, shape, coupled=False, batch=16), texts, sampling) == want
        samples = ids(plain(models, batch=16), texts[:1] * 16, sampling)
        assert len(set(map(tuple, samples))) == 16, "seeds must matter"


@pytest.mark.slow
def test_coupling_helps(models):
    """Statistical, seed fixed: with the shared noise the head guesses the target's samples more often."""
    texts, sampling = prompts(64, seed=3), [Sampling(40, temperature=1.0, seed=s) for s in range(64)]

    def tau(coupled):
        outputs = speculative(models, SHAPES[1], coupled, batch=64).generate(texts, sampling)
        lengths = [n for o in outputs for n in o.accept_lengths]
        return sum(lengths) / len(lengths)

    assert tau(True) > 1.1 * tau(False)


@pytest.mark.slow
def test_distribution_of_speculative_text(models):
    check_distribution(models[0], speculative(models, TreeShape(8, 2, 3), batch=256))


@pytest.mark.slow
def test_ragged_batch_equals_each_alone(models):
    texts = prompts(12, seed=1, longest=150)
    sampling = [Sampling(10 + 7 * i, temperature=float(i % 3) / 2, seed=i) for i in range(12)]
    together = ids(speculative(models, SHAPES[1], batch=12), texts, sampling)
    one = speculative(models, SHAPES[1])
    assert together == [ids(one, [t], [s])[0] for t, s in zip(texts, sampling)]
    groups = speculative(models, SHAPES[1], batch=5)  # 5 + 5 + 2: the last group leaves places empty
    assert ids(groups, texts, sampling) == together


@pytest.mark.slow
def test_32_ragged_prompts_of_every_length(models):
    """One batch of 32, from 1 to 200 tokens, ending at different times: each text is the plain one."""
    texts = [prompts(1, seed=50 + i, shortest=1 + 6 * i, longest=1 + 6 * i)[0] for i in range(32)]
    sampling = [Sampling(3 + i) for i in range(32)]
    one = plain(models)
    together = ids(speculative(models, SHAPES[1], batch=32), texts, sampling)
    assert together == [ids(one, [t], [s])[0] for t, s in zip(texts, sampling)]


def test_reading_late_changes_nothing(models):
    texts, sampling = prompts(3, seed=2), Sampling(60, temperature=0.7, seed=4)
    want = ids(speculative(models, SHAPES[0], batch=3, lag=0), texts, sampling)
    assert ids(speculative(models, SHAPES[0], batch=3, lag=1), texts, sampling) == want
    assert ids(speculative(models, SHAPES[0], batch=3, lag=3), texts, sampling) == want


def test_prefill_chunks_change_nothing(models):
    texts = prompts(4, seed=6, shortest=60, longest=200)
    want = ids(speculative(models, SHAPES[0], batch=4), texts, Sampling(30))
    for chunks in ((8,), (16, 128), (512,)):
        assert ids(speculative(models, SHAPES[0], batch=4, chunks=chunks), texts, Sampling(30)) == want


# -- where a text ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, *SHAPES[:3]], ids=str)
def test_ends_are_exact(models, shape):
    make = lambda **o: plain(models, **o) if shape is None else speculative(models, shape, **o)  # noqa: E731
    prompt = prompts(1, seed=9)[0]
    free = ids(plain(models), [prompt], Sampling(60))[0]
    decoder = make()
    for n in (1, 2, 3, 7, 20):
        (output,) = decoder.generate([prompt], Sampling(n))
        assert output.ids == free[:n] and output.finish == "length"
        assert sum(output.accept_lengths) == n - 1
    for at in (0, 1, 5, 13):
        stop = free[at]
        first = free.index(stop)
        (output,) = make(stop_ids=[stop, 299]).generate([prompt], Sampling(60))
        assert output.ids == free[: first + 1] and output.finish == "stop"
    for room in (1, 2, 9):
        (output,) = make(max_seq_len=len(prompt) + room).generate([prompt], Sampling(60))
        assert output.ids == free[:room] and output.finish == "cache"


def test_finished_sequences_stand_still(models):
    """One sequence stops at once, another goes on for long: the first one's state must not change."""
    decoder = speculative(models, SHAPES[1], batch=2)
    texts = prompts(2, seed=8)
    run = Run(decoder, texts, [Sampling(2), Sampling(80)])
    frozen = None
    for _ in run:
        if decoder.done[0] and not decoder.done[1]:
            state = (decoder.state.length[0].item(), decoder.state.tokens[0, : len(texts[0]) + 2].tolist())
            assert frozen in (None, state)
            frozen = state
    assert frozen and len(run.ids[0]) == 2 and len(run.ids[1]) == 80


def test_prompts_that_cannot_be_decoded_are_refused(models):
    decoder = speculative(models, SHAPES[0], max_seq_len=32, batch=2)
    for bad, words in (
        ([[]], "empty"), ([[1] * 32], "32 tokens.*cache holds 32"),
        ([[1], [320]], "prompt 2 holds token id 320"), ([[-1]], "-1"), ([[1]] * 3, "3 prompts"),
    ):
        with pytest.raises(ValueError, match=words):
            decoder.start(bad, Sampling(4))
    assert len(ids(decoder, [[1] * 31], Sampling(9))[0]) == 1


# -- keeping the conversation --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
def test_reuse_of_the_caches_equals_a_fresh_start(models, shape):
    decoder, fresh = speculative(models, shape), speculative(models, shape)
    talk, kept = prompts(1, seed=11, shortest=30)[0], 0
    for turn in range(4):
        settings = Sampling(25, temperature=0.5 * (turn % 2), seed=turn)
        run = Run(decoder, [talk], settings, reuse=True)
        for _ in run:
            pass
        want = fresh.generate([talk], settings)[0]
        assert run.ids[0] == want.ids and run.accept_lengths[0] == want.accept_lengths
        assert decoder._start[0] >= kept - 1 - shape.window, "what the caches held was read again"
        if turn == 2:
            talk, kept = talk[:40], 40  # the user edits the conversation: only its beginning is still valid
        else:
            talk = talk + run.ids[0]
            kept = len(talk)
        talk = talk + prompts(1, seed=20 + turn, longest=9)[0]
