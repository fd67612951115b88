"""Drafted trees: how often their nodes are accepted, by depth and by rank, and one of them as text."""
from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from common.plots import picture
from engine.request import Draft

LEAST_COUNTED = 20  # shares of fewer are noise


def probabilities(draft: Draft) -> list[float]:
    """Return the probability of each node given its parent: 0 if the drafter gives none, and for fillers."""
    scores = draft.scores or [-math.inf] * len(draft.tokens)
    given_parent = [s - scores[p] if s > -math.inf else s for s, p in zip(scores, draft.parent)]
    return [math.exp(score) for score in given_parent]


def children_of(draft: Draft) -> dict[int, list[int]]:
    """Return the children of each node that has some, likeliest first."""
    children, likely = {}, probabilities(draft)
    for node in sorted(range(1, len(draft.tokens)), key=lambda node: -likely[node]):
        children.setdefault(draft.parent[node], []).append(node)
    return children


class TreeStatistics:
    """Counts over the steps of one method by depth and by rank among siblings: [tried, accepted].

    Only children of accepted nodes are tried: nodes below a rejected one had no chance. An accepted node
    without children tries nothing either. So deep levels count only the steps whose trees reached them.
    """

    def __init__(self):
        self.depth: dict[int, list[int]] = {}
        self.rank: dict[int, list[int]] = {}
        self.best: Draft | None = None  # with most accepted nodes; None: nothing was drafted

    def add(self, draft: Draft) -> None:
        """Count the tree of one step."""
        accepted, depth = {0, *draft.path}, [0]
        for parent in draft.parent[1:]:  # a parent stands before its children
            depth.append(depth[parent] + 1)
        for node, children in children_of(draft).items():
            if node not in accepted:
                continue
            _count(self.depth, depth[node] + 1, not accepted.isdisjoint(children))
            for rank, child in enumerate(children, 1):
                _count(self.rank, rank, child in accepted)
        if len(depth) > 1 and (self.best is None or len(accepted) > len({0, *self.best.path})):
            self.best = draft


def _count(table: dict[int, list[int]], key: int, accepted: bool) -> None:
    tried, hits = table.get(key, (0, 0))
    table[key] = [tried + 1, hits + accepted]


def draw_acceptance(statistics: dict[str, TreeStatistics], path: Path) -> None:
    """Draw as a PNG the acceptance of each method by draft depth, and by rank among siblings."""
    with picture(path, 9, 3.6) as figure:
        panels = figure.subplots(1, 2)
        for axes, of, title in zip(panels, ("depth", "rank"), ("draft depth", "rank among siblings")):
            for number, (name, counts) in enumerate(statistics.items()):
                table = getattr(counts, of)
                shares = {x: hits / tried for x, (tried, hits) in table.items() if tried >= LEAST_COUNTED}
                points = sorted(shares.items())
                axes.plot(*zip(*points or [(1, math.nan)]), "o-", color=f"C{number}", label=name)
            axes.set(title=f"accepted, by {title}", xlabel=of, ylabel="share accepted, greedy", ylim=(0, 1))
            axes.xaxis.get_major_locator().set_params(integer=True)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)


def text_tree(draft: Draft, word: Callable[[int], str]) -> str:
    """Draw a tree for the terminal: ● accepted, ○ rejected, each with the drafter's probability.

    word: gives the text of a token id.
    """
    children, likely = children_of(draft), probabilities(draft)
    lines = [f"● {word(draft.tokens[0])!r}"]

    def add_children(parent: int, indent: str) -> None:
        *others, last = children[parent]
        for node in (*others, last):
            branch, below = ("└─", "   ") if node == last else ("├─", "│  ")
            mark, share = "●" if node in draft.path else "○", f" {likely[node]:.2f}" if draft.scores else ""
            lines.append(f"{indent}{branch}{mark} {word(draft.tokens[node])!r}{share}")
            if node in children:
                add_children(node, indent + below)

    add_children(0, "")
    return "\n".join(lines)
