"""The draft tree: fixed-size tensors, grown level by level, pruned to T nodes, verified, walked.

Node 0 is the root: the last token the target chose, whose keys/values are not in the cache yet. The other T-1
nodes are drafted. Everything is batched over B sequences, and the loops of a step run over levels, not over
nodes. Unless `Prices` cut a tree, every shape depends on `TreeShape` alone, and nothing reads a value back to
the host.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from common.tree_shapes import PAPER_TREE, AnyTree, Level, PathTree, TreeShape, chains

__all__ = ["PAPER_TREE", "AnyTree", "Level", "PathTree", "TreeShape", "chains"]  # known by these names, too


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


class Tree(NamedTuple):
    """A batch of pruned trees, in ascending order of candidates: the root first, parents before children."""

    tokens: Tensor  # [B, T] target token ids
    parent: Tensor  # [B, T] index of each node's parent; the root's is 0, itself
    depth: Tensor  # [B, T] root 0
    ancestors: Tensor  # [B, T, T] bool: row i sees column j, that is j is i or an ancestor of i
    # [B, T] the drafter's log-probability of each node's path, root 0; None if it has none.
    scores: Tensor | None = None


class Prices(NamedTuple):
    """The costs of drafts, in tokens that decoding would emit in the same time. A level or a node with less
    expected gain is not drafted.

    A node gains confidence * exp(score) tokens, at most 1: its probability to be accepted. The n-th best
    nodes of all sequences share a price. Values are read back to the host, so this is for CPUs.

    level: of one more level. nodes [T-1]: of the first drafted node, of the second, and so on. confidence
    [B]: accepted drafts / sum of exp(score) over the drafts; 0 for an idle slot.
    """

    level: float
    nodes: Tensor
    confidence: Tensor

    def _chances(self, scores: Tensor) -> Tensor:
        """Return what the best nodes of all texts bring, the second best, and so on [n]. scores [B, n]."""
        ranked = scores.sort(descending=True).values.exp()
        return (self.confidence[:, None] * ranked).clamp(max=1).sum(0)

    def rows(self, scores: Tensor, most: int) -> int:
        """Return how many of the newest nodes [B, n] to expand, at most `most`; 0: no further level pays.

        A node must bring twice what one costs, as its children bring less. They are taken to bring half of
        what it does.
        """
        expanded = self._chances(scores)[:most]
        expanded = expanded[expanded >= 2 * self.nodes[0]]
        return len(expanded) if float(expanded.sum()) / 2 >= self.level else 0

    def worth(self, scores: Tensor) -> int:
        """Return how many of the best candidates [B, C] to keep: together they bring most beyond their price.
        """
        brings = self._chances(scores)[: len(self.nodes)]
        gains = (brings - self.nodes[: len(brings)]).cumsum(0).tolist()
        return max(range(len(gains) + 1), key=lambda n: gains[n - 1] if n else 0.0)


FREE = 0.0, None, None  # no prices, for operators


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [B, T, ...] at index [B, K] -> [B, K, ...]."""
    if x.shape[0] == 1:  # one operation instead of four
        return x.index_select(1, index[0])
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, index]


