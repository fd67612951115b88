"""Validate file contents with pydantic; report an invalid value in one line.

Types are strict: 1.0, "1" and true are not integers. Unknown keys are ignored.
"""
from __future__ import annotations

import contextlib
import functools
import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Strict, TypeAdapter, ValidationError

from common.errors import InputError, did_you_mean

ABSENT = object()
# pydantic's names of union members in error locations.
UNION_MEMBER = re.compile(r"\[|^constrained-|^(str|int|dict)$")
BOILERPLATE = re.compile(r"^\w+ should (be|have) |(, unable to| after validation| to extract fields).*")
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 60
SHORT.maxlist, SHORT.maxlevel = 12, 3


def whole(low: int = 0, high: int = 2**31 - 1) -> Any:
    """The type of integers from `low` to `high`, both included."""
    return Annotated[int, Strict(), Field(ge=low, le=high)]


def number(low: float = -1e300, high: float = 1e300, above: float | None = None) -> Any:
    """The type of finite numbers from `low` to `high`, both included; above: exclusive lower bound."""
    bounds = Field(le=high, allow_inf_nan=False, **({"ge": low} if above is None else {"gt": above}))
    return Annotated[float, Strict(), bounds]


def text(max_length: int = 1 << 20, pattern: str | None = None) -> Any:
    """The type of strings of at most `max_length` characters that match the pattern."""
    return Annotated[str, Strict(), Field(max_length=max_length, pattern=pattern)]


Flag = Annotated[bool, Strict()]
Whole, Text = whole(), text()
Sha256 = text(pattern=r"^[0-9a-f]{64}$")
IdCount, Width, SmallSize = whole(1, 2**24), whole(1, 2**22), whole(1, 2**16)  # upper bounds: 16M, 4M, 64k
Layers = whole(1, 10_000)


class InvalidValue(InputError):
    """A key has an invalid value. The message has the key, the value and what is expected."""

    def __init__(self, key: str, found: Any, expected: str):
        self.key, self.found, self.expected = key, found, expected
        what = "is missing" if found is ABSENT else f"is {SHORT.repr(found)}"
        super().__init__(f"{key} {what}; expected {expected}")


def invalid_value(error: dict, path: Iterable, whole: str) -> InvalidValue:
    """Convert an error of pydantic. path: keys, outermost first. whole: name of the value without a path."""
    keys = (str(part) for part in path if not UNION_MEMBER.search(str(part)))
    name = ".".join(filter(None, keys)) or whole
    if error["type"] == "missing":
        return InvalidValue(name, ABSENT, "a value")
    expected = "a known key" if error["type"] == "extra_forbidden" else BOILERPLATE.sub("", error["msg"])
    return InvalidValue(name, error["input"], expected)


@contextlib.contextmanager
def named(where: str | Path, advice: str = "") -> Iterator[None]:
    """Convert InvalidValue in this context to an InputError with the file's name and the advice."""
    try:
        yield
    except InvalidValue as e:
        raise InputError(f"{where}: {e}{advice and '; ' + advice}") from None


class Schema:
    """The type of a parsed file, or of a part of one."""

    def __init__(self, type_: Any):
        self.adapter = TypeAdapter(type_)

    def check(self, value: Any, key: str = "") -> Any:
        """Validate and convert a value. Raises InvalidValue. key: its name in the file."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError as e:
            # In a union, report the alternative whose error is deepest.
            error = max(e.errors(), key=lambda error: len(error["loc"]))
            raise invalid_value(error, (key, *error["loc"]), "the file") from None

    def require(self, value: Any, where: str | Path, advice: str = "") -> Any:
        """Check a value and return it unchanged. Raises InputError with the file's name and the advice."""
        with named(where, advice):
            self.check(value)
        return value


schema_of = functools.cache(Schema)


def with_options(dataclass: type, options: dict, more: Iterable[str] = ()) -> Any:
    """Create a dataclass from options by name; None: the default. more: other valid names, for the message.

    Raises InputError on unknown names.
    """
    known = [*more, *(field.name for field in fields(dataclass))]
    for name in options:
        if name not in known:
            suggestion = did_you_mean(name, known)
            raise InputError(f"{name}: no such option{suggestion}; choose from {', '.join(known)}")
    return dataclass(**{name: value for name, value in options.items() if value is not None})


def as_python(value: Any) -> Any:
    """Convert NumPy and PyTorch numbers and arrays, also in lists and tuples, to Python numbers and lists."""
    if isinstance(value, (list, tuple)):
        return [as_python(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
