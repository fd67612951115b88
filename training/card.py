"""The model card: README.md beside a trained head, with the figures of its run."""
from __future__ import annotations

import shlex
from pathlib import Path

from networks.head import Head
from training.corpus import report
from training.log import chain_tau
from training.trainer import SHORT


def write_card(
    folder: Path, *, launch: str, head: Head, kind: str, target: dict, data: dict, covered: float,
    command: list[str], plan: dict,
    steps: int, log: list[dict], seconds: float | None,
) -> None:
    """Write FOLDER/README.md. data: `training.corpus.describe`; log: the entries of the run."""
    title, method, speculate = {
        "eagle3": ("EAGLE-3 head", "training-time test", "eagle3"),
        "eagle": ("EAGLE-1/EAGLE-2 head", "feature regression", "eagle2"),
        "medusa": ("Medusa heads", "distillation", "medusa"),
        "hydra": ("Hydra heads", "distillation", "hydra"),
    }[kind]
    own = sum(t.numel() for t in head.own_state().values() if t.is_floating_point()) / 1e6
    what = "embedding and lm_head are the target's"
    if kind != "eagle":
        what = f"draft vocabulary {head.args.draft_vocab_size:,} of {head.args.vocab_size:,} ids, {covered:.2%} of the answer tokens"
    done = [f"{method}, {steps} draft step{'s' * (steps > 1)}"]
    short = plan["short_epochs"] * (steps > SHORT)
    done += [
        f"{plan['epochs']} epoch{'s' * (plan['epochs'] > 1)}" + (
            f", of which the first {short} unroll fewer steps" if short else ""
        )
    ]
    done += [
        f"{max(e['step'] for e in log) if log else 0:,} optimizer steps of at most {plan['batch_tokens']:,} tokens"
    ]
    done += [
        f"AdamW {plan['lr']:g}, {plan['schedule']}" + (f", average {plan['ema']:g}" if plan["ema"] else "")
    ]
    if seconds:  # else the run was interrupted
        done += [f"{seconds / 60:.0f} minutes"]
    lines = [
        f"# {title} for {target['name']}", "",
        f"{own:.1f} million weights of its own in bfloat16; {what}.", "",
        "## Text", "", *(f"    {line}" for line in report(data).splitlines()), "",
        "## Training", "", "; ".join(done) + ".", "", "```", f"{launch} train.py {shlex.join(command)}",
        "```", "",
        *_held_out([e for e in log if "held_out" in e]),
        "## Use", "", "```",
        "python convert_checkpoint.py --checkpoint THIS_FOLDER --target TARGET",
        f"python generate.py --checkpoint TARGET --speculate {speculate} --prompt ...", "```", "",
        "TARGET is the converted target.", "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _held_out(entries: list[dict]) -> list[str]:
    if not entries:
        return []
    steps, decoded = range(1, len(entries[-1]["held_out"]) + 1), any("tau" in e for e in entries)
    tree = ", then ".join(dict.fromkeys(e["tree"] for e in entries if "tree" in e))
    said = "How often the head's first choice is the target's, by draft step, and the acceptance length τ of a greedy chain that follows"
    said += f"; last, τ of the real decoder on held-out prompts (greedy, tree {tree})." if decoded else "."
    head = ["after epoch", *map(str, steps), "chain τ"] + ["tree τ"] * decoded
    rows = []
    for e in entries:
        tree_tau = [f"{e['tau']:.2f}" if "tau" in e else ""] * decoded
        rows.append(
            [
                str(e["epoch"]), *(f"{a:.3f}" for a in e["held_out"]), f"{chain_tau(e['held_out']):.2f}",
                *tree_tau
            ]
        )
    table = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return [
        "## Held-out text", "", said, "", *table, "", "![loss, accuracy and τ over the run](curves.png)", ""
    ]
