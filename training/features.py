"""The target's states on every row of the training text: computed when needed, kept in memory or on disk.

On disk (--cache-features) they are computed once, before training, and serve later runs on any part of the
same text. A store is named after the target and the layers that it is read at, a row after its tokens. Every
process of every run writes files of its own and reads all files.
"""
from __future__ import annotations

import copy
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.cli import note
from common.errors import InputError
from common.files import atomic_path, digest
from kernels import isa
from kernels.backend import backend_of
from model import Transformer
from training.batches import batches
from training.processes import Processes
from training.report import live_bar

SPARE = 2**28  # bytes of the disk that stay free


class TargetStates(NamedTuple):
    """States that a target computes on rows [B, T], or on one row [n]. Ignore those of padding."""

    features: Tensor  # the streams entering the auxiliary layers, side by side [..., F]
    normed: Tensor  # the last state after the final norm [..., H]


@torch.no_grad()
def read_target(target: Transformer, aux_layers: tuple[int, ...], tokens: Tensor) -> TargetStates:
    """Run a target on tokens [B, T]; on our kernels each row by itself, as decoding reads a prompt."""
    backend = backend_of(target)
    if not backend.row_invariant:
        return _states(target, *target.causal(tokens, aux_layers))
    T = tokens.shape[1]
    at, start, caches = torch.arange(T)[None], torch.zeros(1, dtype=torch.long), target.caches(1, T)
    visible = backend.visible_before(at[0], start, T)
    with backend.threads():
        rows = [_states(target, *target(x[None], at, at, visible, caches, aux_layers)) for x in tokens]
    return TargetStates(*map(torch.cat, zip(*rows)))


def _states(target: Transformer, x: Tensor, features: Tensor | None) -> TargetStates:
    """Norm the target's last streams x [B, T, H], beside its features [B, T, F] or None."""
    return TargetStates(x[..., :0] if features is None else features, target.norm(x))


class Features:
    """The target's states on rows, from memory or from disk if they were computed before.

    `read` computes each row by itself, `fill` batches of them, once: a resumed run reads the same features.
    room: bytes of memory to keep them in. dtype: of what is kept (default the target's); `read` returns the
    target's. reader: a quantised copy that reads in place of the target, nearly the same and sooner. folder:
    where `fill` stores states; a file there holds KEY.features and KEY.normed of a batch of rows. name:
    identity of the reader as it was loaded.
    """

    def __init__(
        self, target: Transformer, aux_layers: tuple[int, ...], *, room: float = 0,
        dtype: torch.dtype | None = None, reader: Transformer | None = None, folder: Path | None = None,
        name: str = "", processes: Processes | None = None,
    ):
        self.reader, self.aux_layers, self.room = reader or target, aux_layers, room
        self.device, self.given = target.embed.weight.device, target.embed.weight.dtype
        self.dtype, self.cached = dtype or self.given, {}  # states by `digest` of the ids
        self.folder, self.files = folder and folder / digest(name, aux_layers), {}  # open files, likewise
        self.processes = processes or Processes()

    def read(self, rows: list[dict]) -> TargetStates:
        """Return the states of rows, padded to one length [B, T, ...], on the target's device."""
        parts = []
        for ids in (row["ids"] for row in rows):
            key = digest(ids)
            if key in self.files:
                states = [self.files[key].get_tensor(f"{key}.{name}") for name in TargetStates._fields]
            elif (states := self.cached.get(key)) is None:
                states = [x[0] for x in self.compute([ids])]
                if self.room > 0:
                    self.cached[key] = [x.to("cpu", copy=True) for x in states]
                    self.room -= sum(x.numel() * x.element_size() for x in states)
            parts.append([x.to(self.device, non_blocking=True) for x in states])
        return TargetStates(*(pad_sequence(xs, batch_first=True).to(self.given) for xs in zip(*parts)))

    def compute(self, rows: list[list[int]]) -> TargetStates:
        """Read rows of token ids. The states are in `dtype`."""
        tokens = pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)
        states = read_target(self.reader, self.aux_layers, tokens.to(self.device))
        return TargetStates(*(x.to(self.dtype) for x in states))

    def fill(self, rows: list[dict], budget: int) -> None:
        """Compute and store missing states, each process its share, in batches of `budget` tokens.

        Raises InputError, with the numbers, if the disk has no room for them.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._open()
        missing = [row for row in rows if digest(row["ids"]) not in self.files]
        each = (len(self.aux_layers) + 1) * self.reader.args.hidden_size * self.dtype.itemsize
        need = sum(len(row["ids"]) for row in missing) * each
        free = shutil.disk_usage(self.folder).free
        line = f"features: {need / 1e9:.2f} GB in {self.folder}, {free / 1e9:.2f} GB are free"
        if need > free - SPARE:
            raise InputError(f"--cache-features: {line}; make room, or leave it out")
        note(line)
        self.processes.wait()  # all have looked before any writes
        self._write(missing, budget)
        self.processes.wait()
        self._open()

    def _write(self, missing: list[dict], budget: int) -> None:
        """Write a file of each batch. Another run may be filling the same folder."""
        mine = self.processes.share(batches(missing, budget))
        total = sum(len(missing[i]["ids"]) for batch in mine for i in batch)
        with live_bar(total=total, unit="token", desc="features") as bar:
            for batch in mine:
                rows, tensors = [missing[i]["ids"] for i in batch], {}
                for ids, states in zip(rows, zip(*self.compute(rows))):
                    for name, x in zip(TargetStates._fields, states):
                        tensors[f"{digest(ids)}.{name}"] = x[: len(ids)].to("cpu", copy=True)
                name = f"{time.time_ns()}-{os.getpid()}-{self.processes.rank}.safetensors"
                with atomic_path(self.folder / name) as part:
                    save_file(tensors, part)
                bar.update(sum(map(len, rows)))

    def _open(self) -> None:
        files = [safe_open(path, "pt") for path in self.folder.glob("*.safetensors")]
        self.files = {name.partition(".")[0]: file for file in files for name in set(file.keys())}


def training_copy(target: Transformer) -> Transformer:
    """Return the target in float32 if this CPU multiplies that sooner, else the target.

    Processors whose bfloat16 products are slower than two products of floats are common: those without such
    an instruction, and Intel's that have it but no tiles.
    """
    weight, has = target.embed.weight, isa.features()
    if weight.is_cuda or "amx_bf16" in has or (has & {"avx512_bf16", "bf16"} and isa.maker() != isa.INTEL):
        return target
    return copy.deepcopy(target).float() if weight.dtype != torch.float32 else target
