"""Sizes and forms of draft trees, as numbers without tensors."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class TreeShape:
    """Size of a tree, in the terms of EAGLE-2/3: `nodes` T (root included), `depth` D, `width` k.

    `depth` is the number of expansions after the first level (the reference's `depth`), so a path holds up to
    D+1 drafted tokens. The paper's tree is 60/7/10 (SafeAILab/EAGLE ea_model.py). `TreeShape(1, 0, 0)` is
    plain decoding.
    """

    nodes: int
    depth: int
    width: int

    def __post_init__(self):
        if self.nodes == 1 and not (self.depth or self.width):
            return
        if self.nodes == 1:
            raise ValueError("tree: one node, the root, drafts nothing: give at least 2, or decode plainly")
        if self.nodes < 2 or self.depth < 0 or self.width < 1:
            raise ValueError(
                f"tree: nodes {self.nodes}, depth {self.depth}, width {self.width} must be positive"
                " (depth may be 0)"
            )
        if self.nodes - 1 > self.candidates:
            raise ValueError(
                f"tree: {self.nodes} nodes, but depth {self.depth} and width {self.width} only draft"
                f" {self.candidates} + the root"
            )

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """Parse "nodes,depth,width" or a `name`. Raises ValueError on anything else."""
        numbers = text.replace("/", ",").split(",")
        if len(numbers) != 3:
            raise ValueError(f"tree: {text!r} is not nodes,depth,width")
        return cls(*map(int, numbers))

    @property
    def name(self) -> str:
        """T/D/k, as the documentation writes it."""
        return f"{self.nodes}/{self.depth}/{self.width}"

    @property
    def candidates(self) -> int:
        """The number of drafted nodes before pruning: k on the first level, k*k on each further one."""
        return self.width + self.depth * self.width**2

    @property
    def window(self) -> int:
        """W, the most tokens one step can commit: the root and a full path."""
        return 1 if self.nodes == 1 else self.depth + 2

    @property
    def extra_slots(self) -> int:
        """Cache slots a step may touch beyond the committed ones, in the target's cache and in the head's."""
        return max(self.nodes, self.window + self.width * self.depth)


PAPER_TREE = TreeShape(60, 7, 10)  # of EAGLE-2 and EAGLE-3


@dataclass(frozen=True)
class AnyTree:
    """Size of trees whose form changes from step to step and that are not grown (joint ones).

    It has `nodes` T, root included, on at most `levels` levels below the root.
    """

    nodes: int
    levels: int
    width: None = None  # it has none

    @property
    def window(self) -> int:
        """W, the most tokens one step can commit: the root and a full path."""
        return self.levels + 1

    @property
    def extra_slots(self) -> int:
        """As `TreeShape.extra_slots`."""
        return max(self.nodes, self.window)


class Level(NamedTuple):
    """One level of a `PathTree`.

    Its rows are the nodes of the level above that are expanded, in order.
    """

    nodes: list[int]  # each drafted node's index in its rows' ranked children: row * width + rank
    rows: list[int]  # which of the nodes drafted by the level above are expanded
    came_from: list[int]  # and the row each of those was drafted by
    sees: list[list[bool]]  # [rows, all rows so far] which drafted rows each row attends to, itself included


@dataclass(frozen=True)
class PathTree:
    """A static tree of EAGLE-1 or Medusa.

    `paths` are ranks below the root: (0, 2) is the third child of the first child.
    Nodes are in the order of depth, then of ranks, the root first. Raises ValueError on a path without its
    parent, a repeated path or one that is no list of ranks.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not self.paths:
            raise ValueError("tree: no paths")
        known = set(self.paths)
        for path in self.paths:
            ranks = all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in path)
            if not path or not ranks:
                raise ValueError(f"tree: path {list(path)} is no list of ranks (0, 1, ...)")
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"tree: path {list(path)} has no parent {list(path[:-1])}")
        if len(known) != len(self.paths):
            raise ValueError("tree: a path is given twice")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))

    @property
    def nodes(self) -> int:
        """T, the root included."""
        return len(self.paths) + 1

    @property
    def width(self) -> int:
        """The number of ranked children of a row that are candidates."""
        return 1 + max(max(p) for p in self.paths)

    @property
    def window(self) -> int:
        """W, the most tokens one step can commit: the root and a full path."""
        return 1 + len(self.paths[-1])

    @property
    def extra_slots(self) -> int:
        """As `TreeShape.extra_slots`."""
        return max(self.nodes, self.window + sum(len(level.rows) for level in self.levels))

    @property
    def parent(self) -> list[int]:
        """Index of each node's parent [T]; the root's is 0, itself."""
        index = {(): 0} | {p: i for i, p in enumerate(self.paths, 1)}
        return [0] + [index[p[:-1]] for p in self.paths]

    @cached_property
    def levels(self) -> list[Level]:
        """The levels below the root, first level first."""
        inner = {p[:-1] for p in self.paths}
        result, above, parents, drafted = [], [], [], []  # drafted: all rows, in the order of their slots
        for depth in range(1, self.window):
            level = [p for p in self.paths if len(p) == depth]
            expanded = [p for p in above if p in inner]
            rows = expanded or [()]  # the root's row is the catch-up's
            drafted += expanded
            result.append(Level(
                [rows.index(p[:-1]) * self.width + p[-1] for p in level], [above.index(p) for p in expanded],
                [parents.index(p[:-1]) for p in expanded],
                [[p[: len(q)] == q for q in drafted] for p in expanded],
            ))
            above, parents = level, rows
        return result


def chains(lengths: tuple[int, ...]) -> PathTree:
    """A tree of chains side by side. Raises ValueError on a length below 1."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"tree: chains of {list(lengths)} tokens; each needs at least one")
    return PathTree(tuple((c,) + (0,) * i for c, length in enumerate(lengths) for i in range(length)))
