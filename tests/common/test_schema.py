"""What is said of a file that holds something else than its type."""
from dataclasses import dataclass
from typing import Literal

import pytest
from helpers.refusals import refused
from typing_extensions import NotRequired, TypedDict

from common.schema import Digits, Flag, Name, Schema, Sha256, number, schema_of, text, whole


@dataclass
class Shape:
    size: whole(1, 9)
    eps: number(above=0, high=1) = 0.5
    mode: Literal["a", "b"] | Flag | None = None
    layers: tuple[whole(), ...] = ()


FILE = Schema(TypedDict("File", {
    "token": whole() | list[whole()] | None, "by rows": NotRequired[dict[Digits, number()]],
    "name": NotRequired[Name], "sha256": NotRequired[Sha256], "words": NotRequired[text(3)],
    "shape": NotRequired[Shape],
}))


def test_what_fits_is_taken_as_it_is():
    shape = {"size": 3}
    for value in ({"token": None, "others": object}, {"token": [1], "by rows": {"1": 2}, "shape": shape}):
        assert FILE.require(value, "f.json") is value
    schema_of(Shape).check({"size": 9, "eps": 1, "mode": True, "layers": [1, 2], "more": 0})


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
