"""The model card: README.md beside a trained head, with the figures of its run."""
from __future__ import annotations

from pathlib import Path

from common.files import write_text
from networks.head import Head
from training.choices import OPTIMIZERS
from training.figures import report
from training.log import chain_tau
from training.plan import SHORT, Plan

KINDS = {  # title, method of training, and the --speculate that decodes with it
    "eagle3": ("EAGLE-3 head", "training-time test", "eagle3"),
    "eagle": ("EAGLE-1/EAGLE-2 head", "feature regression", "eagle2"),
    "p-eagle": ("P-EAGLE head", "parallel drafting", "p-eagle"),
    "dflash": ("DFlash head", "blocks from random anchors", "dflash"),
    "dspark": ("DSpark head", "blocks from random anchors", "dspark"),
    "medusa": ("Medusa heads", "distillation", "medusa"),
    "hydra": ("Hydra heads", "distillation", "hydra"),
}


def write_card(
    folder: Path, *, command: str, head: Head, kind: str, target: str, figures: dict, covered: float,
    plan: Plan, steps: int, log: list[dict], seconds: float | None,
) -> None:
    """Write FOLDER/README.md.

    target: its name. figures: of the text, see `training.figures.describe`. covered: share of the answer
    tokens that the head can draft. steps: of drafting. seconds: None if the run was interrupted.
    """
    title, method, speculate = KINDS[kind]
    weights = sum(t.numel() for t in head.own_state().values() if t.is_floating_point()) / 1e6
    vocabulary = "embedding and lm_head are the target's"
    if kind != "eagle":
        vocabulary = (f"draft vocabulary {head.args.draft_vocab_size:,} of {head.args.vocab_size:,} ids,"
                      f" {covered:.2%} of the answer tokens")
    write_text(folder / "README.md", "\n".join([
        f"# {title} for {target}", "",
        f"{weights:.1f} million weights of its own in bfloat16; {vocabulary}.", "",
        "## Text", "", *(f"    {line}" for line in report(figures).splitlines()), "",
        "## Training", "", f"{_training(method, plan, steps, log, seconds)}.", "",
        "```", command, "```", "",
        *_held_out([e for e in log if "held_out" in e]),
        "## Use", "", "```",
        "python convert_checkpoint.py --checkpoint THIS_FOLDER --target TARGET",
        f"python generate.py --checkpoint TARGET --speculate {speculate} --prompt ...", "```", "",
        "TARGET is the converted target.", "",
    ]))


def _training(method: str, plan: Plan, steps: int, log: list[dict], seconds: float | None) -> str:
    """How the head was trained, in one line."""
    short = plan.short_epochs if steps > SHORT else 0
    updates = max((e["step"] for e in log), default=0)
    parts = [
        f"{method}, {_number(steps, 'draft step')}",
        _number(plan.epochs, "epoch") + (f", of which the first {short} unroll fewer steps" if short else ""),
        f"{updates:,} optimizer steps of at most {plan.batch_tokens:,} tokens",
        f"{OPTIMIZERS[plan.optimizer]} {plan.lr:g}, {plan.schedule}"
        + (f", average {plan.ema:g}" if plan.ema else ""),
    ]
    if seconds:
        parts.append(f"{seconds / 60:.0f} minutes")
    return "; ".join(parts)


def _number(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n > 1)}"


def _held_out(validations: list[dict]) -> list[str]:
    """The section on held-out text: a table with a line for every validation; nothing without any."""
    if not validations:
        return []
    steps, decoded = range(1, len(validations[-1]["held_out"]) + 1), any("tau" in e for e in validations)
    tree = ", then ".join(dict.fromkeys(e["tree"] for e in validations if "tree" in e))
    caption = ("How often the head's first choice is the target's, by draft step, and the acceptance length τ"
               " of a greedy chain that follows")
    if decoded:
        caption += f"; last, τ of the real decoder on held-out prompts (greedy, tree {tree})"
    rows = [["after epoch", *map(str, steps), "chain τ"] + ["tree τ"] * decoded]
    rows.append(["---"] * len(rows[0]))
    for e in validations:
        tau = [f"{e['tau']:.2f}" if "tau" in e else ""] * decoded
        accuracy = [f"{a:.3f}" for a in e["held_out"]]
        rows.append([str(e["epoch"]), *accuracy, f"{chain_tau(e['held_out']):.2f}", *tau])
    table = ["| " + " | ".join(cells) + " |" for cells in rows]
    picture = "![loss, accuracy and τ over the run](curves.png)"
    return ["## Held-out text", "", f"{caption}.", "", *table, "", picture, ""]
