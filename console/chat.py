"""generate.py --interactive: a chat loop. Each turn reuses the cached prefix of the conversation."""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from common.cli import log_stderr
from common.errors import InputError, one_line
from console.stats import format_stats
from engine.engine import Engine
from engine.request import Request, encode
from engine.sampling import Sampling
from llm import summary

HELP = "/reset starts over, /exit or /quit quits, Ctrl-C stops an answer; start with a space to send a /"


def chat(engine: Engine, sampling: Sampling, system: str | None, stats: bool, show: Callable) -> int:
    """Read user turns from stdin and answer them, until EOF or /exit. Returns the exit status.

    stats: print detailed statistics. show: print the events of a request. Raises InputError if there is no
    chat template.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.has_template:
        raise InputError("--interactive needs a tokenizer with a chat template; this checkpoint has none")
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        log_stderr(HELP)
        with contextlib.suppress(ImportError):  # not in all builds of Python
            import readline  # noqa: F401  gives `input` line editing and a history
    opening = [{"role": "system", "content": system}] if system is not None else []
    messages = list(opening)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            return 0
        command = line.rstrip()
        if command in ("/exit", "/quit"):
            return 0
        if command == "/reset":
            messages = list(opening)
        elif command.startswith("/"):
            log_stderr(HELP)
        if not command or command.startswith("/"):
            continue
        messages.append({"role": "user", "content": line})
        requests: list[Request] = []
        try:
            ids = encode(tokenizer, messages, max_lengths=engine.max_lengths)
            show(engine.run([ids], [sampling], requests), tokenizer)
            if requests[0].error:
                raise ValueError(requests[0].error)
        except ValueError as e:
            log_stderr(f"error: {one_line(e)} (/reset starts over)")
        except KeyboardInterrupt:
            pass  # keep the partial answer in the history
        if not requests or not requests[0].ids or requests[0].error:  # drop the turn from the history
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": requests[0].text})
        log_stderr(summary(requests, engine.drafter.shape.nodes > 1))
        if stats:
            log_stderr(format_stats(requests, engine))
