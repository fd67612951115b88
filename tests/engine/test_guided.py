"""Outputs that fit a JSON schema. That drafted text is plain text then too: drafters/test_text.py."""
import json

import pytest
from helpers.decoding import load

from engine.runtime import Runtime
from engine.target import load_target
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
