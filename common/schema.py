"""Types of the content of files, checked with pydantic, and the one line about a value that does not fit.

Types are strict: 1.0, "1" and true are no whole numbers. Keys that a type does not name are ignored, as they
belong to others.
"""
from __future__ import annotations

import contextlib
import functools
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Strict, TypeAdapter, ValidationError

from common.errors import InputError, did_you_mean

ABSENT = object()
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60
SHORT.maxlist, SHORT.maxlevel = 12, 3


def whole(low: int = 0, high: int = 2**31 - 1) -> Any:
    """A whole number from `low` to `high`, both included."""
    return Annotated[int, Strict(), Field(ge=low, le=high)]


def number(low: float = -1e300, high: float = 1e300, above: float | None = None) -> Any:
    """A finite number from `low` to `high`, both included; with `above`, greater than that instead."""
    bounds = Field(le=high, allow_inf_nan=False, **({"ge": low} if above is None else {"gt": above}))
    return Annotated[float, Strict(), bounds]


def text(most: int = 1 << 20, pattern: str | None = None) -> Any:
    """A text of at most `most` characters that matches the pattern."""
    return Annotated[str, Strict(), Field(max_length=most, pattern=pattern)]


Flag = Annotated[bool, Strict()]
Whole, Text = whole(), text()
PATTERNS = {
    "digits": r"^[0-9]{1,8}$", "a sha256": r"^[0-9a-f]{64}$",
    "a name of a file": r"^[^./\\][^/\\]{0,199}$",  # inside a folder of ours
}
Digits, Sha256, Name = (text(pattern=pattern) for pattern in PATTERNS.values())
Ids, Width, Many = whole(1, 2**24), whole(1, 2**22), whole(1, 2**16)  # of a vocabulary; a matrix; parts
Layers = whole(1, 10_000)

# Expectations by pydantic's type of error.
EXPECTED = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "a text",
    "list": "a list", "tuple": "a list", "dict": "an object", "dataclass": "an object",
    "path": "a path", "callable": "a function",
    "none_required": "null",
    "greater_than_equal": "at least {ge:,}", "less_than_equal": "at most {le:,}",
    "greater_than": "above {gt:,g}",
    "too_short": "at least {min_length} in it", "too_long": "at most {max_length:,} in it",
    "string_too_short": "at least {min_length} character",
    "string_too_long": "at most {max_length:,} characters", "finite_number": "a finite number",
}


class Wrong(ValueError):
    """A key holds something else than is expected. The message names all three."""

    def __init__(self, key: str, found: Any, expected: str):
        self.key, self.found, self.expected = key, found, expected
        what = "is missing" if found is ABSENT else f"is {in_words(found)}"
        super().__init__(f"{key} {what}; expected {expected}")


@contextlib.contextmanager
def named(where: str | Path, advice: str = "") -> Iterator[None]:
    """Turn Wrong in this context into an InputError that names the file and ends in the advice."""
    try:
        yield
    except Wrong as e:
        raise InputError(f"{where}: {e}{advice and '; ' + advice}") from None


def in_words(value: Any) -> str:
    """A value as a file holds it: short, on one line, control characters escaped."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return SHORT.repr(list(value) if isinstance(value, tuple) else value)


class Schema:
    """The type of a parsed file, or of a part of one."""

    def __init__(self, kind: Any):
        self.adapter = TypeAdapter(kind)

    def check(self, value: Any, key: str = "") -> Any:
        """Return a value as its type has it. Raise Wrong if it is of another. key: its name in its file."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError as e:
            raise _wrong(e, value, key) from None

    def require(self, value: Any, where: str | Path, advice: str = "") -> Any:
        """Return the value. Raise InputError, which names the file and ends in the advice, if it is wrong."""
        with named(where, advice):
            self.check(value)
        return value


schema_of = functools.cache(Schema)


def as_python(value: Any) -> Any:
    """Return numbers of numpy and torch, alone, in an array, in lists or tuples, as Python's."""
    if isinstance(value, (list, tuple)):
        return [as_python(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def with_options(kind: type, options: dict, beside: Iterable[str] = ()) -> Any:
    """Return an object of a dataclass from named options; None is the default. beside: further names to take.

    Raises TypeError, a sentence, on another name.
    """
    known = [*beside, *(field.name for field in fields(kind))]
    for name in options:
        if name not in known:
            guess = did_you_mean(name, known)
            raise TypeError(f"{name}: no such option{guess}; choose from {', '.join(known)}")
    return kind(**{name: value for name, value in options.items() if value is not None})


def _wrong(error: ValidationError, value: Any, key: str) -> Wrong:
    """Return the first wrong value, with all types of its place if that is a union."""
    found = [(*_place(e, value, key), _expected(e)) for e in error.errors()]
    # A union reports every alternative: the deepest place is inside the one that was meant.
    place, inner, _ = max(found[: _alternatives(error)], key=lambda f: f[0].count(".") + f[0].count("["))
    words = dict.fromkeys(words for where, _, words in found if where == place)
    return Wrong(place, inner, " or ".join(words))


def _alternatives(error: ValidationError) -> int:
    """Return the number of errors at the beginning that are about one key of the outermost object."""
    first = [e["loc"][:1] for e in error.errors()]
    return next((i for i, loc in enumerate(first) if loc != first[0]), len(first))


def _place(error: dict, value: Any, key: str) -> tuple[str, Any]:
    """Return the key of an error with its value. Parts of its place that are no keys name alternatives."""
    for part in error["loc"]:
        if isinstance(value, dict) and part in value:
            key, value = f"{key}.{part}" if key else str(part), value[part]
        elif isinstance(value, (list, tuple)) and isinstance(part, int) and part < len(value):
            key, value = f"{key}[{part}]", value[part]
    if error["type"] == "missing":
        return f"{key}.{part}" if key else part, ABSENT
    return key or "the file", value


def _expected(error: dict) -> str:
    kind = error["type"]
    if kind == "missing":
        return "a value"
    words = EXPECTED.get(kind) or EXPECTED.get(kind.split("_")[0])
    if kind == "literal_error":
        return error["ctx"]["expected"]
    if kind == "string_pattern_mismatch":
        return next((name for name, p in PATTERNS.items() if p == error["ctx"]["pattern"]), "another text")
    if words is None or (kind not in EXPECTED and not kind.endswith(("_type", "_parsing", "_size"))):
        return error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return words.format(**error.get("ctx", {}))
