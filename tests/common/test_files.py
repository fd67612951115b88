"""Files are there whole or not at all, whoever else writes them; what they hold is judged in one line."""
import os
import threading
from dataclasses import dataclass
from typing import Literal

import pytest
from helpers.refusals import refused
from typing_extensions import NotRequired, TypedDict

from common import files
from common.errors import InputError
from common.files import atomic_path, read_json, read_lines, read_text
from common.schema import Digits, Flag, Name, Schema, number, schema_of, text, whole


def test_whole_or_not_at_all(tmp_path):
    path = tmp_path / "it"
    path.write_text("before")
    with pytest.raises(RuntimeError), atomic_path(path) as part:
        part.write_text("half")
        assert path.read_text() == "before"
        raise RuntimeError
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["it"]
    both = threading.Barrier(2)

    def write(text: str) -> None:  # two writers: each has a file of its own until it is whole
        with atomic_path(str(path)) as part:
            part.write_text(text)
            both.wait()

    threads = [threading.Thread(target=write, args=(c * 1000,)) for c in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("a" * 1000, "b" * 1000) and os.listdir(tmp_path) == ["it"]
    (tmp_path / "link").symlink_to(path)  # links and devices stay what they are
    with atomic_path(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").is_symlink() and path.read_text() == "new"
    with atomic_path(os.devnull) as part:
        part.write_text("nothing")
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize("content, words", [
    (None, "no such file"), (b"\xff\xfe", "cannot be read as JSON"),
    (b"[" * 200_000, "cannot be read as JSON"), (b"[1]", "expected a JSON object, found list"),
], ids=["missing", "not UTF-8", "too deep", "a list"])
def test_json_that_cannot_be_read(tmp_path, content, words):
    if content is not None:
        (tmp_path / "it.json").write_bytes(content)
    with refused(f"{tmp_path / 'it.json'}: {words}"):
        read_json(tmp_path / "it.json")


def test_texts(tmp_path):
    (tmp_path / "it").write_bytes("\ufeffa\r\nb\rc\n".encode())
    assert read_text(tmp_path / "it") == "a\nb\nc\n"
    (tmp_path / "it").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"is no UTF-8 \(byte 3\)"):
        read_text(tmp_path / "it")


@dataclass
class Shape:
    size: whole(1, 9)
    eps: number(above=0, high=1) = 0.5
    mode: Literal["a", "b"] | Flag | None = None
    layers: tuple[whole(), ...] = ()


FILE = Schema(TypedDict("File", {
    "token": whole() | list[whole()] | None, "by rows": NotRequired[dict[Digits, number()]],
    "name": NotRequired[Name], "words": NotRequired[text(3)], "shape": NotRequired[Shape],
}))


@pytest.mark.parametrize("value, words", [
    ({}, "token is missing; expected a value"), ([], "the file is []; expected an object"),
    ({"token": "x"}, "token is 'x'; expected a whole number or a list"),
    ({"token": [1, True]}, "token[1] is true; expected a whole number"),
    ({"token": 1, "by rows": {"x": 1}}, "by rows.x is 1; expected digits"),
    ({"token": 1, "by rows": {"1": float("inf")}}, "by rows.1 is inf; expected a finite number"),
    ({"token": 1, "name": "../x"}, "name is '../x'; expected a name of a file"),
    ({"token": 1, "words": "\x1b[31m"}, "words is '\\x1b[31m'; expected at most 3"),
    ({"token": 1, "shape": {"size": 0}}, "shape.size is 0; expected at least 1"),
    ({"token": 1, "shape": {"size": 1, "eps": 0}}, "shape.eps is 0; expected above 0"),
    ({"token": 1, "shape": {"size": 1, "mode": "c"}}, "shape.mode is 'c'; expected 'a' or 'b' or true"),
    ({"token": 1, "shape": {"size": 1, "layers": [0, 10**400]}}, "shape.layers[1] is 1000"),
], ids=str)
def test_what_does_not_fit_is_one_line(value, words):
    with refused(f"f.json: {words}") as e:
        FILE.require(value, "f.json", "delete it")
    assert str(e.value).endswith("; delete it") and str(e.value).isprintable() and len(str(e.value)) < 300


def test_what_fits_is_taken_as_it_is():
    for value in ({"token": None, "others": object}, {"token": [1], "by rows": {"1": 2}}):
        assert FILE.require(value, "f.json") is value
    schema_of(Shape).check({"size": 9, "eps": 1, "mode": True, "layers": [1, 2], "more": 0})


def test_lines_of_a_text(tmp_path, monkeypatch):
    """Only a newline ends one; each has a most of bytes."""
    path = tmp_path / "it.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert list(read_lines(path)) == ["a\r", "b\rc"]
    monkeypatch.setattr(files, "LONGEST_LINE", 3)
    with refused(f"{path}: line 1 has more than 3 bytes"):
        list(read_lines(path))
