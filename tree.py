"""The draft tree: fixed-size tensors, grown level by level, pruned to T nodes, verified, walked.

Node 0 is the root: the last token the target chose, whose keys/values are not in the cache yet. The other T-1
nodes are drafted. Everything is batched over B sequences, every shape depends on `TreeShape` alone, nothing
reads a value back to the host, and no loop runs over nodes (the loops below run over levels).
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


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
        if self.nodes == 1:
            if self.depth or self.width:
                raise ValueError(
                    "tree: one node, the root, drafts nothing: give at least 2, or decode plainly"
                )
            return
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
        """Read "nodes,depth,width" as it is typed, or a `name`. Raises ValueError on anything else."""
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
        """How many nodes are drafted before pruning: k on the first level, k*k on each further one."""
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
    """Size of trees whose form changes from step to step and that are not grown (REST's).

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
    """How one level of a `PathTree` is drafted.

    Its rows are the nodes of the level above that are expanded, in order.
    """

    nodes: list[int]  # each drafted node's place in its rows' ranked children: row * width + rank
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
        """How many ranked children of a row are looked at."""
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
        place = {(): 0} | {p: i for i, p in enumerate(self.paths, 1)}
        return [0] + [place[p[:-1]] for p in self.paths]

    @property
    def depths(self) -> list[int]:
        """Depth of each node [T], the root 0."""
        return [0] + [len(p) for p in self.paths]

    @property
    def ancestors(self) -> list[list[bool]]:
        """[T, T] row i sees column j: j is i or an ancestor of i."""
        every = ((), *self.paths)
        return [[p[: len(q)] == q for q in every] for p in every]

    @cached_property
    def levels(self) -> list[Level]:
        """How each level below the root is drafted, first level first."""
        inner = {p[:-1] for p in self.paths}
        # Rows of the level at hand; all drafted rows, in the order of their slots.
        result, rows, drafted = [], [()], []
        above: list[tuple] = []
        for depth in range(1, self.window):
            level = [p for p in self.paths if len(p) == depth]
            if depth > 1:
                parents, rows = rows, [p for p in above if p in inner]
                drafted += rows
                came_from = [parents.index(p[:-1]) for p in rows]
                sees = [[p[: len(q)] == q for q in drafted] for p in rows]
                result.append(Level([rows.index(p[:-1]) * self.width + p[-1] for p in level],
                                    [above.index(p) for p in rows], came_from, sees))
            else:
                result.append(Level([p[-1] for p in level], [], [], []))
            above = level
        return result


def chains(lengths: tuple[int, ...]) -> PathTree:
    """A tree of chains side by side. Raises ValueError on a length below 1."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"tree: chains of {list(lengths)} tokens; each needs at least one")
    return PathTree(tuple((c,) + (0,) * i for c, length in enumerate(lengths) for i in range(length)))


def likely_tree(nodes: int, levels: int) -> PathTree:
    """A static tree of so many nodes, root included: those that are accepted most often.

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


class Tree(NamedTuple):
    """A batch of pruned trees, in ascending order of candidates: the root first, parents before children."""

    tokens: Tensor  # [B, T] target token ids
    parent: Tensor  # [B, T] index of each node's parent; the root's is 0, itself
    depth: Tensor  # [B, T] root 0
    ancestors: Tensor  # [B, T, T] bool: row i sees column j, that is j is i or an ancestor of i
    # [B, T] the drafter's log-probability of each node's path, root 0; None if it has none.
    scores: Tensor | None = None


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, T, ...] at index [B, K] -> [B, K, ...]."""
    if x.shape[0] == 1:  # one operation instead of four
        return x.index_select(1, index[0])
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, index]


def link(parent: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The depth [B, T] and ancestors [B, T, T] bool of nodes with these parents [B, T].

    levels: the trees have at most so many levels below the root.
    """
    nodes = torch.arange(parent.shape[1], device=parent.device)
    step = nodes.expand_as(parent)
    ancestors = step[..., None] == nodes
    for _ in range(levels):
        step = parent.gather(1, step)
        ancestors = ancestors | (step[..., None] == nodes)
    return ancestors.sum(-1) - 1, ancestors


