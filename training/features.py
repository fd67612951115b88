"""What the target says about every row of the training text: computed when wanted, and kept in memory or on
disk.

On disk (--cache-features) it is computed once, before training, and serves later runs on any part of the same
text: a store is named after the target and the layers it is read at, a row after its tokens. Every process of
every run writes a file of its own; all read all files.
"""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint.loading import identity
from common.errors import InputError
from model import Transformer
from training.batches import batches
from training.processes import Processes

# Of one row: features [n, F], normed state [n, H], choice [n]; on the CPU.
Said = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def read_target(
    target: Transformer, aux_layers: tuple[int, ...], tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the target says about tokens [B, T]: features [B, T, F], the normed last state [B, T, H], its
    choice [B, T].

    Rows are real up to where the tokens are; behind it nothing means anything.
    """
    x, features = target.causal(tokens, aux_layers)
    # A few sequences at a time: V is large.
    greedy = torch.cat([target.logits(rows).argmax(-1) for rows in x.split(8)])
    return x[..., :0] if features is None else features, target.norm(x), greedy


class Features:
    """`read(rows)` gives what the target says about rows, from memory where it has been computed before.

    What is not kept is computed row by row, so that it does not depend on which rows were read together when:
    a resumed run sees the same features. room: bytes of memory to keep them in.
    """

    def __init__(self, target: Transformer, aux_layers: tuple[int, ...], room: float = 0):
        self.target, self.aux_layers, self.room = target, aux_layers, room
        self.device = target.embed.weight.device
        self.kept: dict[tuple[int, ...], Said] = {}

    def read(self, rows: list[dict]) -> Said:
        """Padded to one length [B, T, ...], on the target's device."""
        keys = [tuple(row["ids"]) for row in rows]
        known = []
        for key in keys:
            said = self.known(key)
            if said is None:
                said = tuple(x[0] for x in self.compute([key]))
                self.keep(key, said)
            known.append(tuple(x.to(self.device, non_blocking=True) for x in said))
        features, state, greedy = (
            torch.nn.utils.rnn.pad_sequence(parts, batch_first=True) for parts in zip(*known)
        )
        return features, state, greedy.long()

    def compute(self, keys: list[tuple[int, ...]]) -> Said:
        """Ask the target."""
        tokens = torch.zeros(len(keys), max(map(len, keys)), dtype=torch.int64)
        for i, key in enumerate(keys):
            tokens[i, : len(key)] = torch.tensor(key)
        return read_target(self.target, self.aux_layers, tokens.to(self.device))

    def known(self, key: tuple[int, ...]) -> Said | None:
        """What is kept of a row."""
        return self.kept.get(key)

    def keep(self, key: tuple[int, ...], said: Said) -> None:
        """Keep a row if there is room."""
        if self.room > 0 and key not in self.kept:
            self.kept[key] = tuple(x.to("cpu", copy=True) for x in said)
            self.room -= sum(x.numel() * x.element_size() for x in said)


class StoredFeatures(Features):
    """The same on disk, under `folder`. `fill` computes what is missing."""

    def __init__(self, target: Transformer, aux_layers: tuple[int, ...], folder: Path, processes: Processes):
        super().__init__(target, aux_layers)
        made_by = [identity(target), list(aux_layers)]
        self.folder = folder / hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]
        self.processes, self.dtype = processes, target.embed.weight.dtype
        self.width, self.hidden = len(aux_layers) * target.args.hidden_size, target.args.hidden_size
        self.token_bytes = (self.width + self.hidden) * self.dtype.itemsize + 4
        self.where: dict[str, tuple[np.memmap, int, int]] = {}

    def known(self, key: tuple[int, ...]) -> Said | None:
        place = self._place(key)
        if place is None:
            return None
        data, start, n = place
        # A copy: torch wants to own what it may write.
        raw = torch.from_numpy(data[start : start + n * self.token_bytes].copy())
        ends = np.cumsum([n * w * self.dtype.itemsize for w in (self.width, self.hidden)])
        features, state = raw[: ends[0]].view(self.dtype).view(n, self.width), raw[
            ends[0] : ends[1]
        ].view(self.dtype).view(n, self.hidden)
        return features, state, raw[ends[1] :].view(torch.int32).long()

    def _place(self, key: tuple[int, ...]) -> tuple[np.memmap, int, int] | None:
        found = self.where.get(_digest(key))
        return found if found and found[2] == len(key) else None

    def keep(self, key, said) -> None:
        """Nothing: `fill` has kept all it was asked for."""

    def fill(self, rows: list[dict], budget: int) -> None:
        """Compute what is missing, each process its share. Raises InputError, with the numbers, if it does
        not fit.
        """
        self._open()
        missing = [row for row in rows if self._place(tuple(row["ids"])) is None]
        need = sum(len(row["ids"]) for row in missing) * self.token_bytes
        place = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        free = shutil.disk_usage(place).free
        if self.processes.first and missing:
            line = f"features of {len(missing):,} rows need {need / 1e9:.2f} GB in {self.folder}; {free / 1e9:.1f} GB are free"
            print(line, file=sys.stderr, flush=True)
        if missing and need > free - 2**28:
            raise InputError(
                f"--cache-features needs {need / 1e9:.2f} GB in {self.folder}, {free / 1e9:.2f} GB are free"
            )
        self.processes.wait()  # all have looked before any writes
        if missing:
            self.folder.mkdir(parents=True, exist_ok=True)
            bar = tqdm(total=len(missing), unit="row", desc="features", disable=not self.processes.first)
            # Files of its own: another run may be filling the same folder.
            name = self.folder / f"{time.time_ns()}-{os.getpid()}-{self.processes.rank}"
            with open(f"{name}.bin", "xb") as data, open(f"{name}.index", "x") as index:
                for number, batch in enumerate(batches(missing, budget)):
                    if self.processes.mine(number):
                        self._append(data, index, [tuple(missing[i]["ids"]) for i in batch])
                    bar.update(len(batch))
            bar.close()
        self.processes.wait()
        self._open()

    def _append(self, data, index, keys: list[tuple[int, ...]]) -> None:
        said = self.compute(keys)
        lines = []
        for i, key in enumerate(keys):
            features, state, greedy = (x[i, : len(key)].cpu().contiguous() for x in said)
            lines.append(f"{_digest(key)} {data.tell()} {len(key)}\n")
            for part in (features, state, greedy.int()):
                data.write(part.view(torch.uint8).numpy().tobytes())
        data.flush()  # the data first: a line of the index must not speak of what is not there
        os.fsync(data.fileno())
        index.write("".join(lines))
        index.flush()

    def _open(self) -> None:
        self.where = {}
        for path in sorted(self.folder.glob("*.index")):
            file = path.with_suffix(".bin")
            if not file.exists() or not file.stat().st_size:
                continue
            data = np.memmap(file, dtype=np.uint8, mode="r")
            for line in path.read_text().splitlines():
                digest, *numbers = line.split(" ")
                if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
                    continue  # cut off when the run was killed
                start, n = map(int, numbers)
                if start + n * self.token_bytes <= len(data):
                    self.where[digest] = (data, start, n)


def _digest(key: tuple[int, ...]) -> str:
    return hashlib.sha256(np.asarray(key, dtype=np.int32).tobytes()).hexdigest()[:24]
