"""The target's states on every row of the training text: computed when needed, kept in memory or on disk.

On disk (--cache-features) they are computed once, before training, and serve later runs on any part of the
same text: a store is named after the target and the layers it is read at, a row after its tokens. Every
process of every run writes a file of its own, and all read all files.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from checkpoint.loading import identity
from common.cli import note
from common.errors import InputError
from common.files import read_text
from kernels.backend import backend_of
from model import Transformer
from training.batches import batches
from training.processes import Processes

SPARE = 2**28  # bytes of the disk that stay free


class TargetStates(NamedTuple):
    """What a target computes on rows [B, T], or on one row [n].

    What it gives for padding means nothing.
    """

    features: Tensor  # the streams entering the auxiliary layers, side by side [..., F]
    normed: Tensor  # the last state after the final norm [..., H]
    greedy: Tensor  # the target's choice of the next token [...]


@torch.no_grad()
def read_target(target: Transformer, aux_layers: tuple[int, ...], tokens: Tensor) -> TargetStates:
    """Run the target on tokens [B, T]."""
    return _states(target, *target.causal(tokens, aux_layers))


def _states(target: Transformer, x: Tensor, features: Tensor | None) -> TargetStates:
    """What a target computes, from its last streams x [B, T, H] and those that it was asked for [B, T, F]."""
    # Logits of a few sequences at a time: V is large.
    greedy = torch.cat([target.logits(rows).argmax(-1) for rows in x.split(8)])
    return TargetStates(x[..., :0] if features is None else features, target.norm(x), greedy)


class Reader:
    """Reads rows with a quantised copy of the target, each from its first token, as decoding reads a prompt.

    What it gives is nearly what the target gives, sooner. name: identity of the copy as it was loaded.
    """

    def __init__(self, copy: Transformer, name: str):
        self.copy, self.name = copy, name
        self.caches: nn.ModuleList | None = None
        self.slots = 0  # of the caches

    @torch.no_grad()
    def __call__(self, aux_layers: tuple[int, ...], tokens: Tensor) -> TargetStates:
        """`read_target` of tokens [B, T]."""
        if not backend_of(self.copy).row_invariant:
            return read_target(self.copy, aux_layers, tokens)
        with backend_of(self.copy).threads():
            rows = [self._row(aux_layers, row[None]) for row in tokens]
        return TargetStates(*map(torch.cat, zip(*rows)))

    def _row(self, aux_layers: tuple[int, ...], tokens: Tensor) -> TargetStates:
        T = tokens.shape[1]
        if T > self.slots:
            self.slots = T
            self.caches = self.copy.caches(1, T)
        positions, start = torch.arange(T)[None], torch.zeros(1, dtype=torch.long)
        visible = backend_of(self.copy).visible_before(torch.arange(self.slots), start, T)
        return _states(self.copy, *self.copy(tokens, positions, positions, visible, self.caches, aux_layers))


class Features:
    """The target's states on rows, from memory if they were computed before.

    They are computed row by row, so that they do not depend on which rows were read together and when: a
    resumed run sees the same features. room: bytes of memory to keep them in. dtype: what they are kept in
    (default the target's); they are given in the target's. reader: what computes them instead of the target.
    """

    def __init__(
        self, target: Transformer, aux_layers: tuple[int, ...], room: float = 0,
        dtype: torch.dtype | None = None, reader: Reader | None = None,
    ):
        self.target, self.aux_layers, self.room = target, aux_layers, room
        self.reader, self._read = reader, reader or partial(read_target, target)
        self.device, self.dtype = target.embed.weight.device, dtype or target.embed.weight.dtype
        self.cached: dict[tuple[int, ...], TargetStates] = {}
        self.held: dict[tuple[int, ...], TargetStates] = {}  # of the rows that `hold` was given

    def hold(self, rows: list[tuple[dict, bool]]) -> None:
        """Compute what is missing of these rows, and hold those that are marked until the next call.

        All processes that share the target call this with the same rows, in one order, each with marks of its
        own.
        """
        self.held = {}
        for row, mine in rows:
            key = tuple(row["ids"])
            states = self._of(key)
            if mine:
                self.held[key] = states

    def read(self, rows: list[dict]) -> TargetStates:
        """States of rows, padded to one length [B, T, ...], on the target's device."""
        parts = []
        for row in rows:
            key = tuple(row["ids"])
            states = self.held[key] if key in self.held else self._of(key)
            parts.append([x.to(self.device, non_blocking=True) for x in states])
        features, normed, greedy = (pad_sequence(xs, batch_first=True) for xs in zip(*parts))
        given = self.target.embed.weight.dtype
        return TargetStates(features.to(given), normed.to(given), greedy.long())

    def _of(self, key: tuple[int, ...]) -> TargetStates:
        """The states of a row, known or computed now."""
        states = self.known(key)
        if states is None:
            states = TargetStates(*(x[0] for x in self.compute([key])))
            self.keep(key, states)
        return states

    def compute(self, keys: list[tuple[int, ...]]) -> TargetStates:
        """Run the target on rows of these token ids; the states are in `dtype`."""
        tokens = pad_sequence([torch.tensor(key) for key in keys], batch_first=True)
        features, normed, greedy = self._read(self.aux_layers, tokens.to(self.device))
        return TargetStates(features.to(self.dtype), normed.to(self.dtype), greedy)

    def known(self, key: tuple[int, ...]) -> TargetStates | None:
        """The states of a row, on the CPU, if they were computed before."""
        return self.cached.get(key)

    def keep(self, key: tuple[int, ...], states: TargetStates) -> None:
        """Keep the states of a row if there is room."""
        if self.room > 0 and key not in self.cached:
            self.cached[key] = TargetStates(*(x.to("cpu", copy=True) for x in states))
            self.room -= sum(x.numel() * x.element_size() for x in states)


class StoredFeatures(Features):
    """The same on disk, under `folder`. `fill` computes what is missing.

    NAME.bin holds the states of one row after the other: features, normed state, choices (int32). NAME.index
    has a line for each: digest of the tokens, offset in bytes, number of tokens. name: identity of the
    target as it was loaded, if `target` is a copy of it in another dtype.
    """

    def __init__(
        self, target: Transformer, aux_layers: tuple[int, ...], folder: Path, processes: Processes,
        dtype: torch.dtype | None = None, name: str | None = None, reader: Reader | None = None,
    ):
        super().__init__(target, aux_layers, dtype=dtype, reader=reader)
        made_by = json.dumps([reader.name if reader else name or identity(target), list(aux_layers)])
        self.folder = folder / hashlib.sha256(made_by.encode()).hexdigest()[:12]
        self.processes = processes
        self.widths = len(aux_layers) * target.args.hidden_size, target.args.hidden_size
        self.token_bytes = sum(self.widths) * self.dtype.itemsize + 4
        self.places: dict[str, tuple[np.memmap, int, int]] = {}  # digest: file, offset, number of tokens

    def known(self, key: tuple[int, ...]) -> TargetStates | None:
        place = self._place(key)
        if place is None:
            return None
        data, offset, n = place
        # A copy, because torch wants to own what it could write to.
        raw = torch.from_numpy(data[offset : offset + n * self.token_bytes].copy())
        features, normed, greedy = raw.split([*(n * w * self.dtype.itemsize for w in self.widths), n * 4])
        return TargetStates(
            features.view(self.dtype).view(n, self.widths[0]),
            normed.view(self.dtype).view(n, self.widths[1]), greedy.view(torch.int32).long(),
        )

    def _place(self, key: tuple[int, ...]) -> tuple[np.memmap, int, int] | None:
        place = self.places.get(_digest(key))
        return place if place and place[2] == len(key) else None

    def keep(self, key, states) -> None:
        """Keep nothing: `fill` has stored every row it was given."""

    def fill(self, rows: list[dict], budget: int) -> None:
        """Compute and store what is missing, each process its share, in batches of `budget` tokens.

        Raises InputError, with the numbers, if the disk has no room for it.
        """
        self._open()
        missing = [row for row in rows if self._place(tuple(row["ids"])) is None]
        if missing:
            self._check_room(missing)
        self.processes.wait()  # all have looked before any writes
        if missing:
            self._write(missing, budget)
        self.processes.wait()
        self._open()

    def _check_room(self, missing: list[dict]) -> None:
        need = sum(len(row["ids"]) for row in missing) * self.token_bytes
        existing = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if self.processes.first:
            note(f"features of {len(missing):,} rows need {need / 1e9:.2f} GB in {self.folder};"
                 f" {free / 1e9:.1f} GB are free")
        if need > free - SPARE:
            raise InputError(
                f"--cache-features needs {need / 1e9:.2f} GB in {self.folder}, {free / 1e9:.2f} GB are free"
            )

    def _write(self, missing: list[dict], budget: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        bar = tqdm(total=len(missing), unit="row", desc="features", disable=not self.processes.first)
        # Another run may be filling the same folder: the files have names of their own.
        name = self.folder / f"{time.time_ns()}-{os.getpid()}-{self.processes.rank}"
        with bar, open(f"{name}.bin", "xb") as data, open(f"{name}.index", "x") as index:
            for number, batch in enumerate(batches(missing, budget)):
                if self.processes.ours(number):
                    self._append(data, index, [tuple(missing[i]["ids"]) for i in batch])
                bar.update(len(batch))

    def _append(self, data, index, keys: list[tuple[int, ...]]) -> None:
        states, lines = self.compute(keys), []
        for i, key in enumerate(keys):
            features, normed, greedy = (x[i, : len(key)].cpu().contiguous() for x in states)
            lines.append(f"{_digest(key)} {data.tell()} {len(key)}\n")
            for part in (features, normed, greedy.int()):
                data.write(part.view(torch.uint8).numpy().tobytes())
        # The data first: a line of the index must not name data that is not there.
        data.flush()
        os.fsync(data.fileno())
        index.write("".join(lines))
        index.flush()

    def _open(self) -> None:
        self.places = {}
        for path in sorted(self.folder.glob("*.index")):
            file = path.with_suffix(".bin")
            if not file.exists() or not file.stat().st_size:
                continue
            data = np.memmap(file, dtype=np.uint8, mode="r")
            for line in read_text(path, most=1 << 40).splitlines():
                digest, *numbers = line.split(" ")
                if len(numbers) != 2 or not all(re.fullmatch("[0-9]{1,18}", number) for number in numbers):
                    continue  # cut off when the run was killed
                offset, n = map(int, numbers)
                if offset + n * self.token_bytes <= len(data):
                    self.places[digest] = (data, offset, n)


def _digest(key: tuple[int, ...]) -> str:
    return hashlib.sha256(np.asarray(key, dtype=np.int32).tobytes()).hexdigest()[:24]
