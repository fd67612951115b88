"""How large the passes of lookahead decoding may be: judged before torch is there."""
from __future__ import annotations

from common.errors import InputError

MOST_ROWS = 1024  # of a pass, beyond which nobody gains


def check_rows(window: int, level: int, guesses: int) -> None:
    """Raise ValueError on sizes that cannot be: W columns, n-grams of N tokens, G of them tried at a time."""
    sizes = f"lookahead: window {window}, level {level}, guess set {guesses}"
    if window < 1 or level < 3 or guesses < 1:
        raise ValueError(f"{sizes}: at least 1, 3 and 1")
    if (rows := (level - 1) * (window + guesses)) > MOST_ROWS:
        raise ValueError(f"{sizes}: {rows} rows a pass, at most {MOST_ROWS}")


def judge_rows(flags: dict, vocab_size: int | None) -> None:
    """Raise InputError if the flags of the method ask for too much, whatever the vocabulary."""
    try:
        check_rows(flags["window"], flags["level"], flags["guess-set"])
    except ValueError as e:
        raise InputError(f"--window, --level, --guess-set: {e}") from None
