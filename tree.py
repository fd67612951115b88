"""The draft tree: fixed-size tensors, grown level by level, pruned to T nodes, verified, accepted.

Node 0 is the root: the last emitted token. Its keys and values are not in the cache yet. The other T-1 nodes
are drafted. Everything is batched over B sequences, and loops run over levels, not over nodes. Shapes depend
on `TreeShape` only and nothing is read back to the host, unless a scheduler limits the tree by `costs`
(`engine.engine.Choice`).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from common.errors import InputError

if TYPE_CHECKING:
    from engine.step import Step


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
        if self.nodes < 2 or self.depth < 0 or self.width < 1:
            raise InputError(f"tree: {self.nodes} nodes, depth {self.depth}, width {self.width}: must be at"
                             " least 2 (root included), 0 and 1")
        if self.nodes - 1 > self.candidates:
            raise InputError(
                f"tree: {self.nodes} nodes, but depth {self.depth} and width {self.width} only draft"
                f" {self.candidates} + the root"
            )

    @property
    def name(self) -> str:
        """T/D/k, as the documentation writes it."""
        return f"{self.nodes}/{self.depth}/{self.width}"

    def limited(self, nodes: int, levels: int) -> TreeShape:
        """Return the shape of a tree with fewer nodes and with `levels` expansions."""
        return TreeShape(nodes, levels, self.width) if nodes > 1 else TreeShape(1, 0, 0)

    @property
    def candidates(self) -> int:
        """The number of drafted nodes before pruning: k on the first level, k*k on each further one."""
        return self.width + self.depth * self.width**2

    @property
    def max_commit(self) -> int:
        """W, the maximum number of tokens that one step commits: the root and a full path."""
        return 1 if self.nodes == 1 else self.depth + 2

    @property
    def extra_slots(self) -> int:
        """Cache slots a step may touch beyond the committed ones, in the target's cache and in the head's."""
        return max(self.nodes, self.max_commit + self.width * self.depth)


PAPER_TREE = TreeShape(60, 7, 10)  # of EAGLE-2 and EAGLE-3


class Tree(NamedTuple):
    """A batch of trees, root first, parents before children."""

    tokens: Tensor  # [B, T] target token ids
    parent: Tensor  # [B, T] index of each node's parent; the root's is 0, itself
    depth: Tensor  # [B, T] root 0
    ancestors: Tensor  # [B, T, T] bool: node i attends to node j: i itself or an ancestor
    # [B, T] the drafter's log-probability of each node's path, root 0; None if it has none.
    scores: Tensor | None = None
    levels: int = 0  # expansions after the first level, if a network grew it


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Gather x [B, T, ...] along dimension 1 at index [B, K] -> [B, K, ...]."""
    if x.shape[0] == 1:  # one operation instead of four
        return x.index_select(1, index[0])
    batch = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[batch, index]


