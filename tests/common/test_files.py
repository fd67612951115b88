"""Files are there whole or not at all, whoever else writes them; what they hold is judged in one line."""
import os
import threading
from dataclasses import dataclass

import pytest
from helpers.refusals import refused
from typing_extensions import NotRequired, TypedDict

from common.errors import InputError
from common.files import atomic_path, read_json, read_lines, read_text
from common.schema import Digits, Name, Schema, number, schema_of, text, whole


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
    (None, "no such file"), (b"\xff", "cannot be read as JSON"), (b"[" * 200_000, "cannot be read as JSON"),
    (b"[1]", "expected a JSON object, found list"),
], ids=["missing", "not UTF-8", "too deep", "a list"])
def test_json_that_cannot_be_read(tmp_path, content, words):
    if content is not None:
        (tmp_path / "it.json").write_bytes(content)
    with refused(f"{tmp_path / 'it.json'}: {words}"):
        read_json(tmp_path / "it.json")


def test_texts_and_their_lines(tmp_path):
    """Only a newline ends a line."""
    (tmp_path / "it").write_bytes("\ufeffa\r\nb\rc\n".encode())
    assert read_text(tmp_path / "it") == "a\nb\nc\n" and [*read_lines(tmp_path / "it")] == ["a\r", "b\rc"]
    (tmp_path / "it").write_bytes(b"caf\xe9")
    for read in read_text, lambda path: [*read_lines(path)]:
        with refused(f"{tmp_path / 'it'}: cannot be read ('utf-8"):
            read(tmp_path / "it")


@dataclass
class Shape:
    size: whole(1, 9)
    eps: number(above=0, high=1) = 0.5
    layers: tuple[whole(), ...] = ()


FILE = Schema(TypedDict("File", {
    "token": whole() | list[whole()] | None, "by rows": NotRequired[dict[Digits, number()]],
    "name": NotRequired[Name], "words": NotRequired[text(3)], "shape": NotRequired[Shape],
}))


@pytest.mark.parametrize("value, words", [
    ({}, "token is missing; expected a value"), ([], "the file is []; expected a valid dictionary"),
    ({"token": [1, True]}, "is True; expected a valid integer"),
    ({"token": 1, "by rows": {"x": 1}}, "by rows.x is 'x'; expected String should match pattern"),
    ({"token": 1, "by rows": {"1": float("inf")}}, "by rows.1 is inf; expected a finite number"),
    ({"token": 1, "name": "../x"}, "name is '../x'; "),
    ({"token": 1, "words": "\x1b[31m"}, "words is '\\x1b[31m'; expected String should have at most 3"),
    ({"token": 1, "shape": {"size": 0}}, "shape.size is 0; expected greater than or equal to 1"),
    ({"token": 1, "shape": {"size": 1, "eps": 0}}, "shape.eps is 0; expected greater than 0"),
    ({"token": 1, "shape": {"size": 1, "layers": [0, 10**400]}}, "shape.layers.1 is 1000"),
], ids=str)
def test_what_does_not_fit_is_one_line(value, words):
    with pytest.raises(InputError) as e:
        FILE.require(value, "f.json", "delete it")
    said = str(e.value)
    assert said.startswith("f.json: ") and words in said and said.endswith("; delete it") and len(said) < 300


def test_what_fits_is_taken_as_it_is():
    for value in ({"token": None, "others": object}, {"token": [1], "by rows": {"1": 2}}):
        assert FILE.require(value, "f.json") is value
    schema_of(Shape).check({"size": 9, "eps": 1, "layers": [1, 2], "more": 0})
