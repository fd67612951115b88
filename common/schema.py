"""What a file that configures something may hold: the type and the range of every key, declared once.

A `Record` is checked where such a file is written and where it is read, before anything is made of it. A
dataclass whose fields are declared with `key` has such a record too (`record_of`). Nothing here takes time to
import.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import InputError

ABSENT = object()
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60
SHORT.maxlong, SHORT.maxlevel = 40, 3
SHORT.maxlist = SHORT.maxtuple = 12


class Wrong(ValueError):
    """A key holds something else than is expected. The message names it, what was found and what is expected.
    """

    def __init__(self, key: str, found: Any, expected: str):
        self.key, self.found, self.expected = key, found, expected
        what = "is missing" if found is ABSENT else f"is {in_words(found)}"
        super().__init__(f"{key} {what}; expected {expected}")

    def of(self, key: str) -> Wrong:
        """The same of a key of another name."""
        return Wrong(key, self.found, self.expected)


def in_words(value: Any) -> str:
    """A value as a file holds it, short, on one line, its control characters escaped."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) is int and abs(value) >= 10**30:
        return f"a whole number of {int(math.log10(abs(value))) + 1:,} digits"
    return SHORT.repr(list(value) if isinstance(value, tuple) else value)


class Kind:
    """What a value has to be. `words` say it."""

    words = "anything"

    def holds(self, value: Any) -> bool:
        """Whether a value is of this kind. Kinds that hold others override `check`."""
        return True

    def check(self, value: Any, key: str) -> None:
        """Raise Wrong unless the value of this key is of this kind."""
        if not self.holds(value):
            raise Wrong(key, value, self.words)


class Whole(Kind):
    """A whole number from `low` to `high`, both included. true and 1.0 are none."""

    def __init__(self, low: int = 0, high: int = 2**31 - 1):
        self.low, self.high, self.words = low, high, f"a whole number from {low:,} to {high:,}"

    def holds(self, value: Any) -> bool:
        return type(value) is int and self.low <= value <= self.high


class Number(Kind):
    """A finite number from `low` to `high`, both included; with `above`, greater than that instead."""

    def __init__(self, low: float = -1e300, high: float = 1e300, above: float | None = None):
        self.low, self.high, self.above = low, high, above
        first = f"from {low:,g}" if above is None else f"above {above:,g}"
        self.words = f"a number {first} to {high:,g}"

    def holds(self, value: Any) -> bool:
        if type(value) not in (int, float) or not self.low <= value <= self.high:  # nan is not, either
            return False
        return self.above is None or value > self.above


class Flag(Kind):
    """true or false."""

    words = "true or false"

    def holds(self, value: Any) -> bool:
        return type(value) is bool


class Text(Kind):
    """A text, if choices are given one of them."""

    def __init__(self, *choices: str, most: int = 1 << 20):
        self.choices, self.most = choices, most
        size = "" if most == 1 << 20 else f" of at most {most:,} characters"
        self.words = " or ".join(map(repr, choices)) if choices else f"a text{size}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) <= self.most and (
            not self.choices or value in self.choices
        )


class Digits(Kind):
    """A whole number in quotes, as a name has to be: of at most 8 digits."""

    words = "a whole number of at most 8 digits"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 8


class Sha256(Kind):
    """A sha256 in hexadecimal, as hashlib gives it."""

    words = "a sha256, 64 of the digits 0 to 9 and a to f"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and len(value) == 64 and {*value} <= {*"0123456789abcdef"}


class Name(Kind):
    """A text that may name a file or a folder, inside a folder of ours."""

    words = "a name of 1 to 200 characters without / in it, which does not begin with a dot"

    def holds(self, value: Any) -> bool:
        fits = isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()
        return fits and value[0] != "." and not {"/", "\\"} & {*value}


class Among(Kind):
    """One of these numbers."""

    def __init__(self, *choices: int):
        self.choices, self.words = choices, " or ".join(map(str, choices))

    def holds(self, value: Any) -> bool:
        return type(value) is int and value in self.choices


