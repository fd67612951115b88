"""Drafted text is plain text: every drafter, every sort of request, with and without kernels."""
import json
import random

import pytest
from helpers.decoding import OPTIONS, alone, check_texts, decode, ids, load, prompts, requests
from helpers.drafters import NAMES, cases, make_drafter

from checkpoint.loading import load_head, load_model
from engine.engine import Engine
from engine.runtime import Runtime
from engine.target import load_target
from sampling.options import Sampling

PROMPTS = [list(b"u:the tide comes in and the tide\na:"), [256, *range(97, 120)], [256, 1]]
SAMPLED = [Sampling(40, 1.0, seed=seed) for seed in range(3)]
SIZES = {"batch": 3, "max_seq_len": 200}
DRAFTING = [name for name in NAMES if name != "plain"]
SAME = [name for name in DRAFTING if name != "residual"]  # which draws with other random numbers
SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["word", "count"],
    "properties": {"word": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99}},
})
EVERYTHING = {
    "min_p": 0.02, "presence_penalty": 0.3, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
    "logit_bias": {101: 2}, "top_p": 0.95, "top_k": 40, "logprobs": 3,
}


@pytest.fixture(scope="module")
def asked(golden, models):
    """(Requests of every sort, their plain texts, options of an engine that can decode them)."""
    of_all = (*OPTIONS, EVERYTHING, EVERYTHING | {"temperature": 0.8})
    guided = [{"json_schema": SCHEMA}, {"json_schema": SCHEMA, "temperature": 1.0, "min_p": 0.01}]
    made = requests(8, 1, of_all) + [
        (prompt, Sampling(40, seed=i, **guided[i])) for i, prompt in enumerate(prompts(2, seed=31))
    ]
    made += [(prompt, Sampling(30)) for prompt in PROMPTS[:2]]  # which repeat themselves
    target = load_target(golden, Runtime("cpu", compile=False))
    options = {"guide": target.guide, "stop_ids": target.config["stop_ids"]}
    return made, alone(models, made, **options), options


@pytest.mark.parametrize("name", cases(DRAFTING))
def test_in_pytorch(models, models1, asked, name):
    """Three at a time, as they come and go; each is what it is alone."""
    (made, expected, options), target = asked, models[0]
    if name not in SAME:
        greedy = [not sampling.temperature for _, sampling in made]
        made, expected = ([x for x, kept in zip(xs, greedy) if kept] for xs in (made, expected))
    drafter = make_drafter(name, *models, models1[1], lambda model: None)
    engine = Engine(target, drafter, batch=3, max_seq_len=300, compile=False, **options)
    check_texts(decode(engine, made, random.Random(2)), expected, made)


@pytest.fixture(scope="module", params=("fp32", "bf16"))
def on_kernels(request, golden):
    """make(name) -> an engine on the CPU kernels, where 16-bit heads become w8a8; and the plain texts."""
    llm = load(golden, device="cpu", dtype=request.param, **SIZES)
    target, (raw, _) = llm.target, load_model(golden, "cpu", llm.target.runtime.torch_dtype)
    assert target.model.whole and target.backend.row_invariant

    def prepare(*models):
        target.put_on_kernels(*models, quantised=True)

    def make(name: str) -> Engine:
        heads = [load_head(golden / kind, target.model, kind) for kind in ("eagle3", "eagle")]
        prepare(*heads)
        model = target.model if name == "draft-model" else raw  # new heads copy tables that are not packed
        return Engine(target.model, make_drafter(name, model, *heads, prepare), **SIZES)

    return make, [ids(llm.engine, PROMPTS, sampling) for sampling in (Sampling(40), SAMPLED)]


@pytest.mark.kernels
@pytest.mark.parametrize("name", SAME)
def test_on_the_kernels(on_kernels, name):
    make, expected = on_kernels
    engine = make(name)
    for sampling, want in zip(([Sampling(40)] * 3, SAMPLED), expected):
        check_texts(ids(engine, PROMPTS, sampling), want, list(zip(PROMPTS, sampling)))
