"""Backends: who computes the parts of a step. `kernels.choose` picks one.

`TorchBackend` is complete: it calls the definition of every part, which stands here, in `tree`, or in
`sampling`. `kernels.cpu.CpuBackend` and `kernels.gpu.backend.CudaBackend` replace what they have kernels for.
All give the same results, except for the last bits of noise and log-probabilities, and of a target's pass.

A model is prepared for a backend, which puts the modules in place that run there (`model.backend`). A step
runs on the backend of its target (`backend_of`), whatever the network of its drafter was prepared for.
"""
from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import sampling.adjust
import sampling.noise
import tree
from kernels.float8 import Float8Caches
from kernels.tp import Part, own_logits
from model import KVCaches, last_seen
from tree import Growth, Prices, Tree


class Sight(NamedTuple):
    """Which cache slots each row of a pass attends to: the arguments of `tree.visible_slots`.

    The pass's own rows stand in the last T of the M slots that `local` [B, T, M] describes. first [B, T]: the
    first of the committed slots that each row sees; None: it sees all.
    """

    slots: Tensor
    length: Tensor
    local: Tensor
    first: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the mask [B, T, n] bool."""
        visible = tree.visible_slots(self.slots, self.length, self.local)
        return visible if self.first is None else visible & (self.slots >= self.first[..., None])

    def within(self, window: int) -> Sight:
        """Return what is left of it in layers with a window, see `model.last_seen`."""
        first = self.length[:, None] + self.local.sum(-1) - window
        return self._replace(local=once(last_seen(self.local, window)), first=once(first))


def once(x: Tensor) -> Tensor:
    """Return x, computed once for all our kernels that read it.

    It begins where its memory does, as results do. Without this, torch.compile recomputes an angle or a mask
    for each kernel that reads it, in every layer.
    """
    return x.as_strided(x.shape, x.stride())


class TorchBackend:
    """Every part of a step by its definition, in PyTorch.

    name: in records. row_invariant: a row's numbers do not depend on the rows computed with it, so that
    speculative text equals plain text in 16 bits too, and a step needs no torch.compile. reads_length:
    attention reads the lengths of the texts on the device, so that one graph serves every context. caches:
    the classes of a model's caches, by the names of `--kv`. quantised_at_load: by dtype,
    the mode that makes heads faster here.
    """

    name = "torch"
    row_invariant = reads_length = False
    caches = {"auto": KVCaches, "fp8": Float8Caches}
    quantised_at_load: dict[torch.dtype, str] = {}

    def __deepcopy__(self, memo: dict) -> TorchBackend:
        return self  # copies of a model run on the same backend

    def prepare(self, *models: nn.Module) -> bool:
        """Put the modules of models that run here in place.

        They may share modules, as a head shares its target's lm_head. Returns whether every layer of the
        targets among them runs here; other layers stay unchanged.
        """
        for model in models:
            model.backend = self
        return True

    def threads(self) -> contextlib.AbstractContextManager:
        """Return a context to run passes in, with the threads that they need."""
        return contextlib.nullcontext()

    # -- what a pass sees ---------------------------------------------------------------------

    def visible_slots(self, slots: Tensor, length: Tensor, local: Tensor) -> Tensor | Sight:
        """Return `tree.visible_slots`, or a `Sight` where attention reads that."""
        return tree.visible_slots(slots, length, local)

    def visible_before(self, slots: Tensor, start: Tensor, count: int) -> Tensor | Sight:
        """`visible_slots` of `count` rows at slots start [B] ... that each see themselves and all before."""
        rows = torch.arange(count, device=slots.device)
        return slots <= (start[:, None] + rows)[..., None]

    # -- drafting -----------------------------------------------------------------------------

    def unread_rows(self, state) -> int:
        """Return how many rows a catch-up reads: W, so that its shape does not depend on values."""
        return state.window

    def rank(
        self, logits: Tensor, noise: Tensor | None, k: int, names: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the k best ids by logits [B, R, V], plus noise [B, R or 1, V] if there is any, best first.

        Their log-probabilities under the shifted logits and their ids are both [B, R, k]. names [V]: what
        stands for an id, if not it itself.
        """
        if noise is not None:
            logits = logits + noise
        top, ids = logits.topk(k, dim=-1)
        return top - logits.logsumexp(-1, keepdim=True), ids if names is None else names[ids]

    def advance(self, growth: Growth) -> Tensor:
        """Make the best children the beam, as `Growth.advance`."""
        return growth.advance()

    def extend(self, growth: Growth, scores: Tensor, tokens: Tensor, more: bool) -> Tensor | None:
        """Record the beam's children, as `Growth.extend`, and, if there are `more` levels, `advance`."""
        growth.extend(scores, tokens)
        return self.advance(growth) if more else None

    def draft(self, drafter, state, slots: Tensor, noise: Tensor | None) -> Tree:
        """Draft the tree of a `drafters.network.NetworkDrafter`; arguments as for its `propose`."""
        last = drafter.catch_up(state, slots)
        grown = drafter.grow(last, state, slots, drafter.draft_noise(noise), drafter.shape)
        if state.prices is not None:  # a graph must change nothing but tensors
            state.levels = len(grown.scores) - 1
        return self.prune(grown, state.root[:, 0], state.prices)

    def prune(self, growth: Growth, root: Tensor, prices: Prices | None = None) -> Tree:
        """Keep the best candidates below root [B], as `Growth.prune`."""
        return growth.prune(root, prices)

    def join(self, one: Tree, other: Tree, nodes: int, levels: int, prices: Prices | None = None) -> Tree:
        """Join two trees, as `tree.join`."""
        return tree.join(one, other, nodes, levels, prices)

    def follow(self, matcher, tokens: Tensor, length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return what followed earlier matches, as `drafters.ngram.NGram.follow`."""
        return matcher.follow(tokens, length, count)

    # -- verifying ----------------------------------------------------------------------------

    def verify(
        self, target: nn.Module, drafted: Tree, state, slots: Tensor, caches: KVCaches,
        aux_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Run the target on the nodes of a tree.

        Returns their logits, see `kernels.tp.own_logits`, and features, see `Transformer.forward`.
        """
        own = state.length[:, None] + torch.arange(drafted.tokens.shape[1], device=slots.device)
        positions = state.length[:, None] + drafted.depth
        visible = self.visible_slots(slots, state.length, drafted.ancestors)
        x, features = target(drafted.tokens, positions, own, visible, caches, aux_layers)
        return own_logits(target, x), features

    # -- drawing ------------------------------------------------------------------------------

    def gumbel(
        self, key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int, latest: list | None = None
    ) -> Tensor:
        """Return temperature [B] times `sampling.noise.gumbel` [B, W, V] of key [B, 2], positions [B, W]."""
        return temperature[:, None, None] * sampling.noise.gumbel(key, positions, vocabulary)

    def restrict(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """Apply top-k and top-p to logits [B, T, V], as `sampling.adjust.restrict`."""
        return sampling.adjust.restrict(logits, temperature, top_k, top_p)

    def draw(self, logits: Tensor | Part, noise: Tensor | None, depth: Tensor | None = None) -> Tensor:
        """Return the target's token at every row [B, T]: argmax of logits [B, T, V] plus noise [B, W, V].

        depth [B, T]: the row of the noise for each row, as nodes of one depth stand at one position and share
        its noise. None: all take the first. With a `Part` each rank draws among its own tokens, and the best
        draw is taken: the logits stay where they are.
        """
        if not isinstance(logits, Part):
            return self.largest(logits, noise, depth)
        own, first, ranks = logits
        noise = None if noise is None else noise[..., first : first + own.shape[-1]].contiguous()
        drawn = self.largest(own, noise, depth)
        value = own.gather(-1, drawn[..., None])[..., 0]
        if noise is not None:
            rows = noise[:, :1].expand(-1, drawn.shape[1], -1) if depth is None else tree.pick(noise, depth)
            value = value + rows.gather(-1, drawn[..., None])[..., 0]
        return ranks.best(value, drawn + first)

    def largest(self, logits: Tensor, noise: Tensor | None, depth: Tensor | None) -> Tensor:
        """Return the first largest of each row, as `draw` of logits that are whole."""
        if noise is not None:
            logits = logits + (noise[:, :1] if depth is None else tree.pick(noise, depth))
        return logits.argmax(-1)

    # -- committing ---------------------------------------------------------------------------

    def accept(self, drafted: Tree, chosen: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the accepted path and its length, as `tree.accept`, and what was chosen on it [B, W]."""
        path, count = tree.accept(drafted, chosen, window)
        return path, count, chosen.gather(1, path)

    def commit(
        self, state, tokens: Tensor, count: Tensor, path: Tensor, features: Tensor | None,
        caches: KVCaches | None = None, *, where: Tensor | None = None, more: bool = False,
    ) -> Tensor:
        """Emit the first `count` [B] of tokens [B, W], and hand the rows `path` [B, W] of a pass over.

        caches: of the target; the path is moved to the places of committed tokens. None: it is there.
        where: None: the sequences that are not done. See `emit`, whose result this returns, and `hand_over`.
        """
        where = ~state.done if where is None else where
        if caches is not None:
            goal = state.length[:, None] + torch.arange(path.shape[1], device=path.device)
            caches.move(state.length[:, None] + path, goal)
        count = self.emit(state, tokens, count)
        self.hand_over(state, features, path, count, where=where, more=more)
        return count

    def emit(self, state, tokens: Tensor, count: Tensor) -> Tensor:
        """Append the first `count` [B] of tokens [B, W] to a state, cut at the first stop id and at the
        limit.

        The last one appended is the new root: moves `length` there; sets `root`, `done` and `out`. Returns
        how many were appended [B].
        """
        W, drafted = tokens.shape[1], count - 1
        at = torch.arange(W, device=tokens.device)
        count = torch.where(state.done, 0, torch.minimum(count, state.limit - state.length))
        stops = (tokens[..., None] == state.stop_ids).any(-1) & (at < count[:, None])
        first = torch.where(stops, at, W).amin(-1)
        count = torch.minimum(count, first + 1)
        where = state.length[:, None] + 1 + at
        appended = torch.where(at < count[:, None], tokens, state.tokens.gather(1, where))
        state.tokens.scatter_(1, where, appended)
        state.length.add_(count)
        state.root.copy_(state.tokens.gather(1, state.length[:, None]))
        state.done.logical_or_((first < W) | (state.length >= state.limit))
        counts = torch.stack((count, torch.minimum(drafted, count).clamp(min=0), state.done.long()), 1)
        state.out.copy_(torch.cat((tokens, torch.zeros_like(state.out[:, W + 3 :]), counts), 1))
        return count

    def hand_over(
        self, state, features: Tensor | None, path: Tensor, count: Tensor, *, where: Tensor,
        more: bool = False,
    ) -> None:
        """Leave the `count` [B] tokens just committed for the drafter to read.

        features [B, T, F]: the target's features of a pass; path [B, <=W]: the rows of it that the tokens
        were. where [B]: the sequences to change. more: append to the tokens that it has not read yet.
        """
        if features is not None:
            features = tree.pick(features, path)
            at = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
            if more:
                at = (at + state.n_new[:, None]).clamp(max=state.features.shape[1] - 1)
            at = at[..., None].expand_as(features)
            old = state.features.gather(1, at)
            state.features.scatter_(1, at, torch.where(where[:, None, None], features, old))
        unread = state.n_new + count if more else count
        state.n_new.copy_(torch.where(where, unread, state.n_new))


TORCH = TorchBackend()


def backend_of(target: nn.Module) -> TorchBackend:
    """Return the backend for steps of a target: what it was prepared for, if that computes all its layers."""
    return target.backend if target.whole else TORCH