def chain(tokens: Tensor) -> Tree:
    """Tokens [B, T] as a tree with one path; T = 1 is the bare root of plain decoding."""
    B, T = tokens.shape
    parent = (torch.arange(T, device=tokens.device) - 1).clamp(min=0).expand(B, T)
    return Tree(tokens, parent, *link(parent, T - 1))


class Growth:
    """The growing tree of EAGLE-2 (arXiv 2406.16858, section 4.1): k nodes, each with k children.

    Candidates are kept in flat order: the k children of the root, then k*k per level, beam row by beam row.
    `beam_*` describe the k nodes to expand next: token, cumulative log-probability, and which drafted rows
    each sees.
    """

    def __init__(self, shape: TreeShape, scores: Tensor, tokens: Tensor):
        """Start from the k best children of the root: log-probabilities and ids [B, k], best first."""
        self.shape = shape
        B, k = tokens.shape
        flat = torch.arange(k, device=tokens.device).expand(B, k)
        self.tokens, self.scores = [tokens], [scores]
        self.parents = [torch.full_like(tokens, -1)]
        self.beam_tokens, self.beam_scores, self.beam_flat = tokens, scores, flat
        self.beam_sees = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(B, k, k)
        self.size = k

    def extend(self, scores: Tensor, tokens: Tensor) -> None:
        """Record the beam's children: log-probabilities given their parent and token ids, both [B, k, k]."""
        B, k, _ = tokens.shape
        self.child_scores = (self.beam_scores[..., None] + scores).flatten(1)  # [B, k*k]
        self.child_tokens = tokens.flatten(1)
        self.tokens.append(self.child_tokens)
        self.scores.append(self.child_scores)
        self.parents.append(self.beam_flat[..., None].expand(B, k, k).flatten(1))

    def advance(self) -> Tensor:
        """Make the k best of the newest children the beam. Returns the beam row each came from [B, k]."""
        B, k = self.beam_tokens.shape
        self.beam_scores, index = self.child_scores.topk(k, dim=-1)
        row = index // k
        self.beam_tokens = self.child_tokens.gather(1, index)
        self.beam_flat = self.size + index
        self.size += k * k
        itself = torch.eye(k, dtype=torch.bool, device=index.device).expand(B, k, k)
        self.beam_sees = torch.cat((pick(self.beam_sees, row), itself), dim=-1)  # [B, k, level*k]
        return row

    def prune(self, root: Tensor) -> Tree:
        """Keep the T-1 candidates with the highest cumulative log-probability below `root` [B]."""
        scores, tokens, parents = (torch.cat(x, dim=1) for x in (self.scores, self.tokens, self.parents))
        # A child never outscores its parent but may equal it (probability 1 in float32). The stable sort
        # keeps the smaller index, the parent, first: the kept set always contains the ancestors of its
        # members.
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.shape.nodes - 1]
        keep = best.sort(dim=-1).values
        above = parents.gather(1, keep)
        parent = torch.where(above < 0, 0, torch.searchsorted(keep, above.contiguous()) + 1)
        parent = torch.cat((torch.zeros_like(root[:, None]), parent), dim=1)
        tokens = torch.cat((root[:, None], tokens.gather(1, keep)), dim=1)
        scores = torch.cat((torch.zeros_like(scores[:, :1]), scores.gather(1, keep)), dim=1)
        return Tree(tokens, parent, *link(parent, self.shape.depth + 1), scores)


