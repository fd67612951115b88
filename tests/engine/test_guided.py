"""Outputs that fit a JSON schema. That drafted text is plain text then too: drafters/test_text.py."""
import json

import pytest
from helpers.decoding import load, plain

from common.errors import InputError
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
@pytest.fixture(scope="module")
def guide(golden):
    return load_target(golden, Runtime(compile=False)).guide


def fits(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"word", "count", "more"} and len(value["word"]) <= 8 and 0 <= value["count"] <= 99
        and len(value["more"]) <= 3 and set(value["more"]) <= {"red", "green", "blue"}
    )


@pytest.mark.parametrize("temperature", (0.0, 1.5))
def test_the_output_fits(golden, temperature):
    model = load(golden, "eagle3", tree=TreeShape(16, 3, 4), compile=False)
    for seed in range(3):
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
