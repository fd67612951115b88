"""Drafted text is plain text: all drafters, greedy and at temperature 1, with and without kernels."""
import pytest
from helpers.decoding import ids, load, plain
from helpers.drafters import NAMES, make_drafter

from checkpoint.loading import load_head, load_model
from engine.engine import Engine
from sampling.options import Sampling

PROMPTS = [list(b"u:the tide comes in and the tide\na:"), [256, *range(97, 120)], [256, 1]]
SAMPLED = [Sampling(40, 1.0, seed=seed) for seed in range(3)]
SIZES = {"batch": 3, "max_seq_len": 200}
DRAFTING = [name for name in NAMES if name != "plain"]
SAME = [name for name in DRAFTING if name != "residual"]  # which draws with other random numbers


@pytest.mark.parametrize("name", DRAFTING)
def test_in_pytorch(models, models1, name):
    drafter = make_drafter(name, *models, models1[1], lambda model: None)
    engine = Engine(models[0], drafter, compile=False, **SIZES)
    greedy = engine.generate(PROMPTS, Sampling(40))
    assert [r.ids for r in greedy] == ids(plain(models, **SIZES), PROMPTS, Sampling(40))
    assert sum(len(r.accept_lengths) for r in greedy) <= 3 * 39
    if name in SAME:
        assert ids(engine, PROMPTS, SAMPLED) == ids(plain(models, **SIZES), PROMPTS, SAMPLED)


@pytest.fixture(scope="module", params=("fp32", "bf16"))
def on_kernels(request, golden):
    """make(name) -> an engine on the CPU kernels, where 16-bit heads become int8; and the plain texts."""
    llm = load(golden, device="cpu", dtype=request.param, **SIZES)
    target, (raw, _) = llm.target, load_model(golden, "cpu", llm.target.runtime.torch_dtype)
    assert target.model.on_kernels

    def prepare(*models):
        target.put_on_kernels(*models, int8=True)

    def make(name: str) -> Engine:
        heads = [load_head(golden / kind, target.model, kind) for kind in ("eagle3", "eagle")]
        prepare(*heads)
        model = target.model if name == "draft-model" else raw  # new heads copy tables that are not packed
        return Engine(target.model, make_drafter(name, model, *heads, prepare), **SIZES)

    return make, [ids(llm.engine, PROMPTS, sampling) for sampling in (Sampling(40), SAMPLED)]


@pytest.mark.compile
@pytest.mark.parametrize("name", SAME)
def test_on_the_kernels(on_kernels, name):
    make, expected = on_kernels
    engine = make(name)
    assert [ids(engine, PROMPTS, sampling) for sampling in (Sampling(40), SAMPLED)] == expected
