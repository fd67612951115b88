"""Static trees: shapes, tensors, and the EAGLE-1 drafter."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from common.errors import InputError, parse_json, read_text
from engine.draft import Drafter, HeadDrafter
from engine.draft import build as build_head_drafter
from engine.drafting import DrafterSetup
from engine.state import State
from engine.step import Step
from tree import Tree, depth_and_ancestors


@dataclass(frozen=True)
class TreeSize:
    """A tree shape given only by its size, such as that of a joint tree.

    nodes: T, root included. levels: maximum number of levels below the root.
    """

    nodes: int
    levels: int
    width: None = None

    @property
    def max_commit(self) -> int:
        """W, the maximum number of tokens that a step commits: the root and a full path."""
        return self.levels + 1

    @property
    def extra_slots(self) -> int:
        """See `TreeShape.extra_slots`."""
        return max(self.nodes, self.max_commit)

    @property
    def name(self) -> str:
        """Name in statistics."""
        return f"{self.nodes} nodes"

    def limited(self, nodes: int, levels: int) -> TreeSize:
        """Return the shape of a tree with fewer nodes."""
        return replace(self, nodes=nodes)


class Level(NamedTuple):
    """One level of a `PathTree`. Its rows are the expanded nodes of the previous level, in order."""

    nodes: list[int]  # index of each drafted node among the ranked children of all rows: row * width + rank
    rows: list[int]  # indices of the expanded nodes in the previous level's drafted nodes
    parent_rows: list[int]  # the previous level's rows that drafted them
    visible: list[list[bool]]  # [rows, all rows so far]: the rows that each row attends to, itself included


@dataclass(frozen=True)
class PathTree:
    """A static tree of EAGLE-1 or Medusa.

    paths: ranks below the root; (0, 2) is the third child of the first child. Nodes are sorted by depth, then
    by ranks, root first. Raises InputError on a path without its parent, a repeated path, or invalid ranks.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        if not self.paths:
            raise InputError("tree: no paths")
        known = set(self.paths)
        for path in self.paths:
            ranks = all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in path)
            if not path or not ranks:
                raise InputError(f"tree: path {list(path)} is not a list of ranks (0, 1, ...)")
            if len(path) > 1 and path[:-1] not in known:
                raise InputError(f"tree: path {list(path)} has no parent {list(path[:-1])}")
        if len(known) != len(self.paths):
            raise InputError("tree: a path is repeated")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda p: (len(p), p))))

    @property
    def nodes(self) -> int:
        """T, the root included."""
        return len(self.paths) + 1

    @property
    def width(self) -> int:
        """Number of ranked children per row: the top k that are computed."""
        return 1 + max(max(p) for p in self.paths)

    @property
    def max_commit(self) -> int:
        """W, the maximum number of tokens that a step commits: the root and a full path."""
        return 1 + len(self.paths[-1])

    @property
    def extra_slots(self) -> int:
        """See `TreeShape.extra_slots`."""
        return max(self.nodes, self.max_commit + sum(len(level.rows) for level in self.levels))

    @property
    def name(self) -> str:
        """The name in statistics."""
        return f"{self.nodes} nodes"

    def limited(self, nodes: int, levels: int) -> TreeSize:
        """Return the shape of a tree with fewer nodes."""
        return TreeSize(nodes, self.max_commit - 1)

    @property
    def parent(self) -> list[int]:
        """Index of each node's parent [T]; the root's is 0."""
        index = {(): 0} | {p: i for i, p in enumerate(self.paths, 1)}
        return [0] + [index[p[:-1]] for p in self.paths]

    @cached_property
    def levels(self) -> list[Level]:
        """The levels below the root."""
        inner = {p[:-1] for p in self.paths}
        result, previous, parents, drafted = [], [], [], []  # drafted: all rows, in the order of their slots
        for depth in range(1, self.max_commit):
            level = [p for p in self.paths if len(p) == depth]
            expanded = [p for p in previous if p in inner]
            rows = expanded or [()]  # the first level's row is the output of the catch-up
            drafted += expanded
            result.append(Level(
                [rows.index(p[:-1]) * self.width + p[-1] for p in level],
                [previous.index(p) for p in expanded],
                [parents.index(p[:-1]) for p in expanded],
                [[p[: len(q)] == q for q in drafted] for p in expanded],
            ))
            previous, parents = level, rows
        return result


def chain_tree(lengths: tuple[int, ...]) -> PathTree:
    """Return a tree of chains below the root. Raises InputError on a length below 1."""
    if not lengths or min(lengths) < 1:
        raise InputError(f"tree: chains of {list(lengths)} tokens; each needs at least one")
    return PathTree(tuple((c,) + (0,) * i for c, length in enumerate(lengths) for i in range(length)))


