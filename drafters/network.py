"""Drafting with a network, level by level, on the dynamic tree of EAGLE-2.

One catch-up pass reads the tokens that the last step committed and gives the first level. Each further level
is one pass over the nodes that are expanded. The network's caches hold the committed rows first and the
drafted rows after them, level by level; the next catch-up overwrites those.
"""
from __future__ import annotations

import torch
from torch import Tensor

from drafters.base import Drafter, Proposal
from drafters.kept import EveryToken, kept
from kernels.backend import TorchBackend
from networks.head import Head
from tree import Growth, PathTree, TreeShape, pick


def grow_crossed(
    backend: TorchBackend, logits: Tensor, noise: Tensor | None, names: Tensor | None, shape: TreeShape,
    trust: Tensor | None = None,
) -> Growth:
    """Grow a tree of independent levels: every node of a level has the same children.

    Best first by the sum of log-probabilities, over nodes among the k best of their level (DDTree, arXiv
    2604.12989, where k is the number of nodes). logits [B, L, Vd] of L levels; noise [B, >=L, Vd] or None;
    names [Vd]: the target id of each draft id, if it is another. trust [B, L]: added to the scores of a
    level.
    """
    k, levels = shape.width, logits.shape[1]
    scores, tokens = backend.rank(logits, None if noise is None else noise[:, :levels], k, names)
    if trust is not None:
        scores = scores + trust[..., None]
    grown = Growth(shape, scores[:, 0], tokens[:, 0])
    for level in range(1, levels):
        if level > 1:
            backend.advance(grown)
        grown.extend(*(x[:, level, None].expand(-1, k, -1) for x in (scores, tokens)))
    return grown


