"""The outputs of a run that people read: its log, and the model card beside the head."""
from __future__ import annotations

import json
import operator
import sys
import time
from itertools import accumulate
from pathlib import Path

from tqdm import tqdm

from common.errors import counted
from common.files import read_text
from common.progress import live_bar
from common.writing import write_text, writing


def chain_tau(accuracy: list[float]) -> float:
    """Return the tokens per step of a greedy chain whose draft step i is right with probability accuracy[i]:
    1 + the sum of their running products.
    """
    return 1.0 + sum(accumulate(accuracy, operator.mul))


class TrainingLog:
    """A live line, and WORK/log.jsonl in step with the saved state.

    A run may be killed later than it was saved: entries after `step` are dropped. An entry of a step has
    step, loss, accuracy, norm and lr, one of a validation step, epoch, held_out (accuracies) and maybe tau.
    """

    def __init__(self, folder: Path, step: int, total: int):
        self.path = folder / "log.jsonl"
        self.entries = [entry for entry in read_log(self.path) if entry["step"] <= step] if step else []
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in self.entries))
        self.bar = live_bar(
            total=total, initial=step, desc="training",
            bar_format="{desc} |{bar:12}| {percentage:.1f}% [{elapsed}<{remaining}{postfix}]",
        )
        self.began, self.tokens = time.time(), 0

    def move(self, tokens: int, progress: float) -> None:
        """Move the live line by `tokens` tokens of this process, to `progress` (see `Trainer._progress`)."""
        self.tokens += tokens
        self.bar.n = min(progress, self.bar.total)
        speed = self.tokens / (time.time() - self.began)
        self.bar.set_postfix_str(f"{counted(self.tokens, 'token')}, {speed:.0f} tok/s", refresh=False)
        self.bar.update(0)

    def step(self, entry: dict) -> None:
        """Add an optimizer step."""
        line = f"loss {entry['loss']:.3f}, {_figures(entry['accuracy'], 2)}"
        self.bar.set_description_str(line, refresh=False)
        self._write(entry)

    def validation(self, entry: dict) -> None:
        """Add and print a validation."""
        tqdm.write(figures_of(entry), file=sys.stderr)
        self._write(entry)

    def _write(self, entry: dict) -> None:
        self.entries.append(entry)
        with writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def _figures(accuracy: list[float], digits: int) -> str:
    """Name the accuracy by draft step, and the chain τ that follows from it, as docs/training.md does."""
    shares = " ".join(f"{a:.{digits}f}" for a in accuracy)
    return f"accuracy {shares}, chain τ {chain_tau(accuracy):.2f}"


def figures_of(validation: dict) -> str:
    """Name the figures of a validation in one line, with the τ of the real decoder if there is one."""
    line = f"epoch {validation['epoch']}: held-out {_figures(validation['held_out'], 3)}"
    return line + (f", tree τ {validation['tau']:.2f}" if "tau" in validation else "")


def read_log(path: Path) -> list[dict]:
    """Return the entries of a log, without a last line that a kill cut off."""
    entries = []
    for line in read_text(path).splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def write_card(
    folder: Path, *, title: str, facts: list[str], command: str, log: list[dict], speculate: str
) -> None:
    """Write the model card FOLDER/README.md.

    facts: about the head, its text and its training, a line each. command: that trained the head. speculate:
    the method that decodes with it.
    """
    judged = [figures_of(e) for e in log if "held_out" in e][-1:]
    write_text(folder / "README.md", "\n".join([
        f"# {title}", "", *(f"- {fact}" for fact in (*facts, *judged)), "",
        "## Training", "", "```", command, "```", "",
        "## Use", "", "TARGET is the converted target.", "", "```",
        f"python generate.py --checkpoint TARGET --speculate {speculate} --draft THIS_FOLDER --prompt ...",
        "```", "",
    ]))
