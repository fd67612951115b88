"""Draw the charts of README.md and docs/benchmarks.md, and write the numbers beside them.

    python benchmarks/charts.py

Nothing is measured: the figures come from peers-emerald.json, evaluate.json, drafters.json, step.json,
step_batch.json and ranks.json in benchmarks/results, and everything that is written goes there too.
"""
from __future__ import annotations

import csv
import json
import statistics
import sys

from bench import RESULTS  # first: it makes the modules below importable
from step import TREES
from step_model import TERMS, StepModel

from common.plots import picture

# The result files name the processor only.
MACHINE = "2 threads of a virtual AMD EPYC (AVX512-BF16, VNNI)"
PEERS, PEERS_MACHINE = "peers-emerald", "2 threads of a virtual Intel Xeon (AVX-512, VNNI)"
DARK, LIGHT, GREY = "#2a6fbb", "#9cc3e6", "#b8b8b8"
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
PRECISIONS = {"none": "bf16", "int8": "int8", "w8a8": "w8a8"}


def read(name: str) -> dict:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def write_csv(name: str, head: list[str], rows: list[list]) -> None:
    """benchmarks/results/NAME.csv; numbers with three digits after the point."""
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows([f"{x:.3f}" if isinstance(x, float) else x for x in row] for row in rows)


