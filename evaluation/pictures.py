"""Pictures: acceptance, calibration, acceptance lengths, the table, and one drafted tree."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.plots import picture
from engine.request import Draft
from evaluation.answers import PLAIN
from evaluation.observing import TreeStatistics, children_of, depths, probabilities
from evaluation.table import by_temperature

GREEN, GREY = "#3a9b5c", "#b8b8b8"
MOST_LABELLED = 4  # with more methods side by side, numbers on the bars would overlap
LEAST_COUNTED = 20  # shares of fewer are noise


def text_tree(draft: Draft, word: Callable[[int], str]) -> str:
    """Draw a tree for the terminal: ● accepted, ○ rejected, each with the drafter's probability.

    word: gives the text of a token id.
    """
    children, labels, lines = children_of(draft), _labels(draft), [f"● {word(draft.tokens[0])!r}"]

    def add_children(parent: int, indent: str) -> None:
        *others, last = children[parent]
        for node in (*others, last):
            branch, below = ("└─", "   ") if node == last else ("├─", "│  ")
            mark = "●" if node in draft.path else "○"
            lines.append(f"{indent}{branch}{mark} {word(draft.tokens[node])!r}{labels[node]}")
            if node in children:
                add_children(node, indent + below)

    add_children(0, "")
    return "\n".join(lines)


def _labels(draft: Draft) -> list[str]:
    """Write the probability of each node; empty for the root, and for all if the drafter gives none."""
    return ["", *(f" {p:.2f}" if draft.scores else "" for p in probabilities(draft)[1:])]


def draw_tree(draft: Draft, word: Callable[[int], str], method: str, path: Path) -> None:
    """Draw the same tree as a PNG, the root at the left."""
    children, labels, depth, height = children_of(draft), _labels(draft), depths(draft), {}

    def place(node: int, row: float) -> float:
        """Give a node the middle of its leaves; return the next free row."""
        if node not in children:
            height[node] = row
            return row + 1
        for child in children[node]:
            row = place(child, row)
        height[node] = (height[children[node][0]] + height[children[node][-1]]) / 2
        return row

    rows, levels, accepted = place(0, 0), max(depth), {0, *draft.path}
    with picture(path, 1.9 * (levels + 1), max(2.5, 0.24 * rows + 0.8)) as figure:
        axes = figure.add_subplot()
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parent)):
            hit, ends = node in accepted, (parent, node)
            axes.plot(
                [depth[end] for end in ends], [height[end] for end in ends], zorder=1,
                color=GREEN if hit else GREY, linewidth=2.2 if hit else 0.8,
            )
            text = repr(word(token))[1:-1].replace("$", r"\$").replace(" ", "␣") or "∅"
            box = {"boxstyle": "round,pad=0.25", "facecolor": GREEN if hit else "0.95", "edgecolor": "none"}
            axes.text(
                depth[node], height[node], text + labels[node], ha="center", va="center", fontsize=8,
                color="white" if hit else "0.25", zorder=2, bbox=box,
            )
        title = f"{method}, greedy: {len(depth)} nodes; drafted and accepted: {len(accepted) - 1}"
        axes.set(xlim=(-0.5, levels + 0.5), ylim=(rows, -1), title=title)
        axes.axis("off")


def draw_acceptance(statistics: dict[str, TreeStatistics], path: Path) -> None:
    """Draw the acceptance of each method by draft depth, and by rank among siblings."""
    with picture(path, 9, 3.6) as figure:
        left, right = figure.subplots(1, 2)
        _draw_shares(left, {name: s.depth for name, s in statistics.items()})
        left.set(title="accepted, by draft depth", xlabel="depth, where the tree went on")
        _draw_shares(right, {name: s.rank for name, s in statistics.items()})
        right.set(title="accepted, by rank among siblings", xlabel="rank")
        for axes in (left, right):
            axes.xaxis.get_major_locator().set_params(integer=True)
        _legend_below(figure, left)


def draw_calibration(statistics: dict[str, TreeStatistics], path: Path) -> None:
    """Draw the share of nodes accepted against the drafter's probability: trees are pruned by it."""
    with picture(path, 4.6, 4.2) as figure:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
        _draw_shares(axes, {name: s.confidence for name, s in statistics.items()})
        axes.set(xlabel="probability the drafter gave", xlim=(0, 1), title="the drafter's confidence")
        if axes.get_legend_handles_labels()[0]:  # some drafters give no probabilities
            axes.legend()


def _draw_shares(axes, counts: dict[str, dict[int, list]]) -> None:
    """Draw the share accepted of each method, see `TreeStatistics` for its counts."""
    for number, (name, table) in enumerate(counts.items()):
        cells = [table[key] for key in sorted(table) if table[key][0] >= LEAST_COUNTED]
        if cells:
            points = [(total / tried, hits / tried) for tried, hits, total in cells]
            axes.plot(*zip(*points), marker="o", markersize=4, color=f"C{number}", label=name)
    axes.set(ylabel="share accepted, greedy", ylim=(0, 1))


def draw_lengths(lengths: dict[str, list[int]], path: Path) -> None:
    """Draw the distribution of the tokens that a step emits, for each method."""
    values = range(1, max(max(n) for n in lengths.values()) + 1)
    with picture(path, 6, max(3.4, 0.25 * len(lengths))) as figure:  # the legend stands in it
        axes = figure.add_subplot()
        _draw_bars(axes, {
            f"{name}, {sum(steps) / len(steps):.2f} over all steps":
                [steps.count(n) / len(steps) for n in values] for name, steps in lengths.items()
        })
        axes.set(xlabel="tokens emitted by a step", ylabel="share of steps")
        axes.set_xticks(range(len(values)), values)
        axes.legend()


def draw_table(rows: list[dict], sets: list[str], path: Path) -> None:
    """Draw τ and speedup of each method on each set, a pair of panels per temperature. rows: see `summarise`.
    """
    tables = by_temperature([row for row in rows if row["method"] != PLAIN], sets)
    with picture(path, 11, 3.3 * len(tables)) as figure:
        panels = figure.subplots(len(tables), 2, squeeze=False)
        for pair, (temperature, shown, methods) in zip(panels, tables):
            for axes, what, title in zip(
                pair, ("tau", "speedup"), ("acceptance length τ", "speedup over plain decoding")
            ):
                _draw_bars(axes, {
                    method: [by_set.get(name, {}).get(what) or 0 for name in shown]
                    for method, by_set in methods.items()
                })
                for bars in axes.containers if len(methods) <= MOST_LABELLED else ():
                    rotation = 0 if len(methods) == 1 else 90
                    axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2, rotation=rotation)
                axes.axhline(1, color=GREY, linewidth=1)
                axes.set_xticks(range(len(shown)), shown, rotation=20, ha="right")
                axes.set(title=f"{title}, temperature {temperature:g}")
                axes.margins(y=0.15 if len(methods) == 1 else 0.25)
        _legend_below(figure, panels[0, 0])


def _draw_bars(axes, heights: dict[str, list[float]]) -> None:
    """Draw the heights of each method beside those of the others."""
    width = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        left = (number - (len(heights) - 1) / 2) * width
        axes.bar([i + left for i in range(len(values))], values, width, color=f"C{number}", label=name)


def _legend_below(figure, axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=MOST_LABELLED + 1, fontsize=8)
