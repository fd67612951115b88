"""Drafters whose head drafts all levels of a tree in one pass: P-EAGLE, DFlash, DSpark.

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
from drafters.base import Setup
from drafters.network import HeadDrafter, grow_crossed
from kernels.backend import TorchBackend, once
from networks.block import BlockHead
from networks.eagle import PEagleHead
from tree import Growth, PathTree, TreeShape


class BlockDrafter(HeadDrafter):
    """A head that drafts blocks, on any tree as deep as these.

    coupled, reach: see `HeadDrafter`. Raises ValueError on a tree that is deeper than the head's blocks, or
    wider than its vocabulary.
    """

    def __init__(self, head: BlockHead | PEagleHead, shape: TreeShape, coupled: bool = True, reach: int = 0):
        super().__init__(head, shape, coupled, reach)
        if shape.window - 1 > head.args.drafts:
            raise ValueError(
                f"tree: depth {shape.depth} has {shape.window - 1} levels, the head drafts {head.args.drafts}"
                f" tokens ahead: a depth of at most {head.args.drafts - 1}"
            )
        self.passes = 1

    @property
    def deepest(self) -> int:
        return self.head.args.drafts - 1

    @property
    def block_rows(self) -> int:
        """Rows of a pass for what is not known yet."""
        raise NotImplementedError

    @property
    def extra_slots(self) -> int:
        return max(self.shape.nodes, self.shape.window + self.block_rows)

    def catch_up(self, state, slots: Tensor) -> Tensor:
        """Read up to W rows, the first n_new of them real, and draft: the rows of all levels [B, L, H].

        The caches' entries of the other rows are overwritten or never seen.
        """
        W, rows, n_new = state.backend.unread_rows(state), self.block_rows, state.n_new
        start, ahead = once(state.length - n_new), torch.arange(W + rows, device=slots.device)
        context = self.head.fuse(state.features[:, :W])
        slots, first = self.kept.live(slots), self.kept.first(start)
        own = first[:, None] + ahead
        positions = torch.cat((start[:, None] + ahead[:W], state.length[:, None] + ahead[:rows]), 1)
        # Each row sees itself, and of those before it the real ones; of a block maybe those after it, too.
        real = (ahead < n_new[:, None]) | (ahead >= W)
        before = ahead <= ahead[:, None]
        if self._sees_all:
            before = before | ((ahead >= W) & (ahead[:, None] >= W))
        seen = (before & real[:, None]) | (ahead == ahead[:, None])
        visible = state.backend.visible_slots(slots, first, seen)
        drafted = self._draft(state, context, positions, own, visible)
        self._keep_unread(state)
        return drafted

    @property
    def _sees_all(self) -> bool:
        """Return whether rows of a block see those after them, too."""
        raise NotImplementedError

    def _draft(
        self, state, context: Tensor, positions: Tensor, own: Tensor, visible: Tensor
    ) -> Tensor:
        """The head's rows of all levels, as its lm_head reads them [B, L, H].

        context [B, W, H]: fused features. The others are those of `Transformer.forward`.
        """
        raise NotImplementedError

    def grow(
        self, last: Tensor, state, slots: Tensor, noise: Tensor | None, shape: TreeShape,
        level_logits: list[Tensor] | None = None,
    ) -> Growth:
        backend, head, k = state.backend, self.head, shape.width
        logits = head.logits(last[:, : shape.window - 1])  # of all levels: the lm_head is read once
        if not head.args.markov_rank:
            if level_logits is not None:
                level_logits += logits.split(1, 1)
            rows = last[:, : shape.window - 1]
            trust = F.logsigmoid(head.doubt(rows)) if head.args.confidence else None
            return grow_crossed(backend, logits, noise, self._names, shape, trust)

        def children(level: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            """The k best after tokens [B, R]: scores and target ids, both [B, R, k]."""
            row = last[:, level, None].expand(-1, tokens.shape[1], -1)
            after = logits[:, level, None] + head.after(row, tokens)
            if level_logits is not None:
                level_logits.append(after)
            shift = None if noise is None else noise[:, level, None]
            return self._ranked(backend, after, row, tokens, shift, k)

        scores, tokens = children(0, state.root()[:, None])
        grown = Growth(shape, scores[:, 0], tokens[:, 0])
        for level in range(1, shape.window - 1):
            if level > 1:
                backend.advance(grown)
            grown.extend(*children(level, grown.beam_tokens))
        return grown

    def _ranked(
        self, backend: TorchBackend, logits: Tensor, row: Tensor, tokens: Tensor, noise: Tensor | None, k: int
    ) -> tuple[Tensor, Tensor]:
        """The k best by logits [B, R, Vd] of rows that draft what follows tokens [B, R], with what the
        confidence head says of them: scores and target ids, both [B, R, k].
        """
        scores, ids = backend.rank(logits, noise, k, self._names)
        if self.head.args.confidence:
            scores = scores + F.logsigmoid(self.head.doubt(row, tokens))[..., None]
        return scores, ids


def build_block(setup: Setup, drafter: type[BlockDrafter]) -> BlockDrafter:
    """Load the head. Raises InputError if it does not fit or the tree is static, ValueError on deep trees."""
    tree = setup.grown_tree
    if isinstance(tree, PathTree):
        raise InputError(f"--speculate {setup.method}: grows its tree: --tree T,D,K, or a chain of n tokens"
                         " as --tree n+1,n-1,1")
    head = setup.load_head()
    if setup.tree in (None, "auto"):
        tree = deep_tree(tree, head.args.drafts)
    made = drafter(head, tree, setup.coupled, setup.reach)
    made.folder = setup.folder
    return made


def deep_tree(usual: TreeShape, levels: int) -> TreeShape:
    """Return the default tree of a drafter whose levels cost next to nothing: the nodes of the usual tree,
    all levels, and on each as many expanded nodes as there could be, up to a dozen.
    """
    return TreeShape(usual.nodes, min(levels, usual.nodes - 1) - 1, min(usual.nodes - 1, 12))