def join(one: Tree, other: Tree, nodes: int, levels: int) -> Tree:
    """The `nodes` most likely nodes of two trees with one root, by their scores, as a tree.

    A path that both have counts once, with the better score. levels: the trees have at most so many below the
    root. A child never outscores its parent; of equals the parent comes first, and stays with its child.
    """
    first = one.tokens.shape[1]
    # Which nodes of the other stand where a node of the one stands [B, T2, T1].
    alike = (other.tokens[..., None] == one.tokens[:, None]) & (other.depth[..., None] == one.depth[:, None])
    same = torch.zeros_like(alike)
    same[:, 0, 0] = True
    roots = (one.depth == 0)[:, None] | (other.depth == 0)[..., None]
    for _ in range(levels):
        above = same.gather(1, other.parent[..., None].expand_as(same))
        above = above.gather(2, one.parent[:, None].expand_as(same))
        same = same | (alike & above & ~roots)
    known, match = same.any(-1), same.long().argmax(-1)
    lowest = float("-inf")
    better = torch.where(same, other.scores[..., None], lowest).amax(1)
    scores = torch.cat((torch.maximum(one.scores, better), other.scores.masked_fill(known, lowest)[:, 1:]), 1)
    tokens = torch.cat((one.tokens, other.tokens[:, 1:]), 1)
    joined = torch.where(known, match, torch.arange(other.tokens.shape[1], device=match.device) + first - 1)
    parents = torch.cat((one.parent, joined.gather(1, other.parent)[:, 1:]), 1)

    best = scores[:, 1:].sort(dim=-1, descending=True, stable=True).indices[:, : nodes - 1]
    keep = (best + 1).sort(dim=-1).values
    above = parents.gather(1, keep).contiguous()
    place = torch.searchsorted(keep, above).clamp(max=keep.shape[1] - 1)
    # A node that is only there to fill the tree may have lost its parent: a guess below the root then.
    parent = torch.where((above > 0) & (keep.gather(1, place) == above), place + 1, 0)
    parent = torch.cat((torch.zeros_like(parent[:, :1]), parent), 1)
    tokens = torch.cat((tokens[:, :1], tokens.gather(1, keep)), 1)
    scores = torch.cat((torch.zeros_like(scores[:, :1]), scores.gather(1, keep)), 1)
    return Tree(tokens, parent, *link(parent, levels), scores)


def visible_slots(slots: Tensor, length: Tensor, local: Tensor) -> Tensor:
    """Which cache slots each row of a pass attends to -> [B, T, n] bool.

    slots [n] is 0..n-1; each sequence's first `length` [B] slots hold its committed prefix, which every row
    sees; the M slots after them are seen as `local` [B, T, M] says; the rest, stale or another's, are not
    seen.
    """
    offset = slots - length[:, None]  # [B, n]
    inside = (offset >= 0) & (offset < local.shape[-1])
    index = offset.clamp(0, local.shape[-1] - 1)[:, None].expand(-1, local.shape[1], -1)
    return (offset < 0)[:, None] | (inside[:, None] & local.gather(2, index))


def accept(tree: Tree, chosen: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The deepest path on which the target agrees.

    Returns path [B, W], node indices, root first, then zeros; and count [B] >= 1.
    chosen [B, T] is the one token the target draws at every node. A node is accepted if it carries the token
    drawn at its parent and its parent is accepted. Where siblings carry distinct tokens the accepted nodes
    form one path; of equal paths side by side, as drafters that repeat themselves have them, the one to the
    first deepest node is taken. The step emits chosen[path[:count]]: the accepted tokens and, last, one more
    that becomes the next root. Because proposals are a deterministic set this is exactly sampling from the
    target (the reference's try-reject-renormalise loop with q=1).
    """
    return deepest(tree, tree.tokens == chosen.gather(1, tree.parent), window)


def deepest(tree: Tree, agrees: Tensor, window: int, likely: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`accept` where `agrees` [B, T] says which nodes continue their parents.

    Of several paths of the same depth the one to the most `likely` [B, T] node is taken, else to the first.
    """
    nodes = torch.arange(tree.tokens.shape[1], device=agrees.device)
    accepted = ~(tree.ancestors & ~(agrees | (nodes == 0))[:, None]).any(-1)
    at_depth = tree.depth[:, None] == torch.arange(window, device=agrees.device)[:, None]  # [B, W, T]
    depth = torch.where(accepted, tree.depth, -1)
    if likely is not None:
        last = torch.where(
            depth == depth.amax(-1, keepdim=True), likely, float("-inf")
        ).argmax(-1, keepdim=True)
    else:
        last = depth.argmax(-1, keepdim=True)  # [B, 1]
    taken = pick(tree.ancestors, last) & at_depth  # [B, W, T]
    return torch.where(taken, nodes, 0).sum(-1), tree.depth.gather(1, last)[:, 0] + 1
