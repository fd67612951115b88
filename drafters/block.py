"""Drafters whose head drafts all levels of a tree in one pass: P-EAGLE, DFlash, DSpark.

P-EAGLE: arXiv 2602.01469, vllm-project/vllm#32887. DFlash: arXiv 2602.06036, the target's features as keys
and values, a block of masks; the tree over its levels is DDTree's (arXiv 2604.12989), `--tree n+1,n-1,1` the
paper's chain, and a causal head JetSpec's (arXiv 2606.18394). DSpark: arXiv 2607.05147.

The pass reads the tokens that the last step committed, with the target's true features, and rows for unknown
tokens. In the head's caches the committed rows come first. The next pass overwrites the others.

With a Markov head (DSpark's papers draft chains with it) k nodes of each level are expanded: for each it is
a product of small rank, so that branches differ by the tokens before them. The score of a confidence head
counts for a node and all that follow it.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import InputError
from engine.draft import HeadDrafter, catch_up_count, last_unread, materialize
from engine.drafting import Setup
from engine.state import State
from engine.step import Step
from head import Head
from networks.block import BlockHead
from networks.p_eagle import PEagleHead
from tree import Growth, TreeShape, pick


class BlockDrafter(HeadDrafter):
    """A DFlash or DSpark head. It drafts the whole block it was trained for, also for a smaller tree.

    Arguments and errors are those of `HeadDrafter`.
    """

    @property
    def block_rows(self) -> int:
        """Rows of a pass for what is not known yet."""
        return self.head.args.block

    @property
    def _sees_all(self) -> bool:
        """True if rows of a block see those after them, too."""
        return not self.head.args.causal

    @property
    def extra_slots(self) -> int:
        return max(self.shape.nodes, self.shape.max_commit + self.block_rows)

    def catch_up(self, step: Step, state: State, slots: Tensor) -> Tensor:
        """Read up to W rows, the first n_new of them real, and draft: the rows of all levels [B, L, H].

        The caches' entries of the other rows are overwritten or never seen.
        """
        W, rows, n_new = catch_up_count(step, state), self.block_rows, state.n_new
        start, ahead = materialize(state.length - n_new), torch.arange(W + rows, device=slots.device)
        context = self.head.fuse(self.own_features(state.features[:, :W]))
        own = start[:, None] + ahead
        positions = torch.cat((start[:, None] + ahead[:W], state.length[:, None] + ahead[:rows]), 1)
        # Each row sees itself, and of those before it the real ones; of a block maybe those after it, too.
        real = (ahead < n_new[:, None]) | (ahead >= W)
        before = ahead <= ahead[:, None]
        sees = [before | ((ahead >= W) & (ahead[:, None] >= W))] if self._sees_all else [before]
        if self._sees_all and self.head.args.windows:
            sees.append(before)
        visible = [
            step.mask(slots, start, (s & real[:, None]) | (ahead == ahead[:, None]))
            for s in sees
        ]
        return self._draft(state, context, positions, own, *visible)

    def _draft(
        self, state, context: Tensor, positions: Tensor, own: Tensor, visible: Tensor, before=None
    ) -> Tensor:
        """The head's rows of all levels, as its lm_head reads them [B, L, H].

        context [B, W, H]: fused features. before: see `BlockHead.forward`. The others are those of
        `Transformer.forward`.
        """
        return self.head(state.root[:, 0], context, positions, own, visible, self.caches, before=before)

    def grow(
        self, step: Step, last: Tensor, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Growth:
        """Grow a tree from the rows of all levels, last [B, L, H].

        Without a Markov head all nodes of a level have the same children (DDTree, where k is the number of
        nodes).
        """
        head, shape = self.head, self.shape
        k, levels = shape.width, shape.max_commit - 1
        rows = last[:, :levels]
        logits = head.logits(rows)  # of all levels: the lm_head is read once
        if not head.args.markov_rank:
            scores, ids = step.rank(logits, noise, k, self._ids)  # [B, L, k]
            if head.args.confidence:
                scores = scores + F.logsigmoid(head.confidence_logit(rows))[..., None]
            ranked = scores, ids

        def children(level: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            """The k best after tokens [B, R]: scores and target ids, both [B, R, k]."""
            count = tokens.shape[1]
            if not head.args.markov_rank:
                return tuple(x[:, level, None].expand(-1, count, -1) for x in ranked)
            row = rows[:, level, None].expand(-1, count, -1)
            after = logits[:, level, None] + head.after(row, tokens)
            shift = None if noise is None else noise[:, level, None]
            scores, ids = step.rank(after, shift, k, self._ids)
            if head.args.confidence:
                scores = scores + F.logsigmoid(head.confidence_logit(row, tokens))[..., None]
            return scores, ids

        scores, tokens = children(0, state.root)
        grown = Growth(shape, scores[:, 0], tokens[:, 0])
        for level in range(1, levels):
            grown.extend(*children(level, grown.beam_tokens))
            if level + 1 < levels:
                step.dispatch(Growth.advance, grown)
        return grown


class PEagle(BlockDrafter):
    """A P-EAGLE head: the catch-up's last row drafts the first level, rows that read a mask the others."""

    _sees_all = False

    @property
    def block_rows(self) -> int:
        return self.shape.max_commit - 2

    def _draft(
        self, state, context: Tensor, positions: Tensor, own: Tensor, visible: Tensor
    ) -> Tensor:
        # Row i pairs feature i with token i+1, and stands at position i.
        head, W = self.head, context.shape[1]
        known = state.tokens.gather(1, positions[:, :W] + 1)
        masks = known.new_full((len(known), self.block_rows), head.args.mask_id)
        hidden = head.fuse(head.mask_hidden.to(context.dtype)[None, None])
        features = torch.cat((context, hidden.expand(*masks.shape, -1)), 1)
        h = head(torch.cat((known, masks), 1), features, positions, own, visible, self.caches)
        return head.rows(torch.cat((pick(h, last_unread(state, W)), h[:, W:]), 1))


def block_drafter(head: Head) -> type[BlockDrafter] | None:
    """Return the class that drafts with a head, None if it drafts no blocks."""
    return BlockDrafter if isinstance(head, BlockHead) else PEagle if isinstance(head, PEagleHead) else None


def build(setup: Setup) -> BlockDrafter:
    """Load the head. Raises InputError if it does not fit or the tree is static, ValueError on deep trees."""
    tree = setup.tree
    if not isinstance(tree, TreeShape):
        raise InputError(f"--speculate {setup.method}: grows its tree: --tree T,D,K, or a chain of n tokens"
                         " as --tree n+1,n-1,1")
    head = setup.load_head()
    if setup.drafting.tree in (None, "auto"):
        tree = deep_tree(tree, head.args.drafts)
    return block_drafter(head)(head, tree, setup.drafting.coupled)


def deep_tree(usual: TreeShape, levels: int) -> TreeShape:
    """Return the default tree of a drafter whose levels cost next to nothing: the nodes of the usual tree,
    all levels, and on each as many expanded nodes as there could be, up to a dozen.
    """
    depth, width = min(levels, usual.nodes - 1) - 1, min(usual.nodes - 1, 12)
    return TreeShape(min(usual.nodes, 1 + width + depth * width**2), depth, width)
