"""Stop texts: found across tokens, cut exactly, and nothing comes out too early."""
import random

import pytest
from helpers.tokenizers import write_byte_tokenizer

from tokens.stops import Found, StopStream
from tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder)


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the stop that is complete first, and that stop."""
    for end in range(len(text) + 1):
        found = [(text[:end].find(stop), -len(stop), stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)[0]], min(found)[2]
    return text, None


def read(tokenizer, text: str, stops: tuple[str, ...], sizes) -> tuple[str, int, str | None]:
    """What comes out of blocks of these sizes: the text, how many bytes count, which stop."""
    stream, ids, out, used = StopStream(tokenizer.stream(), stops), list(text.encode()), "", 0
    while ids:
        size = next(sizes)
        block, ids = ids[:size], ids[size:]
        found = stream.push(block)
        out, used = out + found.text, used + found.ids
        assert text.startswith(out)
        if found.stop is not None:
            return out, used, found.stop
    return out + stream.flush(), used, None


def test_random_texts_and_blocks(tokenizer):
    draw = random.Random(1)
    for _ in range(2000):
        text = "".join(draw.choice("abé") for _ in range(draw.randrange(0, 14)))
        stops = tuple("".join(draw.choice("abé") for _ in range(draw.randrange(1, 4))) for _ in range(2))
        expected, stop = cut(text, stops)
        out, used, found = read(tokenizer, text, stops, iter(lambda: draw.randrange(1, 5), None))
        assert (out, found) == (expected, stop)
        if stop is None:
            assert used == len(text.encode())
        else:  # to the byte that completes it
            assert used == len((expected + stop).encode())


def test_what_may_be_a_stop_is_held_back(tokenizer):
    stream = StopStream(tokenizer.stream(), ("END.",))
    assert stream.push(list(b"the EN")) == Found("the ", 6)
    assert stream.push(list(b"EN")) == Found("EN", 2)
    assert stream.push(list(b"D")) == Found("", 1)
    assert stream.flush() == "END"


def test_without_stops_text_comes_at_once(tokenizer):
    assert StopStream(tokenizer.stream(), ()).push(list(b"END")) == Found("END", 3)
