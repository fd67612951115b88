"""The picture of a run: loss, accuracy of every draft step, and acceptance length."""
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from common.plots import picture
from training.log import chain_tau


def draw_curves(entries: list[dict], path: Path) -> None:
    """Draw the entries of a log as a PNG; nothing if there is no optimizer step among them, or no matplotlib.
    """
    steps, validations = [e for e in entries if "loss" in e], [e for e in entries if "held_out" in e]
    if not steps or not find_spec("matplotlib"):
        return
    with picture(path, 13, 3.8) as figure:
        left, middle, right = figure.subplots(1, 3)
        _draw_loss(left, steps)
        _draw_accuracy(middle, steps, validations)
        _draw_tau(right, validations)


DOTS = {"marker": "o", "markersize": 3}


def _places(entries: list[dict]) -> list[int]:
    return [e["step"] for e in entries]


def _draw_loss(axes, steps: list[dict]) -> None:
    losses = [e["loss"] for e in steps]
    axes.plot(_places(steps), losses, color="0.8", linewidth=0.7)
    axes.plot(_places(steps), smooth(losses), color="C0")
    axes.set(title="training loss", xlabel="optimizer step")


def _draw_accuracy(axes, steps: list[dict], validations: list[dict]) -> None:
    from matplotlib import colormaps

    most = max(len(e["accuracy"]) for e in steps)
    for i in range(most):
        color = colormaps["viridis"](i / max(1, most - 1) * 0.9)
        some = [e for e in steps if len(e["accuracy"]) > i]
        means = smooth([e["accuracy"][i] for e in some])
        axes.plot(_places(some), means, color=color, linewidth=0.8, alpha=0.6)
        some = [e for e in validations if len(e["held_out"]) > i]
        axes.plot(_places(some), [e["held_out"][i] for e in some], color=color, label=f"step {i + 1}", **DOTS)
    title = "first choice right (line: training, dots: held out)"
    axes.set(title=title, xlabel="optimizer step", ylim=(0, 1))
    if validations:
        axes.legend(ncols=2, fontsize=7, loc="lower right")


def _draw_tau(axes, validations: list[dict]) -> None:
    if validations:
        chains = [chain_tau(e["held_out"]) for e in validations]
        axes.plot(_places(validations), chains, label="chain, from held-out accuracy", **DOTS)
    if decoded := [e for e in validations if "tau" in e]:
        taus = [e["tau"] for e in decoded]
        axes.plot(_places(decoded), taus, label="tree, decoded held-out prompts", **DOTS)
    axes.set(title="acceptance length τ", xlabel="optimizer step")
    if validations:
        axes.legend(loc="lower right")


def smooth(values: list[float]) -> list[float]:
    """A running mean that forgets over a twentieth of the run."""
    keep, mean, means = 1 - 1 / max(1, len(values) / 20), None, []
    for v in values:
        mean = v if mean is None else keep * mean + (1 - keep) * v
        means.append(mean)
    return means