class Either(Kind):
    """Any of several kinds."""

    def __init__(self, *kinds: Kind):
        self.kinds, self.words = kinds, " or ".join(kind.words for kind in kinds)

    def check(self, value: Any, key: str) -> None:
        inner = None
        for kind in self.kinds:
            try:
                return kind.check(value, key)
            except Wrong as e:
                if e.key != key:  # the kind is the one that is meant, and something inside it is wrong
                    inner = e
        raise inner or Wrong(key, value, self.words)


class Null(Kind):
    """null."""

    words = "null"

    def holds(self, value: Any) -> bool:
        return value is None


def maybe(kind: Kind) -> Either:
    """This kind, or null."""
    return Either(Null(), kind)


class List(Kind):
    """A list of so many values of a kind; ascending: each greater than the one before."""

    def __init__(self, kind: Kind, least: int = 0, most: int = 1 << 24, ascending: bool = False):
        self.kind, self.least, self.most, self.ascending = kind, least, most, ascending
        size = f"{least:,} or more" if least and most == 1 << 24 else f"{least:,} to {most:,}"
        size = f"{least:,}" if least == most else size
        self.words = "a list" + (f" of {size}" if least or most < 1 << 24 else "")
        self.words += (", ascending" if ascending else "") + f"; in it {kind.words}"

    def check(self, value: Any, key: str) -> None:
        if not isinstance(value, (list, tuple)) or not self.least <= len(value) <= self.most:
            raise Wrong(key, value, self.words)
        for i, item in enumerate(value):
            self.kind.check(item, f"{key}[{i}]")
        if self.ascending and any(a >= b for a, b in pairwise(value)):
            raise Wrong(key, value, self.words)


class Map(Kind):
    """An object of any keys, all of one kind, whose values are of another."""

    def __init__(self, kind: Kind, keys: Kind | None = None):
        self.kind, self.keys, self.words = kind, keys or Kind(), "an object"

    def check(self, value: Any, key: str) -> None:
        if not isinstance(value, dict):
            raise Wrong(key, value, self.words)
        for name, item in value.items():
            self.keys.check(name, f"a name in {key}")
            self.kind.check(item, f"{key}.{in_words(name)[1:-1]}")


class Record(Kind):
    """An object with keys that it needs and keys that it may have; of others it knows nothing.

    rules: called with an object whose keys are all right; they raise Wrong on what contradicts itself.
    """

    words = "an object"

    def __init__(
        self, needed: dict[str, Kind] | None = None, optional: dict[str, Kind] | None = None,
        *rules: Callable[[dict], None],
    ):
        self.needed, self.optional, self.rules = needed or {}, optional or {}, rules

    def check(self, value: Any, key: str = "") -> None:
        if not isinstance(value, dict):
            raise Wrong(key or "the file", value, self.words)
        dot = f"{key}." if key else ""
        for name, kind in self.needed.items():
            if name not in value:
                raise Wrong(dot + name, ABSENT, kind.words)
        for name, kind in (self.needed | self.optional).items():
            if name in value:
                kind.check(value[name], dot + name)
        for rule in self.rules:
            try:
                rule(value)
            except Wrong as e:
                raise e.of(dot + e.key) if dot else e from None

    def require(self, value: Any, where: str | Path, advice: str = "") -> Any:
        """The value. Raises InputError, which names the file and ends in the advice, if it is wrong."""
        try:
            self.check(value)
        except Wrong as e:
            raise InputError(f"{where}: {e}{advice and '; ' + advice}") from None
        return value


def key(kind: Kind, default: Any = dataclasses.MISSING, needed: bool = False) -> Any:
    """A field of a dataclass that a file holds. needed: also where there is a default."""
    metadata = {"kind": kind, "needed": needed or default is dataclasses.MISSING}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def record_of(cls: type) -> Record:
    """The record of a dataclass whose fields are declared with `key`."""
    fields = [f for f in dataclasses.fields(cls) if "kind" in f.metadata]
    needed = {f.name: f.metadata["kind"] for f in fields if f.metadata["needed"]}
    return Record(needed, {f.name: f.metadata["kind"] for f in fields if not f.metadata["needed"]})
