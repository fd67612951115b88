"""The masks of a tree: what a guide that walked to a node alone would allow there, and the guide unmoved."""
import json
import random

import numpy as np

from tokens.grammar import Grammars

SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["a"],
    "properties": {"a": {"enum": [1, 12, "x"]}},
})
OUTPUTS = [b'{"a": 1}', b'{"a":12}', b'{ "a": "x" }', b'{"a":\n1 }']


def test_masks_of_trees(byte_tokenizer):
    """Branches along outputs, beside them and over their ends, from everywhere in a text."""
    chance, stop = random.Random(0), 257
    grammars = Grammars(byte_tokenizer, 259, [stop])

    def masks(text, tokens, parent):
        guide, rows = grammars.guide(SCHEMA), np.full((len(tokens), 9), -1, np.int32)
        guide.advance(text)
        guide.mask(tokens, parent, rows)
        return rows, guide

    for _ in range(30):
        text = [*chance.choice(OUTPUTS), stop]
        begin = chance.randrange(1, len(text))
        nodes, parent = [text[:begin]], [0]  # a node: the text up to it
        for _ in range(12):  # children of any node: the right token, a wrong one, the stop id
            parent.append(chance.randrange(len(nodes)))
            before = nodes[parent[-1]]
            right = (*text[len(before) :], stop)[0]
            nodes.append([*before, chance.choice([right, chance.randrange(256), stop])])
        rows, guide = masks(text[:begin], [node[-1] for node in nodes], parent)
        for row, node in zip(rows, nodes):
            (expected,), alone = masks(node, [0], [0])
            assert stop in node or alone.error or (row == expected).all()
        guide.advance(text[begin:])  # it stands where it stood
        assert guide.error is None
    for text in (b'{"b"', b"{" + b" " * 13):  # small models may write nothing but space
        assert "cannot be followed" in str(masks(text, [0], [0])[1].error), text