def expected_tree(nodes: int, levels: int) -> PathTree:
    """Return the static tree of `nodes` nodes, root included, with the highest assumed acceptance length.

    Given an accepted parent, a top-1 child is accepted with probability 0.6 at the first level, times 0.9 at
    each further level; a child of rank n with 0.25/n of that. Raises InputError if there is nothing to draft.
    """
    if nodes < 2 or levels < 1:
        raise InputError(f"tree: {nodes} nodes on {levels} levels draft nothing")

    def acceptance(path: tuple[int, ...]) -> float:
        return math.prod(0.6 * 0.9**depth * (0.25 / rank if rank else 1) for depth, rank in enumerate(path))

    paths: list[tuple[int, ...]] = []
    candidates = [(0,)]  # the next sibling and the first child of every chosen node
    while len(paths) < nodes - 1:
        best = max(candidates, key=acceptance)
        candidates.remove(best)
        paths.append(best)
        candidates.append((*best[:-1], best[-1] + 1))
        if len(best) < levels:
            candidates.append((*best, 0))
    return PathTree(tuple(paths))


# EAGLE-1's tree of 25 drafted nodes (mc_sim_7b_63 in SafeAILab/EAGLE choices.py).
EAGLE1_TREE = PathTree((
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
))


# -- tensors of a static tree --------------------------------------------------------------------------------


def register_constants(module: nn.Module, **values) -> None:
    """Register lists or tensors as non-persistent buffers of a module."""
    for name, value in values.items():
        module.register_buffer(name, torch.as_tensor(value), persistent=False)


class StaticLevel(nn.Module):
    """The indices of one level of a static tree, see `Level`."""

    def __init__(self, level: Level):
        super().__init__()
        register_constants(self, visible=torch.tensor(level.visible, dtype=torch.bool))
        for name in ("nodes", "rows", "parent_rows"):  # may be empty, so the dtype is given
            register_constants(self, **{name: torch.tensor(getattr(level, name), dtype=torch.int64)})


class StaticTree(nn.Module):
    """The tensors of a tree of fixed shape."""

    def __init__(self, shape: PathTree):
        super().__init__()
        parent = torch.tensor(shape.parent)
        depth, ancestors = depth_and_ancestors(parent[None], shape.max_commit - 1)
        register_constants(self, parent=parent, depth=depth[0], ancestors=ancestors[0])
        self.levels = nn.ModuleList(StaticLevel(level) for level in shape.levels)

    def with_tokens(self, tokens: Tensor, scores: Tensor | None = None) -> Tree:
        """Return the tree with these tokens [B, T], root first.

        scores [B, T]: log-probabilities given the parent, if the drafter has them.
        """
        B = tokens.shape[0]
        ancestors = self.ancestors.expand(B, -1, -1)
        # torch.where, as a score may be -inf.
        paths = None if scores is None else torch.where(self.ancestors, scores[:, None], 0).sum(-1)
        return Tree(tokens, self.parent.expand(B, -1), self.depth.expand(B, -1), ancestors, paths)


class StaticDrafter(Drafter):
    """Base class of drafters without a network that draft a static tree."""

    def __init__(self, shape: PathTree):
        super().__init__(shape)
        self.static = StaticTree(shape)


class StaticHeadDrafter(HeadDrafter):
    """A head that drafts a static tree (EAGLE-1, arXiv 2401.15077, section 4.1).

    All indices are constants on the device.
    """

    resizable = applies_costs = False

    def __init__(self, head, shape: PathTree, coupled: bool = True):
        super().__init__(head, shape, coupled)
        self.static = StaticTree(shape)

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        noise, B, k = self.draft_noise(noise), state.length.shape[0], self.shape.width
        h = self.catch_up(step, state, slots)
        tokens, scores, drafted = [state.root], [], 0
        for i, level in enumerate(self.static.levels):
            if i:  # expand nodes of the previous level
                count = len(level.rows)
                own_slots = state.length[:, None] + drafted + torch.arange(count, device=slots.device)
                positions = (state.length + i - 1)[:, None].expand(-1, count)
                visible = step.mask(slots, state.length, level.visible.expand(B, -1, -1))
                expanded, feature = tokens[-1][:, level.rows], h[:, level.parent_rows]
                h = self._forward(expanded, feature, positions, own_slots, visible)
                drafted += count
            level_scores, ranked = (x.flatten(1) for x in self._top_k(step, h, noise, i, k))
            tokens.append(ranked[:, level.nodes])  # of [B, rows * k]
            scores.append(level_scores[:, level.nodes])
        scores = torch.cat((torch.zeros_like(scores[0][:, :1]), *scores), dim=1)  # given the parent
        return self.static.with_tokens(torch.cat(tokens, dim=1), scores)


def read_paths(file: str) -> PathTree:
    """Read the JSON file of --tree FILE. Raises InputError."""
    try:
        return PathTree(tuple(map(tuple, parse_json(read_text(file), file))))
    except (ValueError, TypeError) as e:
        forms = "auto, paper, T,D,K or a JSON file of paths like [[0], [1], [0, 0]]"
        raise InputError(f"--tree {file:.200}: none of {forms} ({e})") from None


def build(setup: DrafterSetup) -> HeadDrafter:
    """Build the EAGLE-1 drafter.

    Raises InputError if the head or the tree does not fit.
    """
    if setup.options.tree is not None:  # --tree: dynamic, or another static tree
        return build_head_drafter(setup)
    return StaticHeadDrafter(setup.load_head(), EAGLE1_TREE, setup.options.coupled)
