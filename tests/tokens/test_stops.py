"""Stop strings: found across tokens, removed exactly, never streamed; token masks of draft trees."""
import json
import random

import numpy as np
import pytest

from tokens.grammar import Grammars
from tokens.stops import StopStream


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the text before the first complete stop string, and that string."""
    for end in range(len(text) + 1):
        found = [(text[:end].find(stop), -len(stop), stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)[0]], min(found)[2]
    return text, None


def test_random_stop_strings_equal_the_reference(byte_tokenizer):
    rng = random.Random(1)
    for _ in range(2000):
        text = "".join(rng.choice("abé") for _ in range(rng.randrange(0, 14)))
        stops = tuple("".join(rng.choice("abé") for _ in range(rng.randrange(1, 4))) for _ in range(2))
        stream, ids = StopStream(byte_tokenizer.stream(), stops), [*text.encode()]
        out, used, stop = "", 0, None
        while used < len(ids) and stop is None:
            emitted = stream.emit(ids[used : used + rng.randrange(1, 5)])
            out, used, stop = out + emitted[0], used + emitted[1], emitted[2]
            assert text.startswith(out)
            if stop is None:  # held-back text is the start of a stop string
                waiting = bytes(ids[:used]).decode(errors="ignore").removeprefix(out)
                assert any(end.startswith(waiting) for end in stops)
        out += "" if stop else stream.flush()
        assert (out, stop) == cut_at_stop(text, stops)
        assert used == len((out + (stop or "")).encode())  # up to the byte that completes the stop string


@pytest.mark.parametrize("stops, output, text, used, stop", [
    (("<eos>",), b"ab|c", "ab", 3, "<eos>"),
    (("<eos>",), b"ab<eos>c", "ab", 7, "<eos>"),  # its name as plain text matches too
    (("b<eos>\n<bos>",), b"a|b|\n^c", "a", 6, "b<eos>\n<bos>"),
    (("x<eos>y", "<bos>"), b"ax|b^", "axb", 5, "<bos>"),  # held back, then released
    (("\n", "<eos>"), b"a|\n", "a", 2, "<eos>"),
    (("<eo",), b"a|b", "ab", 3, None), ((), b"a|b", "ab", 3, None),  # part of a name does not match
])
def test_a_control_token_matches_its_name(byte_tokenizer, stops, output, text, used, stop):
    """In `output`, | stands for <eos> and ^ for <bos>."""
    ids = [{ord("|"): 257, ord("^"): 256}.get(b, b) for b in output]
    for size in (1, 3, 9):
        stream, out, done, emitted = StopStream(byte_tokenizer.stream(), stops), "", 0, None
        while done < len(ids) and not (emitted and emitted[2]):
            emitted = stream.emit(ids[done : done + size])
            out, done = out + emitted[0], done + emitted[1]
        out += "" if emitted[2] else stream.flush()
        assert (out, done, emitted[2]) == (text, used, stop)


# -- masks of a tree: those of a guide that has advanced to the node -----------------------------------------


SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["a"],
    "properties": {"a": {"enum": [1, 12, "x"]}},
})
OUTPUTS = [b'{"a": 1}', b'{"a":12}', b'{ "a": "x" }', b'{"a":\n1 }']


def test_tree_masks_equal_masks_of_single_nodes(byte_tokenizer):
    """Random trees with branches that follow the output, leave it, and continue after its end."""
    rng, stop = random.Random(0), 257
    grammars = Grammars(byte_tokenizer, 259, [stop])

    def masks(text, tokens, parent):
        guide, rows = grammars.guide(SCHEMA), np.full((len(tokens), 9), -1, np.int32)
        guide.advance(text)
        guide.mask(tokens, parent, rows)
        return rows, guide

    for _ in range(30):
        text = [*rng.choice(OUTPUTS), stop]
        committed = rng.randrange(1, len(text))
        nodes, parent = [text[:committed]], [0]  # a node is the sequence up to it
        for _ in range(12):  # children: the output's next token, a random one, or the stop id
            parent.append(rng.randrange(len(nodes)))
            before = nodes[parent[-1]]
            next_token = (*text[len(before) :], stop)[0]
            nodes.append([*before, rng.choice([next_token, rng.randrange(256), stop])])
        rows, guide = masks(text[:committed], [node[-1] for node in nodes], parent)
        for row, node in zip(rows, nodes):
            (expected,), node_guide = masks(node, [0], [0])
            assert stop in node or node_guide.error or (row == expected).all()
        guide.advance(text[committed:])  # `mask` has not changed its state
        assert guide.error is None
    for text in (b'{"b"', b"{" + b" " * 13):  # a wrong key; too much white space
        assert "cannot be satisfied" in str(masks(text, [0], [0])[1].error), text
