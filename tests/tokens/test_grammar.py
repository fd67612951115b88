"""The masks of a tree: what a guide that walked to a node alone would allow there, and the guide unmoved."""
import json
import random

import numpy as np
import pytest

from common.errors import InputError
from tokens.grammar import Grammars

SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["a"],
    "properties": {"a": {"enum": [1, 12, "x"]}},
})
OUTPUTS = [b'{"a": 1}', b'{"a":12}', b'{ "a": "x" }', b'{"a":\n1 }']


@pytest.fixture(scope="module")
def grammars(byte_tokenizer):
    stop = next(iter(byte_tokenizer.control.values()))
    return Grammars(byte_tokenizer, 259, [stop]), stop


def masks(guide, tokens: list[int], parent: list[int]) -> np.ndarray:
    rows = np.full((len(tokens), 9), -1, np.int32)
    guide.mask(tokens, parent, rows)
    return rows


def test_masks_of_trees(grammars):
    """Branches along outputs, beside them and over their ends, from everywhere in a text."""
    made, stop = grammars
    chance = random.Random(0)
    for _ in range(60):
        text = [*chance.choice(OUTPUTS), stop]
        begin = chance.randrange(1, len(text))
        guide = made.guide(SCHEMA)
        guide.take(text[:begin])
        tokens, parent, paths = [text[begin - 1]], [0], [[]]
        for _ in range(12):  # children of any node: the right token, a wrong one, the stop id
            node = chance.randrange(len(tokens))
            at = begin + len(paths[node])
            token = chance.choice([text[at] if at < len(text) else stop, chance.randrange(256), stop])
            tokens.append(token)
            parent.append(node)
            paths.append([*paths[node], token])
        for row, path in zip(masks(guide, tokens, parent), paths):
            alone = made.guide(SCHEMA)
            alone.take([*text[:begin], *path])
            if stop not in path and not alone.error:
                assert (row == masks(alone, [0], [0])[0]).all()
        guide.take(text[begin:])  # it stands where it stood
        assert guide.error is None


def test_after_a_mistake_it_says_so(grammars):
    guide = grammars[0].guide(SCHEMA)
    assert guide.error is None
    guide.take(b'{"b"')
    assert "cannot be followed" in guide.error and "\n" not in guide.error


@pytest.mark.parametrize("schema, words", [
    ('{"$ref": "#"}', "cannot be followed"),  # compiles, and fails at the first mask
    ('{"type": "no such type"}', "cannot be used"), ("{", "cannot be used"),
    ('{"description": "' + "x" * (1 << 16) + '"}', r"has 65,\d+ characters, at most 65,536"),
])
def test_a_schema_that_nothing_can_follow(grammars, schema, words):
    with pytest.raises(InputError, match=f"the JSON schema {words}") as e:
        grammars[0].guide(schema)
    assert str(e.value).isprintable()