def link(parent: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The depth [B, T] and ancestors [B, T, T] bool of nodes with these parents [B, T].

    levels: the most levels below the root.
    """
    nodes = torch.arange(parent.shape[1], device=parent.device)
    step = nodes.expand_as(parent)
    ancestors = step[..., None] == nodes
    for _ in range(levels):
        step = parent.gather(1, step)
        ancestors = ancestors | (step[..., None] == nodes)
    return ancestors.sum(-1) - 1, ancestors


class Growth:
    """The growing tree of EAGLE-2 (arXiv 2406.16858, section 4.1): k nodes, each with k children.

    Candidates are kept in flat order: the k children of the root, then those of each level, beam row by beam
    row: k*k, or fewer after `narrow`. `beam_*` describe the k nodes to expand next: token, cumulative
    log-probability, and which drafted rows each sees.
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
        """Record the beam's children: log-probabilities given their parent and token ids, both [B, R, k]."""
        self.tokens.append(tokens.flatten(1))
        self.scores.append((self.beam_scores[..., None] + scores).flatten(1))  # [B, R*k]
        self.parents.append(self.beam_flat[..., None].expand_as(tokens).flatten(1))

    @property
    def newest(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The newest children's scores and tokens [B, R*k], what the beam sees, and the candidates before."""
        return self.scores[-1], self.tokens[-1], self.beam_sees, self.size

    @property
    def candidates(self) -> tuple[Tensor, ...]:
        """Scores, tokens and parents of all candidates [B, C]; a parent's place is below 0 for the root."""
        levels = self.scores, self.tokens, self.parents
        return tuple(torch.cat(x, dim=1) if len(x) > 1 else x[0] for x in levels)

    def set_beam(self, scores: Tensor, tokens: Tensor, flat: Tensor, sees: Tensor, row: Tensor) -> Tensor:
        """Take a beam of the newest children, and return the beam row each came from [B, k]."""
        self.beam_scores, self.beam_tokens, self.beam_flat, self.beam_sees = scores, tokens, flat, sees
        self.size += self.tokens[-1].shape[1]
        return row

    def advance(self) -> Tensor:
        """Make the k best of the newest children the beam. Returns the beam row each came from [B, k]."""
        B, k = self.beam_tokens.shape[0], self.shape.width
        scores, index = self.scores[-1].topk(k, dim=-1)
        row, tokens = index // k, self.tokens[-1].gather(1, index)
        itself = torch.eye(k, dtype=torch.bool, device=index.device).expand(B, k, k)
        sees = torch.cat((pick(self.beam_sees, row), itself), dim=-1)  # [B, k, level*k]
        return self.set_beam(scores, tokens, self.size + index, sees, row)

    def narrow(self, rows: int) -> None:
        """Keep the first `rows` nodes of the beam."""
        seen = self.beam_sees.shape[-1] - self.beam_tokens.shape[1] + rows
        self.beam_tokens, self.beam_scores = self.beam_tokens[:, :rows], self.beam_scores[:, :rows]
        self.beam_flat, self.beam_sees = self.beam_flat[:, :rows], self.beam_sees[:, :rows, :seen]

    def prune(self, root: Tensor, prices: Prices | None = None) -> Tree:
        """Keep the T-1 candidates with the highest cumulative log-probability below `root` [B], or those of
        them that are worth their prices.
        """
        return best_below(root, *self.candidates, self.shape.nodes, self.shape.depth + 1, prices)


def best_below(
    root: Tensor, scores: Tensor, tokens: Tensor, parents: Tensor, nodes: int, levels: int,
    prices: Prices | None = None,
) -> Tree:
    """The tree of the nodes - 1 most likely of C candidates below root [B], or of those worth their prices.

    scores, tokens, parents [B, C]: see `Growth.candidates`; parents come before their children. levels: the
    most levels below the root.
    """
    # A child never outscores its parent but may equal it (probability 1 in float32). The stable sort keeps
    # the smaller index, the parent, first: the kept set always contains the ancestors of its members.
    if prices is not None:
        nodes = min(nodes, prices.worth(scores) + 1)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : nodes - 1]
    keep = best.sort(dim=-1).values
    above = parents.gather(1, keep).contiguous()
    place = torch.searchsorted(keep, above).clamp(max=max(keep.shape[1] - 1, 0))
    # A candidate of score -inf only fills the tree. If its parent is not kept, it stands below the root.
    parent = torch.where(keep.gather(1, place) == above, place + 1, 0)
    parent = torch.cat((torch.zeros_like(root[:, None]), parent), dim=1)
    tokens = torch.cat((root[:, None], tokens.gather(1, keep)), dim=1)
    scores = torch.cat((torch.zeros_like(scores[:, :1]), scores.gather(1, keep)), dim=1)
    return Tree(tokens, parent, *link(parent, levels), scores)


def join(one: Tree, other: Tree, nodes: int, levels: int, prices: Prices | None = None) -> Tree:
    """The `nodes` most likely nodes of two trees with one root, or those worth their prices, as a tree.

    A path that both have counts once, with the better score. levels: the most levels below the root. A child
    never outscores its parent; of equals the parent comes first, and stays with its child.
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
    scores = torch.maximum(one.scores, better), other.scores.masked_fill(known, lowest)
    joined = torch.where(known, match, torch.arange(other.tokens.shape[1], device=match.device) + first - 1)
    parents = one.parent - 1, joined.gather(1, other.parent) - 1
    below = (torch.cat([x[:, 1:] for x in both], 1) for both in (scores, (one.tokens, other.tokens), parents))
    return best_below(one.tokens[:, 0], *below, nodes, levels, prices)


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
    drawn at its parent and its parent is accepted. With distinct tokens of siblings the accepted nodes
    form one path; of equal paths side by side, as drafters that repeat themselves have them, the one to the
    first deepest node is taken. The step emits chosen[path[:count]]: the accepted tokens and, last, one more
    that becomes the next root. Because proposals are a deterministic set this is exactly sampling from the
    target (the reference's try-reject-renormalise loop with q=1).
    """
    return deepest(tree, tree.tokens == chosen.gather(1, tree.parent), window)


def deepest(tree: Tree, agrees: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return `accept` where `agrees` [B, T] marks the nodes that continue their parents."""
    nodes = torch.arange(tree.tokens.shape[1], device=agrees.device)
    accepted = ~(tree.ancestors & ~(agrees | (nodes == 0))[:, None]).any(-1)
    at_depth = tree.depth[:, None] == torch.arange(window, device=agrees.device)[:, None]  # [B, W, T]
    depth = torch.where(accepted, tree.depth, -1)
    last = depth.argmax(-1, keepdim=True)  # [B, 1]
    taken = pick(tree.ancestors, last) & at_depth  # [B, W, T]
    return torch.where(taken, nodes, 0).sum(-1), tree.depth.gather(1, last)[:, 0] + 1
