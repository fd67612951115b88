"""What a person looks at while a head is trained: a live line, a JSON-lines log, a picture of the curves."""
from __future__ import annotations

import json
import sys
from pathlib import Path

from tqdm import tqdm

from common.files import atomic_path
from common.plots import picture


def chain_tau(accuracy: list[float]) -> float:
    """Tokens per step of a greedy chain whose draft step i is right with probability accuracy[i]: 1 + the sum
    of products.
    """
    tau, survive = 1.0, 1.0
    for a in accuracy:
        survive *= a
        tau += survive
    return tau


class Record:
    """The log of one run, WORK/log.jsonl, in step with its state: entries behind `step` are of a run that was
    killed later than it was saved, and are dropped.
    """

    def __init__(self, folder: Path, step: int, total: int, quiet: bool = False):
        self.path, self.quiet = folder / "log.jsonl", quiet
        self.entries = [entry for entry in read_log(self.path) if entry["step"] <= step] if step else []
        with atomic_path(self.path) as part:
            part.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))
        self.file = open(self.path, "a", buffering=1)  # noqa: SIM115 - lives as long as the run
        shown = "{desc} |{bar:12}| {n}/{total} [{elapsed}<{remaining}]"
        every = 0.5 if sys.stderr.isatty() else 15  # seconds
        self.bar = tqdm(
            total=total, initial=step, desc="training", bar_format=shown, mininterval=every,
            maxinterval=every, disable=quiet
        )

    def step(self, entry: dict, speed: float, log: bool) -> None:
        """One optimizer step: `entry` has step, loss, accuracy and lr; speed in tokens per second."""
        hits = " ".join(f"{a:.2f}" for a in entry["accuracy"])
        tau = chain_tau(entry["accuracy"])
        self.bar.set_description_str(
            f"loss {entry['loss']:.3f} right {hits} chain tau {tau:.2f} {speed:.0f} tok/s", False
        )
        self.bar.update(1)
        if log:
            self._write(entry)

    def validation(self, entry: dict) -> None:
        """One validation: `entry` has step, epoch, held_out (accuracies) and maybe tau."""
        hits = " ".join(f"{a:.3f}" for a in entry["held_out"])
        tau = f" tau {entry['tau']:.3f}" if "tau" in entry else ""
        if not self.quiet:
            tqdm.write(
                f"epoch {entry['epoch']} held-out right {hits} chain tau {chain_tau(entry['held_out']):.2f}{tau}", file=sys.stderr
            )
        self._write(entry)

    def _write(self, entry: dict) -> None:
        self.entries.append(entry)
        self.file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Ends the live line and the file."""
        self.bar.close()
        self.file.close()


def read_log(path: Path) -> list[dict]:
    """The entries of a log; a last line that a kill cut off is left out."""
    entries = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return entries


def draw(entries: list[dict], path: Path) -> None:
    """Loss, accuracy of every draft step, and tau over the steps, as a PNG."""
    steps, held = [e for e in entries if "loss" in e], [e for e in entries if "held_out" in e]
    if not steps:
        return
    from matplotlib import colormaps

    with picture(path, 13, 3.8) as figure:
        left, middle, right = figure.subplots(1, 3)
        x = [e["step"] for e in steps]
        left.plot(x, [e["loss"] for e in steps], color="0.8", linewidth=0.7)
        left.plot(x, smooth([e["loss"] for e in steps]), color="C0")
        left.set(title="training loss", xlabel="optimizer step")
        most, dots = max(len(e["accuracy"]) for e in steps), {"marker": "o", "markersize": 3}
        for i in range(most):
            color = colormaps["viridis"](i / max(1, most - 1) * 0.9)
            has = [e for e in steps if len(e["accuracy"]) > i]
            middle.plot(
                [e["step"] for e in has], smooth([e["accuracy"][i] for e in has]), color=color, linewidth=0.8,
                alpha=0.6
            )
            has = [e for e in held if len(e["held_out"]) > i]
            middle.plot(
                [e["step"] for e in has], [e["held_out"][i] for e in has], color=color, label=f"step {i + 1}",
                **dots
            )
        middle.set(
            title="first choice right (line: training, dots: held out)", xlabel="optimizer step", ylim=(0, 1)
        )
        if held:
            middle.legend(ncols=2, fontsize=7, loc="lower right")
            right.plot(
                [e["step"] for e in held], [chain_tau(e["held_out"]) for e in held],
                label="chain, from held-out accuracy", **dots
            )
        taus = [e for e in held if "tau" in e]
        if taus:
            right.plot(
                [e["step"] for e in taus], [e["tau"] for e in taus], label="tree, decoded held-out prompts",
                **dots
            )
        right.set(title="acceptance length τ", xlabel="optimizer step")
        if held:
            right.legend(loc="lower right")


def smooth(values: list[float]) -> list[float]:
    """A running mean that forgets over a twentieth of the run."""
    keep, mean, result = 1 - 1 / max(1, len(values) / 20), None, []
    for v in values:
        mean = v if mean is None else keep * mean + (1 - keep) * v
        result.append(mean)
    return result
