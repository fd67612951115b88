"""Draw the chart of drafters in docs/benchmarks.md, and write the numbers beside it.

    python benchmarks/charts.py

Nothing is measured: the figures come from drafters.json in benchmarks/results, where all is written too.
"""
from __future__ import annotations

import csv
import json

from bench import RESULTS, ROOT  # first: it makes the modules below importable
from plots import picture

DARK, GREY = "#2a6fbb", "#b8b8b8"
SETS = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum", "mean")
# Spec-Bench's leaderboard for Vicuna-7B, greedy, on one RTX 3090: speedup, acceptance length.
PUBLISHED = {
    "lookup": (1.55, 1.74), "hydra": (1.80, 3.26), "medusa": (1.44, 2.32), "rest": (1.32, 1.63),
    "lookahead": (1.08, 1.65), "eagle": (2.16, 3.57), "eagle2": (2.25, 4.36), "draft-model": (1.83, 2.29),
}
NAMES = {
    "eagle3": "EAGLE-3", "eagle2": "EAGLE-2", "eagle": "EAGLE-1", "hydra": "Hydra++", "medusa": "Medusa",
    "lookup": "prompt lookup", "rest": "REST", "lookahead": "Lookahead", "draft-model": "draft model (SpS)",
    "p-eagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark", "lookup+eagle3": "lookup + EAGLE-3",
    "ours": "EAGLE-3, our head", "lookup+ours": "lookup + our head",  # trained for longer than the others
}


def drafters() -> None:
    """All drafters and plain decoding on the papers' six sets, and what Spec-Bench published."""
    record = json.loads((ROOT / "benchmarks" / "results" / "drafters.json").read_text())
    rows = {(r["temperature"], r["method"], r["set"]): r for r in record["rows"]}
    cells = {(method, name): row for (temperature, method, name), row in rows.items() if temperature == 0}
    ranked = sorted({method for method, _ in cells}, key=lambda m: -cells[m, "mean"]["speedup"])
    head = ["temperature", "method", *(f"{name} {what}" for name in SETS for what in ("speedup", "tau"))]
    lines = []
    for temperature in sorted({temperature for temperature, *_ in rows}):
        for method in ranked:
            figures = [rows[temperature, method, name][what] for name in SETS for what in ("speedup", "tau")]
            known = PUBLISHED.get(method, ("", "")) if temperature == 0 else ("", "")
            lines.append([temperature, method, *figures, rows[temperature, method, "mean"]["equal"], *known])
    with open(RESULTS / "drafters.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*head, "texts equal", "Spec-Bench speedup", "Spec-Bench tau"])
        writer.writerows([f"{x:.3f}" if isinstance(x, float) else x for x in line] for line in lines)
    ranked.remove("none")
    with picture(RESULTS / "drafters.png", 11, 0.9 + 0.41 * len(ranked)) as figure:
        speed, tau, published = figure.subplots(1, 3, sharey=True, width_ratios=(7, 7, 5))
        for axes, what, title in (
            (speed, "speedup", "speedup over plain decoding"), (tau, "tau", "acceptance length τ")
        ):
            values = [[cells[method, name][what] for name in SETS] for method in ranked]
            highest = max(map(max, values))
            axes.imshow(values, cmap="RdBu", vmin=2 - highest, vmax=highest, aspect="auto")  # white is 1
            for y, row in enumerate(values):
                for x, value in enumerate(row):
                    colour = "white" if abs(value - 1) > 0.6 * (highest - 1) else "black"
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour)
            axes.set_xticks(range(len(SETS)), SETS, rotation=30)
            axes.set_title(title)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        speed.set_yticks(range(len(ranked)), [NAMES[method] for method in ranked])
        for shift, colour, label, known in (
            (-0.19, DARK, "here, mean", {m: cells[m, "mean"]["speedup"] for m in ranked}),
            (0.19, GREY, "Spec-Bench", {m: PUBLISHED[m][0] for m in ranked if m in PUBLISHED}),
        ):
            places = [ranked.index(m) + shift for m in known]
            bars = published.barh(places, known.values(), 0.38, color=colour, label=label)
            published.bar_label(bars, fmt="%.2f", padding=2)
        published.tick_params(axis="y", length=0)
        published.set(xlim=(0, 2.9), title="speedup here and published")
        published.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=2)
        machine = f"{record['threads']} threads of a virtual {record['device']} ({record['isa']})"
        figure.suptitle(f"SmolLM2-135M-Instruct, greedy, {machine}; Spec-Bench: Vicuna-7B, one RTX 3090")


if __name__ == "__main__":
    drafters()
