"""Answers of a shard that is not complete yet, on disk as they end: a kill loses only those in the middle.

Whoever writes a shard has a file of its own beside it, and first reads those that earlier runs have left. All
of them go when the shard is there.
"""
from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from common.files import read_bytes
from engine.run import Output
from sampling.options import Sampling

SUFFIX = ".answers"
MOST = 1 << 34  # bytes of a file
LOST = 1.0  # seconds of work that a power cut may take; a kill takes none


def key_of(prompt: list[int], sampling: Sampling) -> str:
    """Identifies an answer within its shard, by the prompt's ids and the seed."""
    return hashlib.sha256(json.dumps([prompt, sampling.seed]).encode()).hexdigest()[:24]


class Journal:
    """The answers to prompts of one shard. known: (ids, finish) by `key_of`."""

    def __init__(self, shard: Path):
        self.shard = shard
        self.known: dict[str, tuple[list[int], str]] = {}
        self._file, self._synced = None, 0.0

    def _left(self) -> list[Path]:
        return sorted(self.shard.parent.glob(f"{self.shard.stem}.*{SUFFIX}"))

    def read(self) -> dict[str, tuple[list[int], str]]:
        """Know what has been left, and return it. Raises InputError on what is no file."""
        for path in self._left():
            for line in read_bytes(path, MOST).splitlines():
                if found := _read(line):
                    self.known.setdefault(*found)
        return self.known

    def add(self, key: str, output: Output) -> None:
        """Write an answer down."""
        if self._file is None:
            name = f"{self.shard.stem}.{time.time_ns()}-{os.getpid()}{SUFFIX}"
            self._file = (self.shard.parent / name).open("x")  # until all are there
        self._file.write(json.dumps([key, output.ids, output.finish]) + "\n")
        self._file.flush()
        if time.monotonic() - self._synced > LOST:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def remove(self) -> None:
        """Remove all files: the shard is there."""
        if self._file:
            self._file.close()
            self._file = None
        for path in self._left():
            path.unlink(missing_ok=True)


def _read(line: bytes) -> tuple[str, tuple[list[int], str]] | None:
    """An answer by its key; None of a line that is none, as where the run was killed."""
    try:
        key, ids, finish = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    known = isinstance(key, str) and isinstance(finish, str) and isinstance(ids, list)
    return (key, (ids, finish)) if known and all(type(i) is int and i >= 0 for i in ids) else None
