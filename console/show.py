"""How text is printed as it comes."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from engine.text_decoder import Job, Piece, Result

DRAFTED, PLAIN = "\033[36m", "\033[0m"


def is_terminal(stream) -> bool:
    """Whether a person reads or writes this stream; it may be None, closed."""
    return stream is not None and stream.isatty()


def coloured(piece: Piece, decode: Callable[[list[int]], str]) -> str:
    """A piece's text with the part that came from accepted drafts in colour.

    decode: turns token ids into the text that they complete.
    """
    head = decode(piece.ids[: piece.drafted])
    tail = piece.text[len(head) :] if piece.text.startswith(head) else ""
    return f"{DRAFTED}{head}{PLAIN}{tail}" if head and tail + head else piece.text


def as_text(result: Result, job: Job) -> str:
    """A result for people: its text, or its token ids where there is no tokenizer."""
    return result.text if job.tokenizer else ",".join(map(str, result.ids))


def show(pieces: Iterable[Piece], job: Job, label: bool) -> None:
    """Print the text of a job as its pieces come.

    label: there are several texts, which would mix; print each when all are done.
    """
    if label:
        try:
            for _ in pieces:
                pass
        finally:  # after Ctrl-C too: what there is
            for i, result in enumerate(job.results()):
                print(f"--- {i + 1}, seed {result.seed} ---\n{as_text(result, job)}")
        return
    tokenizer = job.tokenizer
    colour = is_terminal(sys.stdout) and job.run.decoder.drafter.shape.nodes > 1
    drafted = tokenizer.stream() if tokenizer else None  # decodes the drafted part of a piece alone
    before = ""
    for piece in pieces:
        text = piece.text
        if tokenizer is None:
            text, before = before + ",".join(map(str, piece.ids)), ","
        elif colour:
            text = coloured(piece, drafted.push)
            drafted.push(piece.ids[piece.drafted :])
        print(text, end="", flush=True)
    print()
