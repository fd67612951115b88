"""Drafting with a network, level by level, on the dynamic tree of EAGLE-2.

One catch-up pass reads the tokens that the last step committed and gives the first level. Each further level
is one pass over the nodes that are expanded. The network's caches hold the committed rows first and the
drafted rows after them, level by level; the next catch-up overwrites those.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from drafters.base import Drafter, Proposal, constants, newest, unread_rows
from kernels.backend import TorchBackend
from model import KVCaches
from networks.head import Head
from tree import Growth, PathTree, TreeShape, pick

MOST = 64  # rows that are moved in one call, whose entries a GPU holds in registers


class KeptTokens(nn.Module):
    """The tokens whose keys and values a head keeps: the last `reach` of a text, or, with 0, all.

    With all of a text, token i is in slot i. With the last N, i is in slot i mod N of a ring until i + N
    takes its place; a pass's own rows stand behind the ring. The papers' heads are trained on 2,048 tokens,
    and a head that attends to all of a long text reads more in every draft pass than the pass has weights.

    So all slots before `first` are committed ones, as in a cache of the whole text, and attention needs no
    other mask than there. Their order is another, which attention does not mind: keys are rotated by their
    places in the text before they are stored, and only the distance of a query counts (RoPE). No distance is
    above N and the rows of a pass, so positions need no renumbering.
    """

    def __init__(self, reach: int = 0):
        super().__init__()
        self.reach = reach
        self.allocate(0, "cpu")

    def allocate(self, room: int, device: torch.device | str) -> None:
        """Make what is needed on this device. room: rows that a pass may have after the committed ones."""
        if self.reach:
            constants(self, slots=torch.arange(self.count(0, room), device=device))

    def count(self, slots: int, room: int) -> int:
        """Return the number of slots of the head's caches, where the target's have `slots`."""
        # The last one is moved onto itself, by rows that are not kept.
        return self.reach + room + 1 if self.reach else slots

    def live(self, slots: Tensor) -> Tensor:
        """Return the slots that a pass attends to [n], where it would attend to these."""
        if not self.reach:
            return slots
        # Compiled, the number of slots would be another function of that dimension.
        return self.slots if torch.compiler.is_compiling() else self.slots[: slots.shape[0]]

    def first(self, length: Tensor) -> Tensor:
        """Return the slot after the committed rows of these lengths [B]: a pass's own begin there."""
        return length.clamp(max=self.reach) if self.reach else length

    def rows(self, backend: TorchBackend, positions: Tensor, visible):
        """Return the slots of rows that follow each other in the text at positions [B, T], and what they
        see."""
        if not self.reach:
            return positions, visible
        first, count = self.first(positions[:, 0]), positions.shape[1]
        own = first[:, None] + torch.arange(count, device=positions.device)
        return own, backend.visible_before(self.slots, first, count)

    def keep(self, caches: KVCaches, start: Tensor, rows: int, known: Tensor) -> None:
        """Keep the first `known` [B] of the `rows` rows that a pass has written from `first(start)` on.

        start [B]: how many were committed before.
        """
        row, known, spare = torch.arange(rows, device=start.device), known[:, None], len(self.slots) - 1
        # If there are more rows than slots in the ring, keep the last ones: no row is overwritten by another.
        kept = (row < known) & (row >= known - self.reach)
        source = torch.where(kept, self.first(start)[:, None] + row, spare)
        target = torch.where(kept, (start[:, None] + row) % self.reach, spare)
        for some, there in zip(source.split(MOST, 1), target.split(MOST, 1)):
            caches.move(some, there)


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
        self, shape: TreeShape | PathTree, vocabulary: int, coupled: bool = True, reach: int = 0,
        drafts: int | None = None,
    ):
        super().__init__(shape)
        levels = shape.window - 1
        if shape.width > vocabulary:
            raise ValueError(f"tree: width {shape.width} exceeds the head's vocabulary of {vocabulary}")
        if drafts is not None and levels > drafts:
            raise ValueError(f"tree: {levels} levels below its root, the head drafts {drafts} tokens ahead")
        self.coupled, self.kept = coupled, KeptTokens(reach)
        self.deepest = None if drafts is None else drafts - 1  # depth of the deepest tree; None: unlimited

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
        row_slots, rows, drafted = own[:, None] + torch.arange(k, device=slots.device), k, 0
        for level in range(shape.depth):
            if state.prices is not None:
                rows = state.prices.rows(grown.beam_scores, k)
                if not rows:
                    break
                grown.narrow(rows)
                feature = feature[:, :rows]
            positions = (base + level)[:, None].expand(-1, rows)
            visible = backend.visible_slots(slots, own, grown.beam_sees)
            own_slots = row_slots[:, :rows] + drafted
            feature = self._rows(grown.beam_tokens, feature, positions, own_slots, visible)
            drafted += rows
            children = self._best(backend, feature, noise, level + 1, k, level_logits)
            if level + 1 < shape.depth:
                feature = pick(feature, backend.extend(grown, *children, more=True))
            else:
                backend.extend(grown, *children, more=False)
        return grown

    def _best(
        self, backend: TorchBackend, h: Tensor, noise: Tensor | None, step: int, k: int,
        level_logits: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The k likeliest next tokens after rows h [B, R, H].

        Returns log-probabilities and target ids, both [B, R, k].
        """
        logits = self.network.logits(h)
        if level_logits is not None:
            level_logits.append(logits)
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

    reach: last tokens that the head attends to, beside those of the pass; 0: all. Other arguments and errors:
    `NetworkDrafter`.
    """

    grows = True

    def __init__(self, head: Head, shape: TreeShape | PathTree, coupled: bool = True, reach: int = 0):
        super().__init__(shape, head.args.draft_vocab_size, coupled, reach, head.args.drafts)
        self.head, self.aux_layers = head, head.args.aux_layers

    def with_tree(self, shape: TreeShape) -> HeadDrafter:
        """Return a drafter of other trees with the same head and, if they are allocated, the same caches."""
        other = type(self)(self.head, shape, self.coupled)
        for name in ("rule", "method", "kept", "caches"):
            setattr(other, name, getattr(self, name))
        return other

    def allocate(
        self, batch: int, slots: int, room: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().allocate(batch, slots, room, dtype, device)
        self.kept.allocate(room, device)

    def new_caches(
        self, batch: int, slots: int, room: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCaches | None:
        return self.head.caches(batch, self.kept.count(slots, room), dtype, device)

    def reusable(self, same: int, held: int, length: int) -> int:
        # In a ring a longer text has written over what stood before the end of the shorter one. What the new
        # text's prompt reaches is written again.
        reach = self.kept.reach
        return max(0, same - reach) if reach and held > max(reach, length) else same

    def read(self, state, features: Tensor, positions: Tensor, visible: Tensor) -> None:
        if self.caches is None:
            return
        # Row i pairs feature i with token i+1 and stands at position i (only differences matter to RoPE).
        next_tokens = state.tokens.gather(1, positions + 1)
        features = self.head.fuse(self.own_features(features))
        own, visible = self.kept.rows(state.backend, positions, visible)
        self.head.read(next_tokens, features, positions, own, visible, self.caches)
        if self.kept.reach:
            start, rows = positions[:, 0], positions.shape[1]
            # The last unread token is read once more, by the next catch-up.
            end = state.length - state.n_new.clamp(max=1)
            self.kept.keep(self.caches, start, rows, (end - start).clamp(0, rows))

    def catch_up(self, state, slots: Tensor) -> Tensor:
        """Read up to W rows with the target's true features, the first n_new of them real.

        The caches' entries of the other rows are overwritten or never seen.
        """
        head, (positions, visible) = self.head, unread_rows(state, slots)
        next_tokens = state.tokens.gather(1, positions + 1)
        own, visible = self.kept.rows(state.backend, positions, visible)
        features = head.fuse(self.own_features(state.features[:, : positions.shape[1]]))
        h = head(next_tokens, features, positions, own, visible, self.caches)
        self._keep_unread(state)
        return pick(h, newest(state, h.shape[1]))

    def _keep_unread(self, state) -> None:
        """Keep the rows of a catch-up over W unread tokens, except of sequences that are held still."""
        if self.kept.reach:
            known = torch.where(state.done, 0, state.n_new.clamp(max=state.window))
            self.kept.keep(self.caches, state.length - state.n_new, state.window, known)

    @property
    def _names(self) -> Tensor:
        return self.head.draft_ids
