"""What the drafted trees look like: statistics of many steps, pictures of them, and one tree drawn."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from common.plots import picture
from tree import Tree

GREEN, GREY = "#3a9b5c", "#b8b8b8"
MOST_LABELLED = 4  # methods side by side whose bars have numbers on them
BINS = 10


@dataclass
class Drawn:
    """One step: a tree, the path taken through it, and the probability of each node given its parent."""

    tokens: list[int]
    parent: list[int]
    depth: list[int]
    share: list[float]
    accepted: set[int]

    def chance(self, node: int) -> str:
        """A node's probability as a label, "" for the root and where the drafter gives none."""
        return f" {self.share[node]:.2f}" if node and any(self.share[1:]) else ""

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Of every node that has some, the likeliest first."""
        found: dict[int, list[int]] = {}
        for node in range(1, len(self.tokens)):
            found.setdefault(self.parent[node], []).append(node)
        return {above: sorted(below, key=lambda node: -self.share[node]) for above, below in found.items()}


@dataclass
class Observed:
    """Counts over the steps of one method: [tried, accepted] by depth, by rank among siblings, by confidence
    of the drafter.

    Only children of accepted nodes are tried: what hangs below a rejected one had no chance. Where an
    accepted node has none, the tree ended and nothing was tried: the deeper levels count only the steps whose
    trees went on.
    """

    depth: dict[int, list[int]] = field(default_factory=dict)
    rank: dict[int, list[int]] = field(default_factory=dict)
    # Tried, accepted, sum.
    confidence: list[list[float]] = field(default_factory=lambda: [[0, 0, 0.0] for _ in range(BINS)])
    best: Drawn | None = None  # the step that had most accepted

    def see(self, tree: Tree, path: Tensor) -> None:
        """Take in one step of a decoder's first sequence (for `Decoder.observer`)."""
        tokens, parent, depth = (t[0].tolist() for t in tree[:3])
        taken = {0, *(i for i in path[0].tolist() if i)}
        share = (
            tree.scores[0] - tree.scores[0][tree.parent[0]]
        ).exp().tolist() if tree.scores is not None else [0.0] * len(tokens)
        drawn = Drawn(tokens, parent, depth, share, taken)
        for above in taken:
            below = drawn.children.get(above, [])
            if below:
                self._count(self.depth, depth[above] + 1, any(node in taken for node in below))
            for rank, node in enumerate(below, 1):
                self._count(self.rank, rank, node in taken)
                if tree.scores is None:
                    continue
                cell = self.confidence[min(BINS - 1, int(share[node] * BINS))]
                cell[0], cell[1], cell[2] = cell[0] + 1, cell[1] + (node in taken), cell[2] + share[node]
        if self.best is None or len(taken) > len(self.best.accepted):
            self.best = drawn

    @staticmethod
    def _count(table: dict[int, list[int]], key: int, hit: bool) -> None:
        cell = table.setdefault(key, [0, 0])
        cell[0], cell[1] = cell[0] + 1, cell[1] + hit


def text_tree(drawn: Drawn, word: Callable[[int], str]) -> str:
    """A tree for the terminal: accepted nodes are marked, each with the drafter's probability of it given its
    parent.
    """
    lines = [f"● {word(drawn.tokens[0])!r}"]

    def below(above: int, indent: str) -> None:
        nodes = drawn.children.get(above, [])
        for i, node in enumerate(nodes):
            last = i == len(nodes) - 1
            mark = "●" if node in drawn.accepted else "○"
            lines.append(
                f"{indent}{'└' if last else '├'}─{mark} {word(drawn.tokens[node])!r}{drawn.chance(node)}"
            )
            below(node, indent + ("   " if last else "│  "))

    below(0, "")
    return "\n".join(lines)


def draw_tree(drawn: Drawn, word: Callable[[int], str], method: str, path: Path) -> None:
    """The same as a PNG, the root at the left."""
    height: dict[int, float] = {}

    def place(node: int, row: float) -> float:
        """Give a node the middle of its leaves; returns the next free row."""
        below = drawn.children.get(node, [])
        if not below:
            height[node] = row
            return row + 1
        for child in below:
            row = place(child, row)
        height[node] = (height[below[0]] + height[below[-1]]) / 2
        return row

    rows = place(0, 0)
    levels = max(drawn.depth)
    with picture(path, 1.9 * (levels + 1), max(2.5, 0.24 * rows + 0.8)) as figure:
        axes = figure.add_subplot()
        for node in range(1, len(drawn.tokens)):
            above, on = drawn.parent[node], node in drawn.accepted
            axes.plot(
                [drawn.depth[above], drawn.depth[node]], [height[above], height[node]],
                color=GREEN if on else GREY,
                linewidth=2.2 if on else 0.8, zorder=1,
            )
        for node, token in enumerate(drawn.tokens):
            on = node in drawn.accepted
            label = repr(word(token))[1:-1].replace("$", r"\$").replace(" ", "␣") or "∅"
            box = {"boxstyle": "round,pad=0.25", "facecolor": GREEN if on else "0.95", "edgecolor": "none"}
            axes.text(
                drawn.depth[node], height[node], label + drawn.chance(node), ha="center", va="center",
                fontsize=8, color="white" if on else "0.25", zorder=2, bbox=box,
            )
        title = f"{method}, greedy: {len(drawn.tokens)} nodes; drafted and accepted: {len(drawn.accepted) - 1}"
        axes.set(xlim=(-0.5, levels + 0.5), ylim=(rows, -1), title=title)
        axes.axis("off")


