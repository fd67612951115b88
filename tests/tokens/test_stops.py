"""Stop strings: found across tokens, cut exactly, with no part of them streamed."""
import json
import random

import numpy as np
import pytest

from tokens.grammar import Grammars
from tokens.stops import StopStream


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the text before the first complete stop string, and that string."""
    for end in range(len(text) + 1):
        found = [(text[:end].find(stop), -len(stop), stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)[0]], min(found)[2]
    return text, None


def test_random_texts_and_blocks(byte_tokenizer):
    draw = random.Random(1)
    for _ in range(2000):
        text = "".join(draw.choice("abé") for _ in range(draw.randrange(0, 14)))
        stops = tuple("".join(draw.choice("abé") for _ in range(draw.randrange(1, 4))) for _ in range(2))
        stream, ids = StopStream(byte_tokenizer.stream(), stops), [*text.encode()]
        out, used, stop = "", 0, None
        while used < len(ids) and stop is None:
            found = stream.emit(ids[used : used + draw.randrange(1, 5)])
            out, used, stop = out + found[0], used + found[1], found[2]
            assert text.startswith(out)
            if stop is None:  # no more waits than may begin a stop text
                waiting = bytes(ids[:used]).decode(errors="ignore").removeprefix(out)
                assert any(end.startswith(waiting) for end in stops)
        out += "" if stop else stream.flush()
        assert (out, stop) == cut(text, stops)
        assert used == len((out + (stop or "")).encode())  # to the byte that completes it


@pytest.mark.parametrize("stops, written, text, used, stop", [
    (("<eos>",), b"ab|c", "ab", 3, "<eos>"),
    (("<eos>",), b"ab<eos>c", "ab", 7, "<eos>"),  # letters that spell it, as before
    (("b<eos>\n<bos>",), b"a|b|\n^c", "a", 6, "b<eos>\n<bos>"),
    (("x<eos>y", "<bos>"), b"ax|b^", "axb", 5, "<bos>"),  # held back, then not a stop after all
    (("\n", "<eos>"), b"a|\n", "a", 2, "<eos>"),
    (("<eo",), b"a|b", "ab", 3, None), ((), b"a|b", "ab", 3, None),  # part of a name is no control token
])
def test_a_control_token_matches_its_name(byte_tokenizer, stops, written, text, used, stop):
    """In `written`, | stands for <eos> and ^ for <bos>."""
    ids = [{ord("|"): 257, ord("^"): 256}.get(b, b) for b in written]
    for size in (1, 3, 9):
        stream, out, done, found = StopStream(byte_tokenizer.stream(), stops), "", 0, None
        while done < len(ids) and not (found and found[2]):
            found = stream.emit(ids[done : done + size])
            out, done = out + found[0], done + found[1]
        out += "" if found[2] else stream.flush()
        assert (out, done, found[2]) == (text, used, stop)


# -- masks of a tree: what a guide that walked to a node alone would allow there -----------------------------


SCHEMA = json.dumps({
    "type": "object", "additionalProperties": False, "required": ["a"],
    "properties": {"a": {"enum": [1, 12, "x"]}},
})
OUTPUTS = [b'{"a": 1}', b'{"a":12}', b'{ "a": "x" }', b'{"a":\n1 }']


def test_masks_of_trees(byte_tokenizer):
    """Branches that follow the output, leave it, and run past its end, from every position."""
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
