"""Speeds of contenders that answered the same questions: medians and ratios, as a table and as a chart."""
from __future__ import annotations

import statistics
from pathlib import Path

import bench  # noqa: F401  first: it makes the modules below importable

from common.plots import picture

BASES = ("ours plain", "llama.cpp bf16", "transformers")  # what ratios are given to, if it is measured


def summarise(rows: list[dict], plain: dict[str, str]) -> dict[str, dict]:
    """Medians of speeds and of ratios; of the speculative, equal texts, and tau if steps are known."""
    def ratio(name: str, base: str) -> float:
        return statistics.median(row["rates"][name] / row["rates"][base] for row in rows)

    summary = {}
    for name in rows[0]["rates"]:
        figures = {"rate": statistics.median(row["rates"][name] for row in rows)}
        figures |= {f"x {base}": ratio(name, base) for base in BASES if base in rows[0]["rates"]}
        if name in plain:
            figures["x its plain"] = ratio(name, plain[name])
            figures["equal"] = sum(row["equal"][name] for row in rows)
            if steps := sum(row["steps"][name] for row in rows):
                figures["tau"] = sum(row["tokens"][name] - 1 for row in rows) / steps  # the first has no step
        summary[name] = figures
    return summary


def table(summary: dict, count: int, record: dict) -> str:
    """The summary as Markdown, the fastest first."""
    bases = ["x its plain", *(f"x {base}" for base in BASES if f"x {base}" in next(iter(summary.values())))]
    heads = ["", "tokens/s", *bases, "τ", "texts equal plain"]
    lines = [
        f"{record['device']}, {record['threads']} threads, torch {record['torch']}, {record['date']};"
        f" {count} questions ({record['questions']}), at most {record['max_new_tokens']} new tokens, greedy.",
        "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|",
    ]
    for name, figures in sorted(summary.items(), key=lambda item: -item[1]["rate"]):
        cells = [name, f"{figures['rate']:.1f}"]
        cells += [f"{figures[column]:.2f}" if column in figures else "" for column in (*bases, "tau")]
        cells.append(f"{figures['equal']}/{count}" if "equal" in figures else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def chart(summary: dict, record: dict, path: Path) -> None:
    """Speeds as bars, ours in colour."""
    names = sorted(summary, key=lambda name: summary[name]["rate"])
    with picture(path, 8, 0.45 * len(names) + 1.2) as figure:
        axes = figure.add_subplot()
        colors = ["#2a6fbb" if name.startswith("ours") else "#b8b8b8" for name in names]
        bars = axes.barh(names, [summary[name]["rate"] for name in names], color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        title = f"{record['device']}, {record['threads']} threads"
        axes.set(xlabel="tokens per second (median)", title=title)
