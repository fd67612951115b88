"""Drafting with a network, level by level, on the dynamic tree of EAGLE-2.

One catch-up pass reads the tokens that the last step committed and gives the first level. Each further level
is one pass over the nodes that are expanded. The network's caches hold the committed rows first and the
drafted rows after them, level by level; the next catch-up overwrites those.
"""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Drafter, newest, unread_rows
from head import Head
from kernels.backend import TorchBackend
from model import KVCaches
from tree import Growth, PathTree, Tree, TreeShape, pick


class NetworkDrafter(Drafter):
    """A drafter whose network grows a tree level by level.

    coupled: rank candidates by draft logits plus the very noise that the target will be sampled with, so that
    the network guesses which sample the target takes (Daliri, Musco, Suresh, arXiv 2408.07978). It never
    changes what is emitted; without noise (greedy) it changes nothing. vocabulary: size of the network's.
    drafts: levels of a tree that it can draft at most. Raises ValueError on a tree that is wider or deeper.
    """

    _names: Tensor | None = None  # target id of each of its own ids [Vd]; None: they are the same
    read_ahead = 0  # rows that its cache holds beyond those of the target's: 1 if it has read the root

    def __init__(
        self, shape: TreeShape | PathTree, vocabulary: int, coupled: bool = True, drafts: int | None = None
    ):
        super().__init__(shape)
        levels = shape.window - 1
        if shape.width > vocabulary:
            raise ValueError(f"tree: width {shape.width} exceeds the head's vocabulary of {vocabulary}")
        if drafts is not None and levels > drafts:
            raise ValueError(f"tree: {levels} levels below its root, the head drafts {drafts} tokens ahead")
        self.coupled = coupled
        self.deepest = None if drafts is None else drafts - 1  # depth of the deepest tree; None: unlimited

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        return state.backend.draft(self, state, slots, noise)

    def grow(
        self, last: Tensor, state, slots: Tensor, noise: Tensor | None, shape: TreeShape
    ) -> Growth:
        """All candidates below the root.

        last [B, 1, H]: the catch-up's last output. noise: draft noise [B, W, Vd] or None.
        """
        k, base, backend = shape.width, state.length + self.read_ahead, state.backend
        scores, tokens = self._best(backend, last, noise, 0, k)
        grown = Growth(shape, scores[:, 0], tokens[:, 0])
        feature = last.expand(-1, k, -1)
        row_slots, rows, drafted = base[:, None] + torch.arange(k, device=slots.device), k, 0
        for level in range(shape.depth):
            if state.prices is not None:
                rows = state.prices.rows(grown.beam_scores, k)
                if not rows:
                    break
                grown.narrow(rows)
                feature = feature[:, :rows]
            positions = (base + level)[:, None].expand(-1, rows)
            visible = backend.visible_slots(slots, base, grown.beam_sees)
            own_slots = row_slots[:, :rows] + drafted
            feature = self._rows(grown.beam_tokens, feature, positions, own_slots, visible)
            drafted += rows
            children = self._best(backend, feature, noise, level + 1, k)
            if level + 1 < shape.depth:
                feature = pick(feature, backend.extend(grown, *children, more=True))
            else:
                backend.extend(grown, *children, more=False)
        return grown

    def _best(
        self, backend: TorchBackend, h: Tensor, noise: Tensor | None, step: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """The k likeliest next tokens after rows h [B, R, H].

        Returns log-probabilities and target ids, both [B, R, k].
        """
        logits = self.network.logits(h)
        return backend.rank(logits, None if noise is None else noise[:, step, None], k, self._names)

    def draft_noise(self, noise: Tensor | None) -> Tensor | None:
        """The target's noise [B, W, V] at the network's ids [B, levels, Vd]; None if it is not to be used."""
        if noise is None or not self.coupled:
            return None
        noise = noise[:, : self.shape.window - 1]  # a joint tree may have more levels
        return noise if self._names is None else noise[..., self._names]

    def catch_up(self, state, slots: Tensor) -> Tensor:
        """Read what the last step committed. Returns the output [B, 1, H] for the first level."""
        raise NotImplementedError

    def _rows(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, own: Tensor, visible: Tensor
    ) -> Tensor:
        """One pass over drafted tokens [B, k] -> outputs [B, k, H].

        feature [B, k, H]: the output that each token was drafted from.
        """
        return self.network(tokens, feature, positions, own, visible, self.caches)


class HeadDrafter(NetworkDrafter):
    """A drafter whose network is a head of the target.

    Arguments and errors are those of `NetworkDrafter`.
    """

    grows = True

    def __init__(self, head: Head, shape: TreeShape | PathTree, coupled: bool = True):
        super().__init__(shape, head.args.draft_vocab_size, coupled, head.args.drafts)
        self.head, self.aux_layers = head, head.args.aux_layers

    def with_tree(self, shape: TreeShape) -> HeadDrafter:
        """Return a drafter of other trees with the same head and, if they are allocated, the same caches."""
        other = type(self)(self.head, shape, self.coupled)
        for name in ("method", "caches"):
            setattr(other, name, getattr(self, name))
        return other

    def new_caches(
        self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCaches | None:
        return self.head.caches(batch, slots, dtype, device)

    def read(self, state, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        if self.caches is None:
            return
        # Row i pairs feature i with token i+1 and stands at position i (only differences matter to RoPE).
        next_tokens = state.tokens.gather(1, positions + 1)
        features = self.head.fuse(self.own_features(features))
        self.head.read(next_tokens, features, positions, positions, visible, self.caches)

    def catch_up(self, state, slots: Tensor) -> Tensor:
        """Read up to W rows with the target's true features, the first n_new of them real.

        The caches' entries of the other rows are overwritten or never seen.
        """
        head, (positions, visible) = self.head, unread_rows(state, slots)
        next_tokens = state.tokens.gather(1, positions + 1)
        features = head.fuse(self.own_features(state.features[:, : positions.shape[1]]))
        h = head(next_tokens, features, positions, positions, visible, self.caches)
        return pick(h, newest(state, h.shape[1]))

    @property
    def _names(self) -> Tensor:
        return self.head.draft_ids
