"""Drafting: the interface of all drafters, and the EAGLE drafter, which grows a tree with a draft head.

EAGLE-1 arXiv 2401.15077, EAGLE-2 2406.16858, EAGLE-3 2503.01840; SafeAILab/EAGLE cnets.py and cnets1.py.

One catch-up pass of the head runs over the tokens that the last step committed and gives the first level of
the tree. Each further level is one pass over the expanded nodes. The head's KV cache holds committed tokens
first, then drafted nodes level by level, which the next catch-up overwrites.
"""
from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch import Tensor

from common.errors import InputError
from engine.drafting import DrafterSetup
from engine.state import State
from extensions import STATIC_HEAD, load
from model import KVCaches, buffer_bytes
from tree import CandidateTree, Tree, TreeShape, gather_tokens

if TYPE_CHECKING:
    from engine.step import Step


class Drafter(nn.Module):
    """Proposes a tree for each step. This base class proposes the root alone: plain decoding.

    shape: the tree it drafts; the largest one if a scheduler limits it.
    """

    method = "none"  # name in --speculate
    aux_layers: tuple[int, ...] = ()  # target layers whose inputs it reads as features
    all_layers: tuple[int, ...] = ()  # layers in `State.features`; (): exactly `aux_layers`
    fingerprint = ""  # of a drafter without weights, for evaluation records
    defers_head = False  # True: new tokens stay unread by the head until `engine.deferred` runs it
    buffers_by_slot: tuple[str, ...] = ()  # names of its buffers with a batch dimension
    sampled_score_factor = 1.0  # multiplies its scores at temperature 1
    resizable = False  # it drafts trees of any size, see `NetworkDrafter.with_tree`
    prunable = True  # `costs` may remove nodes of its tree
    applies_costs = False  # `propose` limits the tree by `costs`; if False, `Step.draft` does

    def __init__(self, shape: TreeShape = TreeShape(1, 0, 0)):
        super().__init__()
        self.shape = shape
        self.caches: KVCaches | None = None

    @property
    def network(self) -> nn.Module | None:
        """The draft network, if there is one."""
        return getattr(self, "head", None)

    @property
    def resizable_part(self) -> Drafter | None:
        """This drafter, or the part of a joint one, whose trees can have any size; None if there is none."""
        return self if self.resizable else None

    @property
    def headless(self) -> Drafter | None:
        """This drafter, or the part of a joint one, that has no network; None if there is none."""
        return self if self.network is None else None

    def new_caches(
        self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCaches | None:
        """Allocate the KV caches of its network, if it has any."""

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Move to the device and allocate all state. Called once."""
        self.to(device)
        self.caches = self.new_caches(batch, slots, dtype, device)

    def memory(self, batch: int, slots: int, dtype: torch.dtype) -> int:
        """Return the bytes that `allocate` takes."""
        caches = self.new_caches(batch, slots, dtype, "meta")
        return 0 if caches is None else buffer_bytes(caches)

    @property
    def extra_slots(self) -> int:
        """Cache slots beyond the committed ones that a step may write, in the target's cache or its own."""
        return self.shape.extra_slots

    def rows(self, first: int, count: int) -> Drafter:
        """Return a view for batch slots first ... first + count - 1: same weights, sliced state."""
        view = copy.copy(self)
        view._buffers, view._modules = dict(self._buffers), dict(self._modules)
        for name in self.buffers_by_slot:
            view._buffers[name] = self._buffers[name].narrow(0, first, count)
        if self.caches is not None:
            view.caches = self.caches.rows(first, count)
        return view

    def sequence(self, slot: int, length: int) -> list[Tensor]:
        """Return views of the state of a batch slot: its buffers and first `length` cache slots."""
        buffers = [self._buffers[name][slot] for name in self.buffers_by_slot]
        return buffers if self.caches is None else buffers + self.caches.sequence(slot, length)

    def reset(self, slot: int, prompt: list[int]) -> None:
        """Reset the state of a batch slot. Called between steps, when a request is added."""

    def finish(self, tokens: list[int]) -> None:
        """Learn from a finished request: its prompt and output. Called between steps."""

    def prefill(self, state: State, features: Tensor | None, positions: Tensor, visible: Tensor) -> None:
        """Run over a chunk of the prompt: tokens of `state` at positions [B, C], their features [B, C, F].

        The token after the prompt's last one is not known yet: a drafter that needs it runs over the last
        token again in its first `propose`.
        """

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        """Draft a tree below the root.

        step: for tensor operations. slots [n]: the live cache slots 0..n-1. noise [B, W, V]: temperature *
        Gumbel noise for positions length+1 ... length+W, or None if all requests are greedy. costs: limit the
        tree, see `engine.engine.Choice`; None: no limit.
        """
        return Tree(state.root.clone(), state.zero, state.zero, state.one)

    def observe(self, step: Step, state: State, logits: Tensor) -> None:
        """Learn from the target's logits [B, T, V] at the proposed nodes, after `process_logits`."""


def catch_up_count(step: Step, state: State) -> int:
    """Return R, the tokens of a catch-up pass: W with static shapes, else the largest `n_unread`, 1 to W."""
    W = state.max_commit
    return W if step.static_shapes else min(max(int(state.n_unread.max()), 1), W)


def catch_up_inputs(step: Step, state: State, slots: Tensor, ahead: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positions [B, R] of the tokens of a catch-up pass, and their attention mask.

    The first n_unread tokens are committed, the rest is padding. ahead: `NetworkDrafter.read_ahead`.
    """
    count, start = catch_up_count(step, state), state.length - state.n_unread + ahead
    positions = start[:, None] + torch.arange(count, device=slots.device)
    return positions, step.causal_mask(slots, start, count)


def last_unread(state: State, count: int) -> Tensor:
    """Return the index [B, 1] of the last unread token in a pass of `count` tokens."""
    # A paused sequence may have more unread tokens than the pass.
    return (state.n_unread - 1).clamp(0, count - 1)[:, None]


class NetworkDrafter(Drafter):
    """A drafter whose network grows a tree level by level.

    coupled: rank candidates by draft logits plus the noise that the target is sampled with, so that the
    network predicts which sample the target takes (Daliri, Musco, Suresh, arXiv 2408.07978). Coupling never
    changes the output. vocabulary: size of the network's vocabulary. max_levels: maximum number of tree
    levels; None: any. Raises InputError if the tree is wider or deeper.
    """

    applies_costs = True
    # Largest trees of greedy and of sampled steps. A sampled step draws the noise of every level in advance.
    max_trees = TreeShape(32, 7, 4), TreeShape(32, 3, 4)
    _draft_ids: Tensor | None = None  # target id of each of its own ids [Vd]; None: they are the same
    read_ahead = 0  # tokens that its cache has beyond the target's: 1 if it also reads the root

    def __init__(
        self, shape: TreeShape, vocabulary: int, coupled: bool = True, max_levels: int | None = None
    ):
        super().__init__(shape)
        self.coupled, self.vocabulary, self.max_levels = coupled, vocabulary, max_levels
        self._check_shape()

    def _check_shape(self) -> None:
        levels, max_levels = self.shape.max_commit - 1, self.max_levels
        if self.shape.width > self.vocabulary:
            raise InputError(f"tree: width {self.shape.width} exceeds the head's vocabulary of"
                             f" {self.vocabulary}")
        if max_levels is not None and levels > max_levels:
            raise InputError(
                f"tree: {levels} levels below the root; the head drafts at most {max_levels}")

    def with_tree(self, shape: TreeShape) -> NetworkDrafter:
        """Return a copy for another tree shape that shares network and caches."""
        other = copy.copy(self)
        other.shape = shape
        other._check_shape()
        return other

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        last = self.catch_up(step, state, slots)
        growth = self.grow(step, last, state, slots, self.draft_noise(noise), costs)
        pruned = growth.prune(step, state.root[:, 0], costs)
        return Tree(*pruned[:-1], levels=len(growth.scores) - 1)  # torch 2.11 compiles no `_replace`

    def grow(
        self, step: Step, last: Tensor, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> CandidateTree:
        """Return all candidates below the root.

        last [B, 1, H]: the catch-up's last output. noise: draft noise [B, W, Vd] or None.
        """
        shape, k, base = self.shape, self.shape.width, state.length + self.read_ahead
        scores, tokens = self._top_k(step, last, noise, 0, k)
        growth = CandidateTree(shape, scores[:, 0], tokens[:, 0])
        feature = last.expand(-1, k, -1)
        first_slots = base[:, None] + torch.arange(k, device=slots.device)
        count, drafted = k, 0  # nodes to expand; nodes of earlier levels
        for level in range(shape.depth):
            if costs is not None:
                count = self.expand(costs, growth.beam_scores, level)
                if not count:
                    break
                growth.limit_beam(count)
                feature = feature[:, :count]
            positions = (base + level)[:, None].expand(-1, count)
            visible = step.mask(slots, base, growth.beam_mask)
            own_slots = first_slots[:, :count] + drafted
            feature = self._forward(growth.beam_tokens, feature, positions, own_slots, visible)
            drafted += count
            growth.extend(*self._top_k(step, feature, noise, level + 1, k))
            if level + 1 < shape.depth:
                feature = gather_tokens(feature, step.advance(growth))
        return growth

    def expand(self, costs, scores: Tensor, level: int) -> int:
        """Return how many nodes of a level to expand, 0: stop. scores [B, k]: of its best nodes."""
        return costs.expand(scores, self.shape.width)

    def _top_k(
        self, step, h: Tensor, noise: Tensor | None, level: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and target ids [B, R, k] of the top k tokens after outputs h [B, R, H]."""
        logits = self.network.logits(h)
        return step.rank(logits, None if noise is None else noise[:, level, None], k, self._draft_ids)

    def draft_noise(self, noise: Tensor | None) -> Tensor | None:
        """Return the target's noise [B, W, V] at the network's ids [B, levels, Vd]; None if not coupled."""
        if noise is None or not self.coupled:
            return None
        noise = noise[:, : self.shape.max_commit - 1]  # a joint tree may have more levels
        return noise if self._draft_ids is None else noise[..., self._draft_ids]

    def catch_up(self, step: Step, state: State, slots: Tensor) -> Tensor:
        """Run the network over the tokens that the last step committed. Returns the last output [B, 1, H]."""
        raise NotImplementedError

    def _forward(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor
    ) -> Tensor:
        """Run over drafted tokens [B, k] -> outputs [B, k, H].

        feature [B, k, H]: the output that each token was drafted from. slots [B, k]: cache slots to write.
        """
        return self.network(tokens, feature, positions, slots, visible, self.caches)


class HeadDrafter(NetworkDrafter):
    """A drafter with a draft head: EAGLE-2 with an EAGLE-1 head, EAGLE-3 with an EAGLE-3 head.

    Arguments and errors are those of `NetworkDrafter`.
    """

    resizable = True

    def __init__(self, head, shape: TreeShape, coupled: bool = True):
        super().__init__(shape, head.args.draft_vocab_size, coupled, head.args.drafts)
        self.head, self.aux_layers = head, head.args.aux_layers

    def new_caches(
        self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCaches | None:
        return self.head.caches(batch, slots, dtype, device)

    def own_features(self, features: Tensor) -> Tensor:
        """Select the features of its own layers from `State.features` [..., F]."""
        if not self.all_layers or self.all_layers == self.aux_layers:
            return features
        by_layer = features.unflatten(-1, (len(self.all_layers), -1)).unbind(-2)
        return torch.cat([by_layer[self.all_layers.index(layer)] for layer in self.aux_layers], -1)

    def prefill(self, state: State, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        if self.caches is None:  # heads without a KV cache
            return
        # Entry i combines feature i and token i+1, at position i: RoPE depends on position differences only.
        next_tokens = state.tokens.gather(1, positions + 1)
        features = self.head.fuse(self.own_features(features))
        self.head.prefill(next_tokens, features, positions, positions, visible, self.caches)

    def catch_up(self, step: Step, state: State, slots: Tensor) -> Tensor:
        """Run the head over up to W tokens with the target's features. The first n_unread are committed.

        The others are padding: their cache entries are overwritten or never attended to.
        """
        head, (positions, visible) = self.head, catch_up_inputs(step, state, slots)
        next_tokens = state.tokens.gather(1, positions + 1)
        features = head.fuse(self.own_features(state.features[:, : positions.shape[1]]))
        h = head(next_tokens, features, positions, positions, visible, self.caches)
        return gather_tokens(h, last_unread(state, h.shape[1]))

    @property
    def _draft_ids(self) -> Tensor:
        return self.head.draft_ids


def build(setup: DrafterSetup) -> HeadDrafter:
    """Build the drafter of a head that grows trees: EAGLE-2, EAGLE-3 or MTP.

    Raises InputError if the head or the tree does not fit.
    """
    head = setup.load_head()
    if not isinstance(setup.tree, TreeShape):
        return load(STATIC_HEAD)(head, setup.tree, setup.options.coupled)
    return HeadDrafter(head, setup.tree, setup.options.coupled)
