"""The log of a run: a live line and a JSON-lines file."""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

from common.files import read_text, write_text, writing


def chain_tau(accuracy: list[float]) -> float:
    """Tokens per step of a greedy chain whose draft step i is right with probability accuracy[i]: 1 + the sum
    of their running products.
    """
    tau, survive = 1.0, 1.0
    for a in accuracy:
        survive *= a
        tau += survive
    return tau


class TrainingLog:
    """The log of one run, WORK/log.jsonl, in step with its saved state.

    A run may be killed later than it was saved: entries after `step` are dropped.
    """

    def __init__(self, folder: Path, step: int, total: int, quiet: bool = False):
        self.path, self.quiet = folder / "log.jsonl", quiet
        self.entries = [entry for entry in read_log(self.path) if entry["step"] <= step] if step else []
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in self.entries))
        self.file = open(self.path, "a", buffering=1)  # noqa: SIM115 - open as long as the run
        every = 0.5 if sys.stderr.isatty() else 15  # seconds
        self.bar = tqdm(
            total=total, initial=step, desc="training", mininterval=every, maxinterval=every, disable=quiet,
            bar_format="{desc} |{bar:12}| {n}/{total} [{elapsed}<{remaining}]",
        )
        self.began, self.tokens = time.time(), 0

    def step(self, entry: dict, tokens: int, write: bool, progress: float) -> None:
        """One optimizer step of so many tokens: `entry` has step, loss, accuracy, norm and lr.

        progress: see `Plan.progress`.
        """
        self.tokens += tokens
        hits = " ".join(f"{a:.2f}" for a in entry["accuracy"])
        speed = self.tokens / (time.time() - self.began)
        self.bar.set_description_str(
            f"loss {entry['loss']:.3f} right {hits} chain tau {chain_tau(entry['accuracy']):.2f}"
            f" {speed:.0f} tok/s", False
        )
        self.bar.update(min(int(progress), self.bar.total) - self.bar.n)
        if write:
            self._write(entry)

    def validation(self, entry: dict) -> None:
        """One validation: `entry` has step, epoch, held_out (accuracies) and maybe tau."""
        if not self.quiet:
            accuracy = entry["held_out"]
            hits = " ".join(f"{a:.3f}" for a in accuracy)
            line = f"epoch {entry['epoch']} held-out right {hits} chain tau {chain_tau(accuracy):.2f}"
            tqdm.write(line + (f" tau {entry['tau']:.3f}" if "tau" in entry else ""), file=sys.stderr)
        self._write(entry)

    def _write(self, entry: dict) -> None:
        self.entries.append(entry)
        with writing(self.path):
            self.file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """End the live line and close the file."""
        self.bar.close()
        self.file.close()


def read_log(path: Path) -> list[dict]:
    """The entries of a log, without a last line that a kill cut off."""
    entries = []
    if path.exists():
        for line in read_text(path).splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return entries
