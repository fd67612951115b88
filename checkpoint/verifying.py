"""Whether the weights of our folders are those that were written: their sha256, which config.json holds."""
from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from checkpoint.folder import read_config
from checkpoint.names import ADVICE, CONFIG, HEAD_KINDS, WEIGHTS
from common.errors import InputError
from common.files import check_file

BLOCK = 1 << 20  # bytes


def verify(checkpoint: str | Path, draft: str | Path | None, must: bool, say: Callable[[str], None]) -> None:
    """Check the weights of a target, of the heads inside its folder and, if there is one, of `draft`.

    must: a folder without a checksum, which older versions wrote, is refused; else it is named. say: told
    what was done. Raises InputError if weights are not those that were written.
    """
    began, size = time.perf_counter(), 0
    heads = [Path(checkpoint, kind) for kind in HEAD_KINDS if Path(checkpoint, kind, CONFIG).exists()]
    for folder in [Path(checkpoint), *heads, *([Path(draft)] if draft else [])]:
        expected = read_config(folder).get("sha256")
        if expected is None:
            words = f"{folder / CONFIG}: has no sha256 to verify the weights with; {ADVICE} to have one"
            if must:
                raise InputError(words)
            say(words)
            continue
        found = digest(folder / WEIGHTS)
        if found != expected:
            raise InputError(
                f"{folder / WEIGHTS}: its sha256 is {found}; expected {expected}, which {CONFIG} holds: it is"
                f" damaged, or was changed; {ADVICE}"
            )
        size += check_file(folder / WEIGHTS)
    say(f"verified {size:,} bytes of weights in {time.perf_counter() - began:.1f} s")


def digest(path: Path) -> str:
    """The sha256 of a file. Raises InputError."""
    check_file(path)
    whole = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            whole.update(block)
    return whole.hexdigest()
