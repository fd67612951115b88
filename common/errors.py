"""The error that a user sees, and texts of others in its message."""
from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator

# Ours, and what other programs call it.
OTHERS = {
    "--max-new-tokens": "--n-predict --predict", "--max-seq-len": "--ctx-size --max-model-len",
    "--device": "-ngl --n-gpu-layers", "--slots": "-np --parallel --max-num-seqs",
    "int8": "q8_0 w8a16", "w8a8": "int8-w8a8", "int4": "q4_0 q4_k_m q4_k_s w4a16 awq gptq", "fp8": "float8",
    "--interactive": "--chat -i -cnv --conversation",
    "--model-name": "--alias --served-model-name", "--checkpoint": "-hf", "lookup": "ngram prompt-lookup pld",
}


class InputError(Exception):
    """A file, a flag or a request cannot be used. The message is one line: what, where, what to do."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a guess at what a misspelt or foreign word stands for, to be added to a message."""
    known = [*known]
    near = [ours for ours, names in OTHERS.items() if word in names.split() and ours in known]
    near = near or difflib.get_close_matches(word, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: 1 token, 2,000 tokens."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def printable(text: str, most: int = 120) -> str:
    """Return a text of others, cut after `most` characters.

    Control characters are escaped: they could move a cursor or change colours.
    """
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= most else text[:most] + "..."


def one_line(error: object) -> str:
    """Return the message of an error on one line, or its class if it has none."""
    return printable(" ".join(str(error).split()), 1500) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, to be quoted in ours, or the error's class."""
    return printable(str(error).strip().partition("\n")[0], 300) or type(error).__name__


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any error of a library, a panic of Rust code too, into an InputError that starts with `what`."""
    try:
        yield
    except BaseException as e:  # a panic is no Exception
        is_panic = type(e).__module__ == "pyo3_runtime"
        if isinstance(e, InputError) or not (isinstance(e, Exception) or is_panic):
            raise
        raise InputError(f"{what} ({one_line(e)})") from None
