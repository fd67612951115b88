"""Stop texts: found across tokens, cut exactly, and nothing comes out too early."""
import random

from tokens.stops import Found, StopStream


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the stop that is complete first, and that stop."""
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
            found = stream.push(ids[used : used + draw.randrange(1, 5)])
            out, used, stop = out + found.text, used + found.ids, found.stop
            assert text.startswith(out)
        out += "" if stop else stream.flush()
        assert (out, stop) == cut(text, stops)
        assert used == len((out + (stop or "")).encode())  # to the byte that completes it


def test_text_that_may_be_a_stop_is_held_back(byte_tokenizer):
    stream = StopStream(byte_tokenizer.stream(), ("END.",))
    assert stream.push(list(b"the EN")) == Found("the ", 6)
    assert stream.push(list(b"EN")) == Found("EN", 2)
    assert stream.push(list(b"D")) == Found("", 1)
    assert stream.flush() == "END"
    assert StopStream(byte_tokenizer.stream(), ()).push(list(b"END")) == Found("END", 3)
