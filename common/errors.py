"""The error that a user sees, and texts of others in its message."""
from __future__ import annotations

import difflib
from collections.abc import Iterable

# Our names, and those of llama.cpp, vLLM and gpt-fast for the same, in lower case with hyphens.
OTHERS = {
    "--max-new-tokens": "--n-predict --predict", "--max-seq-len": "--ctx-size --max-model-len",
    "--prompt-file": "--file", "--system": "--system-prompt -sys", "--seed": "-s", "--json-schema": "-j",
    "--interactive": "-i -cnv --conversation", "--checkpoint": "-hf --checkpoint-path",
    "--draft": "-md --model-draft --draft-checkpoint-path", "--device": "-ngl --n-gpu-layers",
    "--slots": "-np --parallel --max-num-seqs", "--model-name": "--alias --served-model-name",
    "--repetition-penalty": "--repeat-penalty", "--kv": "-ctk --cache-type-k --kv-cache-dtype",
    "lookup": "ngram ngram-simple prompt-lookup pld", "int8": "q8-0", "fp16": "half f16", "fp32": "f32",
    "int4": "q4-0 q4-1 q4-k-m q4-k-s awq gptq",
}
ELSEWHERE = {name: ours for ours, names in OTHERS.items() for name in names.split()}


class InputError(Exception):
    """A file, a flag or a request cannot be used. The message is one line: what, where, what to do."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with the known name that other programs call so, or the nearest one.

    Return nothing if none is near. Case, and hyphens or underscores, make no difference.
    """
    plain = {name.lower().replace("_", "-"): name for name in known}
    word = word.lower().replace("_", "-")
    near = [ELSEWHERE[word]] if ELSEWHERE.get(word) in plain else difflib.get_close_matches(word, plain, 1)
    return f" (did you mean {plain[near[0]]}?)" if near else ""


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: 1 token, 2,000 tokens."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a library in Rust, which is no Exception."""
    return type(error).__module__ == "pyo3_runtime"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, to be quoted in ours, or the error's class."""
    return printable(str(error).strip().partition("\n")[0], 300) or type(error).__name__


def printable(text: str, most: int = 120) -> str:
    """Return a text from a file with escaped control characters, cut after `most`."""
    text = escaped(text[: most + 1])
    return text if len(text) <= most else text[:most] + "..."


def escaped(text: str) -> str:
    """Return a text with escaped control characters: they could move a cursor or change colours."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def not_utf8(text: str) -> bool:
    """Return whether UTF-8 cannot hold a text: it has bytes of a command line, or half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
