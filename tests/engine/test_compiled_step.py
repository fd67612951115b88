"""The compiled step on the golden models: the reference's trees, the text of eager plain decoding."""
import pytest
from helpers import GOLDEN
from helpers.decoding import ids, plain, prompts, replay, shape_of, speculative

from sampling.options import Sampling

pytestmark = [pytest.mark.compile, pytest.mark.slow]
TRACE = GOLDEN / "eagle3.T8D2K3.p2.safetensors"


@pytest.fixture(scope="module")
def compiled(models):
    """The decoder that all tests share: compiling it is the slow part."""
    return speculative(models, shape_of(TRACE), compile=True)


def test_it_draws_the_golden_trees(compiled):
    replay(compiled, TRACE)


def test_it_equals_eager_and_is_never_compiled_again(models, compiled):
    """20 prompts of different lengths over several live spans: same text as eager plain decoding, no
    recompilation.
    """
    from torch._dynamo.utils import counters

    eager = plain(models)
    ids(compiled, [[1, 2]], Sampling(2))  # warm-up
    before = counters["stats"]["unique_graphs"]
    for i, prompt in enumerate(prompts(20, seed=12, longest=230)):
        assert ids(compiled, [prompt], Sampling(12 + i)) == ids(eager, [prompt], Sampling(12 + i))
    assert counters["stats"]["unique_graphs"] == before


def test_sampling_equals_eager(models, compiled):
    eager = plain(models)
    for seed, prompt in enumerate(prompts(6, seed=13)):
        sampling = Sampling(40, temperature=1.0, top_k=50, top_p=0.95, seed=seed)
        assert ids(compiled, [prompt], sampling) == ids(eager, [prompt], sampling)
