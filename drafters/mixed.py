"""Two drafters on one tree: join their trees and keep the nodes with the highest scores.

`--speculate lookup+eagle3` joins prompt lookup and a head. A score is the logarithm of the acceptance
probability: the softmax of a head, or a table by match length of prompt lookup.
"""
from __future__ import annotations

import math

import torch
import torch.nn as nn
from torch import Tensor

from drafters.static import TreeSize
from engine.draft import Drafter
from engine.state import State
from engine.step import Step
from tree import Tree, TreeShape, prune_candidates

MIN_SCORE = math.log(0.2)  # with `costs`, join a headless drafter's tree only if a node scores above it


def join(one: Tree, other: Tree, nodes: int, levels: int, costs=None) -> Tree:
    """Join two trees with the same root, and keep the best `nodes` nodes, or fewer with `costs`.

    A common path is kept once, with the higher score. levels: the maximum below the root. A child never
    outscores its parent; on a tie the parent comes first.
    """
    # [B, T2, T1]: nodes with equal token and depth.
    equal = (other.tokens[..., None] == one.tokens[:, None]) & (other.depth[..., None] == one.depth[:, None])
    same = torch.zeros_like(equal)
    same[:, 0, 0] = True
    roots = (one.depth == 0)[:, None] | (other.depth == 0)[..., None]
    for _ in range(levels):
        same_parent = same.gather(1, other.parent[..., None].expand_as(same))
        same_parent = same_parent.gather(2, one.parent[:, None].expand_as(same))
        same = same | (equal & same_parent & ~roots)
    duplicate, match = same.any(-1), same.long().argmax(-1)
    duplicate_scores = torch.where(same, other.scores[..., None], float("-inf")).amax(1)
    scores = torch.maximum(one.scores, duplicate_scores), other.scores.masked_fill(duplicate, float("-inf"))
    appended = torch.arange(other.tokens.shape[1], device=match.device) + one.tokens.shape[1] - 1
    joined = torch.where(duplicate, match, appended)  # index of each node of `other` in the joined tree
    parents = one.parent - 1, joined.gather(1, other.parent) - 1
    below = (torch.cat([x[:, 1:] for x in both], 1) for both in (scores, (one.tokens, other.tokens), parents))
    return prune_candidates(one.tokens[:, 0], *below, nodes, levels, costs)


def has_likely_node(tree: Tree) -> bool:
    """Return whether a draft token has a score above MIN_SCORE."""
    return bool((tree.scores[:, 1:] > MIN_SCORE).any())


class Mixed(Drafter):
    """Two drafters on one tree of `nodes` nodes, root included.

    If one of them is resizable, such as a head, the joint tree has the size of its tree, and the scheduler
    may resize it.
    """

    applies_costs = True

    def __init__(self, one: Drafter, other: Drafter, nodes: int | None = None):
        parts = (one, other)
        resizable = next((part for part in parts if part.resizable), None)
        nodes = nodes or (resizable or max(parts, key=lambda part: part.shape.nodes)).shape.nodes
        # At most `nodes` levels can be kept, but a network needs noise for every level of its own tree.
        network_levels = max((part.shape.max_commit for part in parts if part.network is not None), default=0)
        levels = max(min(max(part.shape.max_commit for part in parts), nodes), network_levels) - 1
        super().__init__(TreeSize(nodes, levels))
        self.parts = nn.ModuleList(parts)
        self.method = "+".join(part.method for part in parts)
        self.aux_layers = tuple(sorted({layer for part in parts for layer in part.aux_layers}))
        for part in parts:
            part.all_layers = self.aux_layers
        self.fingerprint = " ".join(part.fingerprint for part in parts)
        self.defers_head = all(part.defers_head for part in parts)

    @property
    def resizable_part(self) -> Drafter | None:
        return next((part for part in self.parts if part.resizable), None)

    @property
    def headless(self) -> Drafter | None:
        """The drafter to use while the head is off; None if both have a network."""
        if self.network is None:
            return self
        return next((part for part in self.parts if part.network is None), None)

    def with_tree(self, shape: TreeShape) -> Mixed:
        """Return a copy with another tree shape of the resizable drafter."""
        resizable = self.resizable_part
        parts = (part.with_tree(shape) if part is resizable else part for part in self.parts)
        return Mixed(*parts, shape.nodes)

    @property
    def network(self) -> nn.Module | None:
        networks = [part.network for part in self.parts if part.network is not None]
        return nn.ModuleList(networks) if networks else None

    @property
    def extra_slots(self) -> int:
        # A head's drafted tokens follow the tokens of the longest commit.
        drafted = max(part.extra_slots - part.shape.max_commit for part in self.parts)
        return max(self.shape.nodes, drafted + self.shape.max_commit)

    def allocate(self, *sizes) -> None:
        for part in self.parts:
            part.allocate(*sizes)

    def memory(self, *sizes) -> int:
        return sum(part.memory(*sizes) for part in self.parts)

    def rows(self, first: int, count: int) -> Drafter:
        view = super().rows(first, count)
        view._modules["parts"] = nn.ModuleList(part.rows(first, count) for part in self.parts)
        return view

    def sequence(self, slot: int, length: int) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.sequence(slot, length)]

    def reset(self, slot: int, prompt: list[int]) -> None:
        for part in self.parts:
            part.reset(slot, prompt)

    def finish(self, tokens: list[int]) -> None:
        for part in self.parts:
            part.finish(tokens)

    def prefill(self, state: State, features: Tensor | None, positions: Tensor, visible: Tensor) -> None:
        for part in self.parts:
            part.prefill(state, features, positions, visible)

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        trees, levels, temperature = [], 0, state.temperature.clamp(0, 1)[:, None]
        # The drafter with a network comes first; the other tree may then be skipped.
        for part in sorted(self.parts, key=lambda part: part.network is None):
            resizable = part is self.resizable_part
            tree = step.draft(part, state, slots, noise, costs if resizable else None)
            if trees and costs is not None and part.network is None and not has_likely_node(tree):
                continue  # joining the trees would cost more time than it saves
            factor = 1 + (part.sampled_score_factor - 1) * temperature
            trees.append(tree._replace(scores=tree.scores * factor))
            levels = tree.levels if resizable else levels
        if len(trees) < 2:
            return trees[0] if self.resizable_part else costs.limit(step, trees[0])
        joined = getattr(step, "join", join)(*trees, self.shape.nodes, self.shape.levels, costs)
        return Tree(*joined[:-1], levels=levels)  # torch 2.11 compiles no `_replace`
