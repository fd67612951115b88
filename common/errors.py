"""The error that a user sees, and texts of others in its message."""
from __future__ import annotations

import difflib
from collections.abc import Iterable

# Names of llama.cpp, vLLM and gpt-fast, in lower case with hyphens, and ours.
ELSEWHERE = {
    "--n-predict": "--max-new-tokens", "--predict": "--max-new-tokens", "--ctx-size": "--max-seq-len",
    "--max-model-len": "--max-seq-len", "--file": "--prompt-file", "--system-prompt": "--system",
    "-sys": "--system", "--conversation": "--interactive", "-cnv": "--interactive", "-i": "--interactive",
    "-ngl": "--device", "--n-gpu-layers": "--device", "--model-draft": "--draft", "-md": "--draft",
    "--draft-checkpoint-path": "--draft", "--checkpoint-path": "--checkpoint", "-hf": "--checkpoint",
    "--parallel": "--slots", "-np": "--slots", "--max-num-seqs": "--slots", "--alias": "--model-name",
    "--served-model-name": "--model-name", "-j": "--json-schema", "--repeat-penalty": "--repetition-penalty",
    "-s": "--seed", "-ctk": "--kv", "--cache-type-k": "--kv", "--kv-cache-dtype": "--kv",
    "ngram": "lookup", "ngram-simple": "lookup", "prompt-lookup": "lookup", "pld": "lookup",
    "q8-0": "int8", "q4-0": "int4", "q4-1": "int4", "q4-k-m": "int4", "q4-k-s": "int4", "awq": "int4",
    "gptq": "int4", "half": "fp16", "f16": "fp16", "f32": "fp32",
}


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