def overview() -> None:
    """Tokens per second of this project and its peers on the same weights."""
    def label(name: str) -> str:
        program, _, rest = name.partition(" ")
        if program != "ours":
            return name.replace("Q8_0", "Q8_0 (8 bits)").replace("OpenVINO", "OpenVINO (8 bits)")
        method, _, precision = rest.partition(" ")
        return f"this project {precision or 'bf16'}, {method}"

    ranked = sorted(read(PEERS)["summary"].items(), key=lambda item: item[1]["rate"])
    ours = {True: DARK, False: LIGHT}
    colours = [ours["EAGLE" in name] if name.startswith("ours") else GREY for name, _ in ranked]
    with picture(RESULTS / "overview.png", 8, 0.6 + 0.3 * len(ranked)) as figure:
        axes = figure.add_subplot()
        bars = axes.barh([label(name) for name, _ in ranked], [r["rate"] for _, r in ranked], color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set(xlabel="tokens per second, one text at a time", xlim=(0, 295))
        words = f"SmolLM2-135M-Instruct, the same weights, 12 questions of MT-bench, greedy;\n{PEERS_MACHINE}"
        figure.suptitle(words, fontsize="medium")


def sets() -> None:
    """EAGLE-3 on the papers' six sets: the numbers only, `evaluate.py` has drawn them."""
    write_csv("evaluate", ["temperature", "set", "questions", "speedup", "tau", "texts equal", "errors"], [
        [row[key] for key in ("temperature", "set", "questions", "speedup", "tau", "equal", "errors")]
        for row in read("evaluate")["rows"] if row["method"] == "eagle3"
    ])


def drafters() -> None:
    """All drafters and plain decoding on the papers' six sets, and what Spec-Bench published."""
    record = read("drafters")
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
    write_csv("drafters", [*head, "texts equal", "Spec-Bench speedup", "Spec-Bench tau"], lines)
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
        machine = _machine(record)
        figure.suptitle(f"SmolLM2-135M-Instruct, greedy, {machine}; Spec-Bench: Vicuna-7B, one RTX 3090")


def steps() -> None:
    """What a step costs, by rows, context and precision."""
    record = read("step")
    rows = record["rows"]
    write_csv("step", ["precision", "context", "rows", "milliseconds", "times plain", "share of bandwidth"], [
        [PRECISIONS[r["mode"]], r["context"], r["rows"], r["step"], r["x plain"], r["roof"]] for r in rows
    ])
    contexts = sorted({r["context"] for r in rows})
    with picture(RESULTS / "step.png", 10, 3.2) as figure:
        for axes, context in zip(figure.subplots(1, len(contexts)), contexts):
            for mode, label in PRECISIONS.items():
                own = [r for r in rows if (r["mode"], r["context"]) == (mode, context)]
                axes.plot([r["rows"] for r in own], [r["step"] for r in own], "o-", markersize=3, label=label)
            axes.set(xlabel="rows of a step", ylim=(0, None), title=f"context {context:,}")
            axes.set_xticks((1, 8, 16, 30, 60))
        figure.axes[0].set_ylabel("milliseconds")
        figure.axes[0].legend()
        figure.suptitle(f"A step of SmolLM2-135M-Instruct (1 row: plain decoding), {_machine(record)}")


def scaling() -> None:
    """A step over batch, tree, context and ranks: what was measured (points), what the model says (lines)."""
    records = [read(name) for name in ("step", "step_batch")]
    rows = [row for record in records for row in record["rows"] if row["mode"] == "none"]
    measured = [(TREES[row["rows"]], row["batch"], row["context"], row["step"]) for row in rows]
    ranks = read("ranks")
    model = StepModel.fitted(measured, ranks["exchange"]["layers"])
    errors = model.errors(measured)
    write_csv("scaling", ["what", "milliseconds"], [
        *([term, f"{ms:.6f}"] for term, ms in zip(TERMS, model.milliseconds)),
        ["steps measured", len(errors)],
        ["relative error, median", errors[len(errors) // 2]], ["relative error, most", errors[-1]],
    ])
    with picture(RESULTS / "scaling.png", 12, 3.2) as figure:
        batch, tree, context, several = figure.subplots(1, 4)
        for nodes, colour in ((1, GREY), (8, DARK)):
            own, label = [m for m in measured if m[0].nodes == nodes], "plain" if nodes == 1 else "tree 8/2/4"
            _steps(batch, model, [m for m in own if m[2] == 128], 1, colour, label)
            _steps(context, model, [m for m in own if m[1] == 1], 2, colour, label)
        _steps(tree, model, [m for m in measured if m[1:3] == (1, 128)], 0, DARK, None)
        words = "texts decoded together", "rows of a tree (1: plain)", "tokens of context"
        for axes, label in zip((batch, tree, context), words):
            axes.set(xlabel=label, ylim=(0, None))
        batch.legend()
        _ranks(several, ranks)
        batch.set_ylabel("milliseconds of a step")
        machine = _machine(records[0])
        figure.suptitle(f"SmolLM2-135M-Instruct, bf16, {machine}: measured (points, bars), model (lines)")


def _machine(record: dict) -> str:
    """What a result file says of processor, threads and instruction set."""
    return f"{record['threads']} threads of a virtual {record['device']} ({record['isa']})"


def _steps(axes, model: StepModel, measured: list[tuple], along: int, colour: str, label: str | None) -> None:
    """Measured steps as points and the model as a line, over what stands at place `along` of a step."""
    def at(step: tuple) -> int:
        return step[along].nodes if along == 0 else step[along]

    ordered = sorted(measured, key=at)
    places = [at(step) for step in ordered]
    axes.plot(places, [ms for *_, ms in ordered], "o", markersize=4, color=colour)
    axes.plot(places, [model(*step) for *step, _ in ordered], color=colour, label=label)


def _ranks(axes, record: dict) -> None:
    """A step in one process and on several ranks, and what the former and the exchanges add up to."""
    exchanges = 2 * record["exchange"]["layers"] + 1
    took = sorted((int(rows), us / 1e3) for rows, us in record["exchange"]["microseconds"].items())
    for x, (method, (_, exchange)) in enumerate(zip(("plain", "EAGLE-3"), took)):
        runs = [run for run in record["runs"] if run["method"] == method]
        times = [(run["ranks"], run["tau"] / rate * 1e3) for run in runs for rate in run["rates"]]
        steps = [statistics.median(ms for n, ms in times if n == count) for count in (1, record["ranks"])]
        for shift, ms, colour in zip((-0.19, 0.19), steps, (GREY, DARK)):
            axes.bar_label(axes.bar(x + shift, ms, 0.36, color=colour), fmt="%.1f", padding=2)
        axes.plot(x + 0.19, steps[0] + exchanges * exchange, "_", markersize=22, color="black")
    axes.set_xticks(range(2), ("plain", f"tree {record['tree'].replace(',', '/')}"))
    axes.set_xlabel(f"one process of {record['threads']} threads; {record['ranks']} ranks of one")


def main() -> int:
    """Draw all. Returns the exit status."""
    for draw in (overview, sets, drafters, steps, scaling):
        draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