class NetworkDrafter(Drafter):
    """A drafter whose network grows a tree level by level.

    coupled: rank candidates by draft logits plus the very noise that the target will be sampled with, so that
    the network guesses which sample the target takes (Daliri, Musco, Suresh, arXiv 2408.07978). It never
    changes what is emitted; without noise (greedy) it changes nothing. vocabulary: how many ids the network
    knows. Raises ValueError if the tree is wider than the vocabulary.
    """

    read_ahead = 0  # rows that its cache holds beyond those of the target's: 1 if it has read the root

    def __init__(self, shape: TreeShape | PathTree, vocabulary: int, coupled: bool = True):
        super().__init__(shape)
        if shape.width > vocabulary:
            raise ValueError(f"tree: width {shape.width} exceeds the head's vocabulary of {vocabulary}")
        self.coupled, self.passes, self.kept = coupled, shape.window - 1, EveryToken()

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        return Proposal(state.backend.draft(self, state, slots, noise))

    def grow(
        self, last: Tensor, state, slots: Tensor, noise: Tensor | None, shape: TreeShape,
        level_logits: list[Tensor] | None = None,
    ) -> Growth:
        """All candidates below the root.

        last [B, 1, H]: the catch-up's last output. noise: draft noise [B, W, Vd] or None.
        level_logits: takes the logits [B, R, Vd] of every level.
        """
        k, base, slots = shape.width, state.length + self.read_ahead, self.kept.live(slots)
        own = self.kept.first(base)
        backend = state.backend
        scores, tokens = self._best(backend, last, noise, 0, k, level_logits)
        grown = Growth(shape, scores[:, 0], tokens[:, 0])
        feature = last.expand(-1, k, -1)
        row_slots = own[:, None] + torch.arange(k, device=slots.device)
        for level in range(shape.depth):
            if level:
                feature = pick(feature, backend.advance(grown))
            positions = (base + level)[:, None].expand(-1, k)
            visible = backend.visible_slots(slots, own, grown.beam_sees)
            feature = self._rows(grown.beam_tokens, feature, positions, row_slots + level * k, visible)
            grown.extend(*self._best(backend, feature, noise, level + 1, k, level_logits))
        return grown

    @property
    def deepest(self) -> int | None:
        """Depth of the deepest tree that it can grow; None: unlimited."""
        return None

    def _best(
        self, backend: TorchBackend, h: Tensor, noise: Tensor | None, step: int, k: int,
        level_logits: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The k likeliest next tokens after rows h [B, R, H].

        Returns log-probabilities and target ids, both [B, R, k].
        """
        logits = self._logits(h)
        if level_logits is not None:
            level_logits.append(logits)
        return backend.rank(logits, None if noise is None else noise[:, step, None], k, self._names)

    def draft_noise(self, noise: Tensor | None) -> Tensor | None:
        """The target's noise [B, W, V] at the network's ids [B, W, Vd]; None if it is not to be used."""
        return noise if self.coupled else None

    @property
    def _names(self) -> Tensor | None:
        """The target id of each of the network's own ids [Vd]; None if they are the same."""
        return None

    def catch_up(self, state, slots: Tensor) -> Tensor:
        """Read what the last step committed. Returns the output [B, 1, H] for the first level."""
        raise NotImplementedError

    def _rows(
        self, tokens: Tensor, feature: Tensor, positions: Tensor, own: Tensor, visible: Tensor
    ) -> Tensor:
        """One pass over drafted tokens [B, k] -> outputs [B, k, H].

        feature [B, k, H]: the output that each token was drafted from.
        """
        raise NotImplementedError

    def _logits(self, h: Tensor) -> Tensor:
        """Outputs [B, R, H] -> float32 logits [B, R, Vd]."""
        raise NotImplementedError


class HeadDrafter(NetworkDrafter):
    """A drafter whose network is a head of the target.

    reach: last tokens that the head attends to, beside those of the pass; 0: all. Other arguments and errors:
    `NetworkDrafter`.
    """

    def __init__(self, head: Head, shape: TreeShape | PathTree, coupled: bool = True, reach: int = 0):
        super().__init__(shape, head.args.draft_vocab_size, coupled)
        self.kept = kept(reach)
        self.head = head
        self.aux_layers = head.args.aux_layers
        self.cached = (head.args,)

    def with_tree(self, shape: TreeShape) -> HeadDrafter:
        """Return a drafter of other trees with the same head and, if they are allocated, the same caches."""
        other = type(self)(self.head, shape, self.coupled, self.kept.reach)
        other.rule, other.folder, other.method = self.rule, self.folder, self.method
        if self.caches is not None:
            other.caches, other.kept = self.caches, self.kept
        return other

    @property
    def network(self) -> Head:
        return self.head

    def allocate(
        self, batch: int, slots: int, room: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().allocate(batch, slots, room, dtype, device)
        self.kept.allocate(room, device)
        self.caches = self.head.caches(batch, self.kept.count(slots, room), dtype, device)

    def memory(self, batch: int, slots: int, room: int, dtype: torch.dtype) -> int:
        return super().memory(batch, self.kept.count(slots, room), room, dtype)

    def reusable(self, same: int, held: int, length: int) -> int:
        return self.kept.reusable(same, held, length)

    def read(self, state, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        own, visible = self.kept.rows(state.backend, positions, visible)
        self._read(state, features, positions, own, visible)
        if self.kept.reach:
            start, rows = positions[:, 0], positions.shape[1]
            # The last unread token is read once more, by the next catch-up.
            end = state.length - state.n_new.clamp(max=1)
            self.kept.keep(self.caches, start, rows, (end - start).clamp(0, rows))

    def _read(self, state, features: Tensor, positions: Tensor, own: Tensor, visible: Tensor) -> None:
        """Do the work of `read`, into slots `own` [B, C]."""
        raise NotImplementedError

    def _keep_unread(self, state) -> None:
        """Keep the rows of a catch-up over W unread tokens, except of sequences that are held still."""
        if self.kept.reach:
            known = torch.where(state.done, 0, state.n_new.clamp(max=state.window))
            self.kept.keep(self.caches, state.length - state.n_new, state.window, known)

    @property
    def _names(self) -> Tensor:
        return self.head.draft_ids

    def draft_noise(self, noise: Tensor | None) -> Tensor | None:
        if noise is None or not self.coupled:
            return None
        return noise[:, : self.shape.window - 1, self.head.draft_ids]  # a joint tree may have more levels