def draw_acceptance(observed: dict[str, Observed], path: Path) -> None:
    """Acceptance by draft depth, and by rank among the siblings, where there were twenty and more to count.
    """
    with picture(path, 9, 3.6) as figure:
        left, right = figure.subplots(1, 2)
        for axes, what, title in (
            (left, "depth", "by draft depth"), (right, "rank", "by rank among siblings")
        ):
            for number, (name, seen) in enumerate(observed.items()):
                table = {k: v for k, v in sorted(getattr(seen, what).items()) if v[0] >= 20}
                shares = [hit / tried for tried, hit in table.values()]
                if table:
                    axes.plot([*table], shares, marker="o", markersize=4, color=f"C{number}", label=name)
            axes.set(
                title=f"accepted, {title}", ylabel="share accepted, greedy", ylim=(0, 1),
                xlabel=f"{what}, where the tree went on" if what == "depth" else what,
            )
            most = max(
                (k for seen in observed.values() for k, v in getattr(seen, what).items() if v[0] >= 20),
                default=1
            )
            axes.set_xticks(range(1, most + 1))
        if left.get_legend_handles_labels()[0]:
            figure.legend(
                *left.get_legend_handles_labels(), loc="outside lower center", ncols=MOST_LABELLED + 1,
                fontsize=8
            )


def draw_calibration(observed: dict[str, Observed], path: Path) -> None:
    """How often a node is accepted against how likely the drafter thought it: what dynamic trees rest on."""
    with picture(path, 4.6, 4.2) as figure:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
        for number, (name, seen) in enumerate(observed.items()):
            cells = [cell for cell in seen.confidence if cell[0] >= 20]
            if not cells:  # of drafters that give no probabilities
                continue
            given, taken = [c[2] / c[0] for c in cells], [c[1] / c[0] for c in cells]
            axes.plot(given, taken, marker="o", markersize=4, color=f"C{number}", label=name)
        axes.set(xlabel="probability the drafter gave", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
        axes.set(title="the drafter's confidence (greedy)")
        if axes.get_legend_handles_labels()[0]:
            axes.legend()


def draw_lengths(lengths: dict[str, list[int]], path: Path) -> None:
    """How many tokens a step emits."""
    with picture(path, 6, 3.4) as figure:
        axes = figure.add_subplot()
        most, width = max(max(n) for n in lengths.values()), 0.8 / len(lengths)
        for number, (name, found) in enumerate(lengths.items()):
            shares = [found.count(n) / len(found) for n in range(1, most + 1)]
            at = [n + (number - (len(lengths) - 1) / 2) * width for n in range(1, most + 1)]
            axes.bar(
                at, shares, width, color=f"C{number}",
                label=f"{name}, {sum(found) / len(found):.2f} over all steps"
            )
        axes.set(xlabel="tokens emitted by a step", ylabel="share of steps")
        axes.set_xticks(range(1, most + 1))
        axes.legend()


def draw_table(rows: list[dict], sets: list[str], path: Path) -> None:
    """τ and speedup per set, one pair of panels per temperature."""
    temperatures = sorted({row["temperature"] for row in rows})
    with picture(path, 11, 3.3 * len(temperatures)) as figure:
        for line, temperature in enumerate(temperatures):
            mine = [row for row in rows if row["temperature"] == temperature and row["method"] != "none"]
            methods = list(dict.fromkeys(row["method"] for row in mine))
            shown = [name for name in [*sets, "mean"] if any(row["set"] == name for row in mine)]
            width = 0.8 / max(1, len(methods))
            for column, (what, title) in enumerate(
                (("tau", "acceptance length τ"), ("speedup", "speedup over plain decoding"))
            ):
                axes = figure.add_subplot(len(temperatures), 2, 2 * line + column + 1)
                for number, method in enumerate(methods):
                    by_set = {row["set"]: row[what] for row in mine if row["method"] == method}
                    at = [i + (number - (len(methods) - 1) / 2) * width for i in range(len(shown))]
                    bars = axes.bar(
                        at, [by_set.get(name) or 0 for name in shown], width, color=f"C{number}", label=method
                    )
                    if len(methods) <= MOST_LABELLED:
                        axes.bar_label(
                            bars, fmt="%.2f", fontsize=7, padding=2, rotation=0 if len(methods) == 1 else 90
                        )
                axes.axhline(1, color=GREY, linewidth=1)
                axes.set_xticks(range(len(shown)), shown, rotation=20, ha="right")
                axes.set(title=f"{title}, temperature {temperature:g}")
                axes.margins(y=0.15 if len(methods) == 1 else 0.25)
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=MOST_LABELLED + 1, fontsize=8
        )