def depth_and_ancestors(parent: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return depth [B, T] and ancestors [B, T, T] bool (a node is its own ancestor) from parent [B, T].

    levels: the maximum number of levels below the root.
    """
    nodes = torch.arange(parent.shape[1], device=parent.device)
    ancestor = nodes.expand_as(parent)
    ancestors = ancestor[..., None] == nodes
    for _ in range(levels):
        ancestor = parent.gather(1, ancestor)
        ancestors = ancestors | (ancestor[..., None] == nodes)
    return ancestors.sum(-1) - 1, ancestors


class CandidateTree:
    """A tree while it grows (EAGLE-2, arXiv 2406.16858, section 4.1).

    Each level expands the k best nodes, the beam, into k children each. Candidates are stored flat: level by
    level, grouped by parent. `beam_*`: tokens, cumulative log-probabilities, candidate indices and attention
    mask [B, k, drafted] of the beam. size: number of candidates up to the beam's level.
    """

    def __init__(self, shape: TreeShape, scores: Tensor, tokens: Tensor):
        """Start from the k best children of the root: log-probabilities and ids [B, k], best first."""
        self.shape = shape
        B, k = tokens.shape
        index = torch.arange(k, device=tokens.device).expand(B, k)
        self.tokens, self.scores = [tokens], [scores]
        self.parents = [torch.full_like(tokens, -1)]
        self.beam_tokens, self.beam_scores, self.beam_index = tokens, scores, index
        self.beam_mask = torch.eye(k, dtype=torch.bool, device=tokens.device).expand(B, k, k)
        self.size = k

    def extend(self, scores: Tensor, tokens: Tensor) -> None:
        """Record the children of the R beam nodes: conditional log-probabilities and ids [B, R, k]."""
        self.tokens.append(tokens.flatten(1))
        self.scores.append((self.beam_scores[..., None] + scores).flatten(1))  # [B, R*k]
        self.parents.append(self.beam_index[..., None].expand_as(tokens).flatten(1))

    @property
    def candidates(self) -> tuple[Tensor, ...]:
        """Scores, tokens, parents of all candidates [B, C]. Parents are candidate indices, -1: the root."""
        levels = self.scores, self.tokens, self.parents
        return tuple(torch.cat(x, dim=1) if len(x) > 1 else x[0] for x in levels)

    def set_beam(self, scores: Tensor, tokens: Tensor, index: Tensor, mask: Tensor) -> None:
        """Replace the beam by some of the newest children. index: their candidate indices."""
        self.beam_scores, self.beam_tokens, self.beam_index, self.beam_mask = scores, tokens, index, mask
        self.size += self.tokens[-1].shape[1]

    def advance(self) -> Tensor:
        """Make the k best of the newest children the beam.

        Returns their parents' indices in the old beam [B, k].
        """
        B, k = self.beam_tokens.shape[0], self.shape.width
        scores, index = self.scores[-1].topk(k, dim=-1)
        row, tokens = index // k, self.tokens[-1].gather(1, index)
        self_mask = torch.eye(k, dtype=torch.bool, device=index.device).expand(B, k, k)
        mask = torch.cat((gather_tokens(self.beam_mask, row), self_mask), dim=-1)  # [B, k, level*k]
        self.set_beam(scores, tokens, self.size + index, mask)
        return row

    def limit_beam(self, count: int) -> None:
        """Keep the first `count` nodes of the beam."""
        drafted = self.beam_mask.shape[-1] - self.beam_tokens.shape[1] + count
        self.beam_tokens, self.beam_scores = self.beam_tokens[:, :count], self.beam_scores[:, :count]
        self.beam_index, self.beam_mask = self.beam_index[:, :count], self.beam_mask[:, :count, :drafted]

    def prune(self, step: Step, root: Tensor, costs=None) -> Tree:
        """Keep the T-1 candidates with the highest cumulative log-probability below `root` [B].

        costs: keep fewer, those whose expected gain exceeds their cost. step: an `engine.step.Step`.
        """
        return step.prune(root, *self.candidates, self.shape.nodes, self.shape.depth + 1, costs)


def prune_candidates(
    root: Tensor, scores: Tensor, tokens: Tensor, parents: Tensor, nodes: int, levels: int,
    costs=None,
) -> Tree:
    """Return the tree of the nodes - 1 most probable of C candidates below root [B], fewer with `costs`.

    scores, tokens, parents [B, C]: see `CandidateTree.candidates`; parents come before their children.
    levels: maximum number of levels below the root.
    """
    # A child never outscores its parent but may equal it (probability 1 in float32). The stable sort keeps
    # the smaller index, the parent, first: the kept set always contains the ancestors of its members.
    if costs is not None:
        nodes = min(nodes, costs.keep(scores) + 1)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : nodes - 1]
    keep = best.sort(dim=-1).values
    parent_candidate = parents.gather(1, keep).contiguous()
    parent_rank = torch.searchsorted(keep, parent_candidate).clamp(max=max(keep.shape[1] - 1, 0))
    # Candidates of score -inf are padding. One whose parent is not kept becomes a child of the root.
    parent = torch.where(keep.gather(1, parent_rank) == parent_candidate, parent_rank + 1, 0)
    parent = torch.cat((torch.zeros_like(root[:, None]), parent), dim=1)
    tokens = torch.cat((root[:, None], tokens.gather(1, keep)), dim=1)
    scores = torch.cat((torch.zeros_like(scores[:, :1]), scores.gather(1, keep)), dim=1)
    return Tree(tokens, parent, *depth_and_ancestors(parent, levels), scores)


def tree_attention_mask(slots: Tensor, length: Tensor, local: Tensor) -> Tensor:
    """Return the attention mask of a pass [B, T, n] bool: the cache slots that each token attends to.

    slots [n]: 0..n-1. length [B]: slots of the committed prefix, visible to all tokens. local [B, T, M]: mask
    of the M slots after it. Later slots are masked.
    """
    offset = slots - length[:, None]  # [B, n]
    inside = (offset >= 0) & (offset < local.shape[-1])
    index = offset.clamp(0, local.shape[-1] - 1)[:, None].expand(-1, local.shape[1], -1)
    return (offset < 0)[:, None] | (inside[:, None] & local.gather(2, index))


def accept(tree: Tree, chosen: Tensor, max_commit: int) -> tuple[Tensor, Tensor]:
    """Return the deepest accepted path: node indices [B, W], root first, padded with 0; and its length [B],
    at least 1.

    chosen [B, T]: the one token that the target draws at every node. A node is accepted if it carries the
    token drawn at its parent and its parent is accepted. If siblings repeat a token, paths may tie: the path
    to the first of the deepest nodes is taken. The step emits chosen[path[:count]]: the accepted tokens, then
    one more that becomes the next root. Every emitted token is the target's own draw at its position, so the
    tree does not change the distribution, and no rejection sampling is needed.
    """
    nodes = torch.arange(tree.tokens.shape[1], device=chosen.device)
    agrees = (tree.tokens == chosen.gather(1, tree.parent)) | (nodes == 0)
    accepted = ~(tree.ancestors & ~agrees[:, None]).any(-1)
    at_depth = tree.depth[:, None] == torch.arange(max_commit, device=chosen.device)[:, None]  # [B, W, T]
    depth = torch.where(accepted, tree.depth, -1)
    last = depth.argmax(-1, keepdim=True)  # [B, 1]
    on_path = gather_tokens(tree.ancestors, last) & at_depth  # [B, W, T]
    return torch.where(on_path, nodes, 0).sum(-1), tree.depth.gather(1, last)[:, 0] + 1
