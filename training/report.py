"""Training log, progress bar and model card."""
from __future__ import annotations

import json
import operator
import sys
import time
from itertools import accumulate
from pathlib import Path

from tqdm import tqdm

from common.errors import counted, read_text
from common.progress import progress_bar
from common.writing import write_text, writing


def chain_tau(accuracy: list[float]) -> float:
    """Return the acceptance length of a greedy chain: 1 plus the sum of cumulative products.

    accuracy[i]: top-1 accuracy of draft step i.
    """
    return 1.0 + sum(accumulate(accuracy, operator.mul))


class TrainingLog:
    """Progress bar, and WORK/log.jsonl.

    Entries after `step`, the step of the saved state, are dropped. Keys of a step: step, loss, accuracy,
    norm, lr. Keys of a validation: step, epoch, held_out (accuracies), and tau if it was measured.
    """

    def __init__(self, folder: Path, step: int, total: int):
        self.path = folder / "log.jsonl"
        self.entries = [entry for entry in read_log(self.path) if entry["step"] <= step] if step else []
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in self.entries))
        self.bar = progress_bar(
            total=total, initial=step, desc="training",
            bar_format="{desc} |{bar:12}| {percentage:.1f}% [{elapsed}<{remaining}{postfix}]",
        )
        self.start_time, self.tokens = time.time(), 0

    def advance(self, tokens: int, progress: float) -> None:
        """Add `tokens` tokens of this rank, and move the bar to `progress` (see `Trainer._progress`)."""
        self.tokens += tokens
        self.bar.n = min(progress, self.bar.total)
        speed = self.tokens / (time.time() - self.start_time)
        self.bar.set_postfix_str(f"{counted(self.tokens, 'token')}, {speed:.0f} tok/s", refresh=False)
        self.bar.update(0)

    def add_step(self, entry: dict) -> None:
        """Add an optimizer step."""
        line = f"loss {entry['loss']:.3f}, {_format_accuracy(entry['accuracy'], 2)}"
        self.bar.set_description_str(line, refresh=False)
        self._write(entry)

    def add_validation(self, entry: dict) -> None:
        """Add and print a validation."""
        tqdm.write(describe_validation(entry), file=sys.stderr)
        self._write(entry)

    def _write(self, entry: dict) -> None:
        self.entries.append(entry)
        with writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def _format_accuracy(accuracy: list[float], digits: int) -> str:
    """Format the accuracy by draft step, and the chain τ that follows from it."""
    by_step = " ".join(f"{a:.{digits}f}" for a in accuracy)
    return f"accuracy {by_step}, chain τ {chain_tau(accuracy):.2f}"


def describe_validation(validation: dict) -> str:
    """Format a validation as one line."""
    line = f"epoch {validation['epoch']}: held-out {_format_accuracy(validation['held_out'], 3)}"
    return line + (f", tree τ {validation['tau']:.2f}" if "tau" in validation else "")


def read_log(path: Path) -> list[dict]:
    """Return the entries of a log, without an incomplete last line."""
    entries = []
    for line in read_text(path).splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def write_card(folder: Path, *, title: str, facts: list[str], command: str, log: list[dict]) -> None:
    """Write the model card FOLDER/README.md.

    facts: lines about the head, its data and its training. command: the training command.
    """
    last_validation = [describe_validation(e) for e in log if "held_out" in e][-1:]
    write_text(folder / "README.md", "\n".join([
        f"# {title}", "", *(f"- {fact}" for fact in (*facts, *last_validation)), "",
        "## Training", "", "```", command, "```", "",
        "## Use", "", "TARGET is the converted target.", "", "```",
        "python generate.py --checkpoint TARGET --draft THIS_FOLDER --prompt ...",
        "```", "",
    ]))
