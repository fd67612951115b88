"""Drafters that draft all levels of a tree in one pass: P-EAGLE, DFlash, DSpark. `drafters.pard` extends it.

P-EAGLE: arXiv 2602.01469, vllm-project/vllm#32887. DFlash: arXiv 2602.06036, a block of mask tokens that
attends to the target's features; `--tree n+1,n-1,1` is the paper's chain, other trees are DDTree's (arXiv
2604.12989), and a causal head is JetSpec (arXiv 2606.18394). DSpark: arXiv 2607.05147.

The pass reads the tokens of the last commit, with the target's features, and mask tokens. In the head's
caches the committed tokens come first. The next pass overwrites the others.

With a Markov head, k nodes of each level are expanded, as the logits depend on the previous token (a low-rank
product). The DSpark paper drafts chains with it. A confidence head adds to the scores of a node and its
descendants.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import InputError
from engine.draft import HeadDrafter, NetworkDrafter, catch_up_count, last_unread
from engine.drafting import DrafterSetup
from engine.graphs import materialize
from engine.state import State
from engine.step import Step
from head import Head
from networks.block import BlockHead
from networks.p_eagle import PEagleHead
from tree import CandidateTree, TreeShape, gather_tokens


class OnePassDrafter(NetworkDrafter):
    """Drafts all levels in one pass over the tokens of the last commit and mask tokens."""

    _bidirectional = False  # tokens of a block also attend to later ones

    @property
    def num_mask_tokens(self) -> int:
        """Number of mask tokens in a pass."""
        return self.shape.max_commit - 2

    @property
    def extra_slots(self) -> int:
        return max(self.shape.nodes, self.shape.max_commit + self.num_mask_tokens)

    def catch_up(self, step: Step, state: State, slots: Tensor) -> Tensor:
        """Read up to W tokens, the first n_unread of them valid, and draft all levels: [B, L, H].

        Cache entries of the other tokens are overwritten or never attended to.
        """
        W, count, n_unread = catch_up_count(step, state), self.num_mask_tokens, state.n_unread
        end, index = state.length + self.read_ahead, torch.arange(W + count, device=slots.device)
        start = materialize(end - n_unread)
        own_slots = start[:, None] + index
        positions = torch.cat((start[:, None] + index[:W], end[:, None] + index[:count]), 1)
        # A token attends to itself and to earlier valid tokens; in a bidirectional block also to later ones.
        valid = (index < n_unread[:, None]) | (index >= W)
        causal = index <= index[:, None]
        masks = [causal | ((index >= W) & (index[:, None] >= W))] if self._bidirectional else [causal]
        if self._bidirectional and self.network.args.windows and not self.network.args.windows_ahead:
            masks.append(causal)
        visible = [
            step.mask(slots, start, (mask & valid[:, None]) | (index == index[:, None]))
            for mask in masks
        ]
        return self._draft(state, W, positions, own_slots, *visible)

    def _draft(self, state, W: int, positions: Tensor, slots: Tensor, visible: Tensor, causal=None) -> Tensor:
        """Return the lm_head's inputs of all levels [B, L, H].

        W: tokens before the mask tokens. causal: see `BlockHead.forward`. Other arguments: see
        `Transformer.forward`.
        """
        raise NotImplementedError

    def grow(
        self, step: Step, last: Tensor, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> CandidateTree:
        """Grow a tree from the outputs of all levels, last [B, L, H].

        Without a Markov head all nodes of a level have the same children (DDTree, k = number of nodes).
        """
        head, shape = self.network, self.shape
        markov, confidence = (getattr(head.args, name, 0) for name in ("markov_rank", "confidence"))
        k, levels = shape.width, shape.max_commit - 1
        hidden = last[:, :levels]
        logits = head.logits(hidden)  # of all levels, to read the lm_head once
        if selector := getattr(head.args, "selector_rank", 0):
            candidates = logits.topk(head.args.candidates, dim=-1)
        elif not markov:
            scores, ids = step.rank(logits, noise, k, self._draft_ids)  # [B, L, k]
            if confidence:
                scores = scores + F.logsigmoid(head.confidence_logit(hidden))[..., None]
            ranked = scores, ids

        def children(level: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            """Return scores and token ids [B, R, k] of the top-k children of tokens [B, R]."""
            count = tokens.shape[1]
            if selector:
                unary, ids = (x[:, level, None] for x in candidates)
                pair_logits = unary + head.pair_scores(hidden[:, level, None], tokens, ids)
                level_noise = None if noise is None else noise[:, level, None].gather(-1, ids)
                scores, index = step.rank(pair_logits, level_noise, k)
                return scores, ids.expand(-1, count, -1).gather(-1, index)
            if not markov:
                return tuple(x[:, level, None].expand(-1, count, -1) for x in ranked)
            h = hidden[:, level, None].expand(-1, count, -1)
            level_noise = None if noise is None else noise[:, level, None]
            level_logits = logits[:, level, None] + head.markov_logits(h, tokens)
            scores, ids = step.rank(level_logits, level_noise, k, self._draft_ids)
            if confidence:
                scores = scores + F.logsigmoid(head.confidence_logit(h, tokens))[..., None]
            return scores, ids

        scores, tokens = children(0, state.root)
        growth = CandidateTree(shape, scores[:, 0], tokens[:, 0])
        for level in range(1, levels):
            growth.extend(*children(level, growth.beam_tokens))
            if level + 1 < levels:
                step.advance(growth)
        return growth


class BlockDrafter(OnePassDrafter, HeadDrafter):
    """A DFlash or DSpark head. It drafts the block size of its training, even for a smaller tree.

    Arguments and errors are those of `HeadDrafter`.
    """

    @property
    def num_mask_tokens(self) -> int:
        return self.head.args.block

    @property
    def _bidirectional(self) -> bool:
        return not self.head.args.causal

    def context(self, state: State, W: int) -> Tensor:
        """Return the fused features of the last commit [B, W, H]."""
        return self.head.fuse(self.own_features(state.features[:, :W]))

    def _draft(self, state, W: int, positions: Tensor, slots: Tensor, visible: Tensor, causal=None) -> Tensor:
        context = self.context(state, W)
        return self.head(state.root[:, 0], context, positions, slots, visible, self.caches, causal=causal)


class PEagle(BlockDrafter):
    """A P-EAGLE head: the last committed token drafts the first level, mask tokens draft the others."""

    _bidirectional = False
    num_mask_tokens = OnePassDrafter.num_mask_tokens

    def _draft(self, state, W: int, positions: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        # Token i+1 is paired with feature i, at position i.
        head, known = self.head, state.tokens.gather(1, positions[:, :W] + 1)
        masks = known.new_full((len(known), self.num_mask_tokens), head.args.mask_id)
        context = self.context(state, W)
        mask_feature = head.fuse(head.mask_hidden.to(context.dtype)[None, None])
        features = torch.cat((context, mask_feature.expand(*masks.shape, -1)), 1)
        h = head(torch.cat((known, masks), 1), features, positions, slots, visible, self.caches)
        return head.rows(torch.cat((gather_tokens(h, last_unread(state, W)), h[:, W:]), 1))


def block_drafter(head: Head) -> type[BlockDrafter] | None:
    """Return the drafter class of a head; None if it does not draft blocks."""
    return BlockDrafter if isinstance(head, BlockHead) else PEagle if isinstance(head, PEagleHead) else None


def build(setup: DrafterSetup) -> BlockDrafter:
    """Build the drafter of a P-EAGLE, DFlash or DSpark head.

    Raises InputError if the head does not fit, or the tree is static or too deep.
    """
    tree = setup.tree
    if not isinstance(tree, TreeShape):
        raise InputError(f"--speculate {setup.method}: needs --tree T,D,K; a chain of n tokens is"
                         " --tree n+1,n-1,1")
    head = setup.load_head()
    if setup.options.tree in (None, "auto"):
        tree = full_depth_tree(tree, head.args.drafts)
    if tree.width > (max_width := getattr(head.args, "candidates", tree.width)):
        raise InputError(f"--tree: width {tree.width} exceeds the {max_width} candidates of this head's"
                         " selector")
    return block_drafter(head)(head, tree, setup.options.coupled)


def full_depth_tree(default: TreeShape, levels: int) -> TreeShape:
    """Return the default tree of a one-pass drafter: the nodes of `default`, all levels, and up to 12
    expanded nodes per level.
    """
    depth, width = min(levels, default.nodes - 1) - 1, min(default.nodes - 1, 12)
    return TreeShape(min(default.nodes, 1 + width + depth * width**2), depth, width)
