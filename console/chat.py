"""The interactive loop: every turn keeps the conversation and what the caches hold of it."""
from __future__ import annotations

import sys

from common.cli import note, one_line
from common.errors import InputError
from console.show import is_terminal, show
from console.statistics import statistics
from engine.text_decoder import TextDecoder
from sampling.options import Sampling


def chat(model: TextDecoder, sampling: Sampling, system: str | None) -> int:
    """Read turns from standard input and answer them, until its end or /exit. Returns the exit status.

    Raises InputError if there is no chat template.
    """
    if model.tokenizer is None or not model.tokenizer.has_template:
        raise InputError("--interactive needs a tokenizer with a chat template; this checkpoint has none")
    opening = [{"role": "system", "content": system}] if system is not None else []
    messages, reuse = list(opening), True
    while True:
        try:
            line = input("> " if is_terminal(sys.stdin) else "")
        except (EOFError, KeyboardInterrupt):
            note("")
            return 0
        if line.strip() == "/exit":
            return 0
        if line.strip() == "/reset":
            messages = list(opening)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            job = model.job([messages], [sampling], reuse=reuse)
            reuse = True
        except ValueError as e:
            note(f"error: {one_line(e)} (/reset starts over)")
            messages.pop()
            continue
        except KeyboardInterrupt:
            # Before the answer: as if the turn had not been given. What the caches hold is not known now.
            print(flush=True)
            messages.pop()
            reuse = False
            continue
        try:
            show(job, job, label=False)
        except KeyboardInterrupt:
            print(flush=True)
        result = job.results()[0]
        messages.append({"role": "assistant", "content": result.text})
        note(statistics([result], model.decoder))
