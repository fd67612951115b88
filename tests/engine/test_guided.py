"""Outputs that fit a JSON schema: with every drafter the text of plain decoding, masked node by node."""
import json

import pytest
from helpers.decoding import load, plain, prompts
from helpers.drafters import NAMES, make_drafter

from common.errors import InputError
from engine.engine import Engine
from engine.runtime import Runtime
from engine.target import load_target
from sampling.options import Sampling
from tokens.schema import ANY_OBJECT
from tree import TreeShape

SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["word", "count", "more"],
    "properties": {
        "word": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "more": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
})
ALL = {
    "min_p": 0.01, "presence_penalty": 0.3, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "top_k": 60,
    "logit_bias": {101: 1}, "logprobs": 2, "top_p": 0.98,
}


@pytest.fixture(scope="module")
def guide(golden):
    return load_target(golden, Runtime(compile=False)).guide


def fits(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"word", "count", "more"} and len(value["word"]) <= 8 and 0 <= value["count"] <= 99
        and len(value["more"]) <= 3 and set(value["more"]) <= {"red", "green", "blue"}
    )


CASES = [(name, {}) for name in NAMES if name not in ("plain", "residual")]
CASES += [("eagle3", ALL), ("lookahead", ALL)]


@pytest.mark.parametrize("name, more", CASES, ids=lambda x: x if isinstance(x, str) else len(x))
def test_text_is_plain_text(golden, models, models1, guide, name, more):
    """Three texts at once: one free, two guided, at temperature 0 and above."""
    target, stop_ids = models[0], json.loads((golden / "config.json").read_text())["stop_ids"]
    options = {"batch": 3, "max_seq_len": 300, "compile": False, "guide": guide, "stop_ids": stop_ids}
    requests = [
        Sampling(230, 0.0, json_schema=SCHEMA, **more), Sampling(30, 0.9, seed=1),
        Sampling(230, 1.0, seed=2, json_schema=SCHEMA, **more),
    ]
    given = prompts(3, seed=31)
    drafter = make_drafter(name, target, models[1], models1[1], lambda heads: None)
    wanted = Engine(target, **options).generate(given, requests)
    found = Engine(target, drafter, **options).generate(given, requests)
    assert [o.ids for o in found] == [o.ids for o in wanted]
    assert found[1].ids == plain(models, stop_ids=stop_ids).generate([given[1]], requests[1])[0].ids
    for i in (0, 2):
        assert found[i].finish == "stop"


@pytest.mark.parametrize("temperature", (0.0, 1.5))
def test_the_output_fits(golden, temperature):
    model = load(golden, "eagle3", tree=TreeShape(16, 3, 4), compile=False)
    for seed in range(6):
        settings = {"max_new_tokens": 230, "temperature": temperature, "seed": seed}
        result = model.generate(f"number {seed}", json_schema=SCHEMA, **settings)
        assert result.finish == "stop" and fits(result.text)
    assert max(result.accept_lengths) > 1


def test_cut_short_it_is_the_beginning(golden):
    model = load(golden, compile=False)
    whole = model.generate("x", max_new_tokens=150, json_schema=SCHEMA)
    short = model.generate("x", max_new_tokens=9, json_schema=SCHEMA)
    assert short.finish == "length" and whole.text.startswith(short.text)
    assert model.generate("x", max_new_tokens=20, json_schema=ANY_OBJECT).text.startswith("{")


@pytest.mark.parametrize("schema, words", [
    ("{", "cannot be used"), ('{"type": "objekt"}', "objekt"), ("[1]", "cannot be used"),
    ('{"a": "' + "x" * 70000 + '"}', "at most 65,536"), ('{"$ref": "#/nowhere"}', "cannot be used"),
])
def test_bad_schemas_are_refused(guide, schema, words):
    with pytest.raises(InputError, match="JSON schema") as error:
        guide(schema)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_without_a_tokenizer(models):
    with pytest.raises(ValueError, match="needs a tokenizer"):
        plain(models).admit([1], Sampling(json_schema=SCHEMA))
