"""A smaller model drafts: it reads what the target reads."""
import pytest
from helpers.decoding import ids, plain

from drafters.draft_model import DraftModel
from engine.engine import Engine
from sampling.options import Sampling
from tree import TreeShape

CHAIN = TreeShape(5, 3, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_is_never_wrong(models, temperature):
    """Every token it drafts is accepted, also with noise, and where a conversation goes on in kept caches: it
    reads what the target reads, where the target reads it. This is the whole of the drafter's book-keeping.
    """
    engine = Engine(models[0], DraftModel(models[0], CHAIN), chunks=(8,), max_seq_len=250, compile=False)
    text = prompt = [256, *range(97, 120)]
    for _ in range(3):
        request, = engine.generate([text], Sampling(41, temperature, seed=5))
        assert set(request.accept_lengths[:-1]) == {CHAIN.max_commit}
        assert request.cached == 0 if text is prompt else request.cached > len(text) - 8
        assert [request.ids] == ids(plain(models), [text], Sampling(41, temperature, seed=5))
        text = [*request.tokens, 50, 51, 52]
