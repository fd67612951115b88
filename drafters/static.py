"""Static trees: their shapes, their tensors, and the EAGLE-1 drafter, which drafts one with a draft head."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import engine.draft
from common.errors import InputError
from common.files import parse_json, read_text
from engine.draft import Drafter, HeadDrafter
from engine.drafting import Setup
from engine.state import State
from engine.step import Step
from tree import Tree, link


@dataclass(frozen=True)
class AnyTree:
    """Size of trees whose form changes from step to step and that are not grown, such as joint ones.

    It has `nodes` T, root included, on at most `levels` levels below the root.
    """

    nodes: int
    levels: int
    width: None = None  # it has none

    @property
    def max_commit(self) -> int:
        """W, the most tokens one step can commit: the root and a full path."""
        return self.levels + 1

    @property
    def extra_slots(self) -> int:
        """As `TreeShape.extra_slots`."""
        return max(self.nodes, self.max_commit)

    @property
    def name(self) -> str:
        """The name in records."""
        return f"{self.nodes} nodes"

    def limited(self, nodes: int, levels: int) -> AnyTree:
        """Return the shape of a tree with fewer nodes."""
        return replace(self, nodes=nodes)


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
    def max_commit(self) -> int:
        """W, the most tokens one step can commit: the root and a full path."""
        return 1 + len(self.paths[-1])

    @property
    def extra_slots(self) -> int:
        """As `TreeShape.extra_slots`."""
        return max(self.nodes, self.max_commit + sum(len(level.rows) for level in self.levels))

    @property
    def name(self) -> str:
        """The name in records."""
        return f"{self.nodes} nodes"

    def limited(self, nodes: int, levels: int) -> AnyTree:
        """Return the shape of a tree with fewer nodes."""
        return AnyTree(nodes, self.max_commit - 1)

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
        for depth in range(1, self.max_commit):
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


def likely_tree(nodes: int, levels: int) -> PathTree:
    """Return a static tree of the nodes that are accepted most often, root included.

    Assumed: the best child is right six times in ten at the first level and a tenth less often a level
    further down; the n-th best is right 0.25/n as often as the best. Raises ValueError if there is nothing to
    draft.
    """
    if nodes < 2 or levels < 1:
        raise ValueError(f"tree: {nodes} nodes on {levels} levels draft nothing")

    def share(path: tuple[int, ...]) -> float:
        return math.prod(0.6 * 0.9**depth * (0.25 / rank if rank else 1) for depth, rank in enumerate(path))

    paths: list[tuple[int, ...]] = []
    open_ends = [(0,)]  # of every node taken, the next sibling and the first child
    while len(paths) < nodes - 1:
        best = max(open_ends, key=share)
        open_ends.remove(best)
        paths.append(best)
        open_ends.append((*best[:-1], best[-1] + 1))
        if len(best) < levels:
            open_ends.append((*best, 0))
    return PathTree(tuple(paths))


# EAGLE-1's tree of 25 drafted nodes (named mc_sim_7b_63 in SafeAILab/EAGLE choices.py): ranks that pay off on
# average.
EAGLE1_TREE = PathTree((
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
))


# -- tensors of a static tree --------------------------------------------------------------------------------


def constants(module: nn.Module, **values) -> None:
    """Register lists or tensors as buffers of a module: they move to a device with it and are not saved."""
    for name, value in values.items():
        module.register_buffer(name, torch.as_tensor(value), persistent=False)


class StaticLevel(nn.Module):
    """The indices of one level of a static tree, see `Level`."""

    def __init__(self, level: Level):
        super().__init__()
        constants(self, sees=torch.tensor(level.sees, dtype=torch.bool))
        for name in ("nodes", "rows", "came_from"):  # may be empty, and then have no dtype of their own
            constants(self, **{name: torch.tensor(getattr(level, name), dtype=torch.int64)})


class StaticTree(nn.Module):
    """A tree whose shape is fixed: only its tokens change."""

    def __init__(self, shape: PathTree):
        super().__init__()
        parent = torch.tensor(shape.parent)
        depth, ancestors = link(parent[None], shape.max_commit - 1)
        constants(self, parent=parent, depth=depth[0], ancestors=ancestors[0])
        self.levels = nn.ModuleList(StaticLevel(level) for level in shape.levels)

    def of(self, tokens: Tensor, scores: Tensor | None = None) -> Tree:
        """Return the tree with these tokens [B, T], root first.

        scores [B, T]: the log-probability of each node given its parent, if the drafter has one.
        """
        B = tokens.shape[0]
        ancestors = self.ancestors.expand(B, -1, -1)
        # Selected, not multiplied: a score may be -inf.
        paths = None if scores is None else torch.where(self.ancestors, scores[:, None], 0).sum(-1)
        return Tree(tokens, self.parent.expand(B, -1), self.depth.expand(B, -1), ancestors, paths)


class StaticDrafter(Drafter):
    """The base of drafters without a network that always draft the same tree."""

    def __init__(self, shape: PathTree):
        super().__init__(shape)
        self.static = StaticTree(shape)


class StaticHeadDrafter(HeadDrafter):
    """A drafter with a head on a static tree (EAGLE-1, arXiv 2401.15077, section 4.1).

    The expanded ranks are fixed: every index is known beforehand and kept on the device.
    """

    grows = reads_costs = False

    def __init__(self, head, shape: PathTree, coupled: bool = True):
        super().__init__(head, shape, coupled)
        self.static = StaticTree(shape)

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        noise, B, k = self.draft_noise(noise), state.length.shape[0], self.shape.width
        h = self.catch_up(step, state, slots)
        tokens, scores, used = [state.root], [], 0
        for i, level in enumerate(self.static.levels):
            if i:  # expand nodes of the level above
                count = len(level.rows)
                own = state.length[:, None] + used + torch.arange(count, device=slots.device)
                positions = (state.length + i - 1)[:, None].expand(-1, count)
                visible = step.mask(slots, state.length, level.sees.expand(B, -1, -1))
                expanded, feature = tokens[-1][:, level.rows], h[:, level.came_from]
                h = self._forward(expanded, feature, positions, own, visible)
                used += count
            level_scores, ranked = (x.flatten(1) for x in self._best(step, h, noise, i, k))
            tokens.append(ranked[:, level.nodes])  # of [B, rows * k]
            scores.append(level_scores[:, level.nodes])
        scores = torch.cat((torch.zeros_like(scores[0][:, :1]), *scores), dim=1)  # given the parent
        return self.static.of(torch.cat(tokens, dim=1), scores)


def read_paths(file: str) -> PathTree:
    """Read a JSON file with the paths of a tree, as --tree names it. Raises InputError."""
    try:
        return PathTree(tuple(map(tuple, parse_json(read_text(file), file))))
    except (ValueError, TypeError) as e:
        forms = "auto, paper, T,D,K or a JSON file of paths like [[0], [1], [0, 0]]"
        raise InputError(f"--tree {file:.200}: none of {forms} ({e})") from None


def build(setup: Setup) -> HeadDrafter:
    """Build the EAGLE-1 drafter. Raises InputError if the head does not fit, ValueError if the tree does not.
    """
    if setup.drafting.tree is not None:
        return engine.draft.build(setup)
    return StaticHeadDrafter(setup.load_head(), EAGLE1_TREE, setup.drafting.coupled)
