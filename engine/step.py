"""The two passes of decoding: the step (`verify`, `commit`), and that over prompts (`read`, `begin`)."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import Drafter
from engine.state import State
from kernels.tp import Part, agreed, logits_of, own_logits
from model import KVCaches, Transformer
from sampling.adjust import adjust, allow, floor
from sampling.options import Modes
from tree import Tree, pick


def shape_logits(
    logits: Tensor | Part, state: State, modes: Modes, tokens: Tensor, ancestors: Tensor | None = None
) -> Tensor:
    """Apply penalties and biases to the target's logits [B, T, V], and mask with -inf the tokens outside the
    grammar and the request's restrictions.

    tokens [B, T], ancestors [B, T, T]: of the tree; without these, of its root alone. A `Part` of the logits
    stays unchanged: no mode then needs anything.
    """
    if modes.guided:
        logits = allow(logits, state.allowed[:, : tokens.shape[1]])
    if modes.adjusted:
        above = torch.ones_like(tokens[..., None], dtype=torch.bool) if ancestors is None else ancestors
        logits = adjust(logits, state, tokens, above)
    if modes.restricted:
        logits = state.backend.restrict(logits, state.temperature, state.top_k, state.top_p)
    return floor(logits, state.temperature, state.min_p) if modes.floored else logits


def noise_ahead(state: State, count: int, vocab_size: int) -> Tensor:
    """temperature * Gumbel noise [B, count, V] of the next `count` positions after the root's."""
    positions = state.length[:, None] + state.ahead[:count]
    return state.backend.gumbel(state.key, positions, state.temperature, vocab_size, state.noise)


class Verified(NamedTuple):
    """A tree that the target has read."""

    tree: Tree
    logits: Tensor  # [B, T, V], the target's at each node; see `kernels.tp.own_logits`
    features: Tensor | None  # [B, T, F]
    noise: Tensor | None  # [B, W, V]


def verify(
    target: Transformer, caches: KVCaches, drafter: Drafter, state: State, slots: Tensor, noisy: bool
) -> Verified:
    """Draft a tree, and let the target read it: the first half of a step of decoding.

    slots [n]: the live cache slots 0..n-1, n >= max(length) + the drafter's room. noisy: a request samples.
    Plain decoding has a tree of one node.
    """
    noise = noise_ahead(state, drafter.shape.window, target.args.vocab_size) if noisy else None
    tree = agreed(target, drafter.propose(state, slots, noise))
    own, features = state.backend.verify(target, tree, state, slots, caches, drafter.aux_layers)
    return Verified(tree, own, features, noise)


def commit(
    target: Transformer, caches: KVCaches, drafter: Drafter, state: State, verified: Verified,
    *modes: bool,
) -> tuple[Tree, Tensor]:
    """Draw tokens; accept, keep and emit a path: the second half of a step.

    modes: those of `sampling.options.Modes`. With a grammar, the host has filled `state.allowed` in between.
    Emitted tokens are in `state.out`. Returns, for traces, the tree and the path [B, W] taken through it,
    root first.
    """
    backend, modes, window = state.backend, Modes(*modes), drafter.shape.window
    tree, own, features, noise = verified
    raw = logits_of(target, own, modes.rare)
    logits = shape_logits(raw, state, modes, tree.tokens, tree.ancestors)
    drafter.observe(state, logits)
    chosen = backend.draw(logits, noise, tree.depth)
    path, count, tokens = backend.accept(tree, chosen, window)
    if modes.scored:
        state.score(pick(raw, path), tokens)
    # The root, the only node of plain decoding, is where it belongs already.
    moved = caches if tree.tokens.shape[1] > 1 else None
    count = backend.commit(state, tokens, count, path, features, moved, more=not drafter.reads)
    if modes.adjusted:
        state.count(tokens, count)
    return tree, path


def read(
    target: Transformer, caches: KVCaches, drafter: Drafter, state: State, slots: Tensor, start: Tensor,
    chunk: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Read one chunk of every prompt: positions start [B] + chunk [C].

    Rows after a prompt's end compute nothing anyone sees: their slots are overwritten before they become
    visible. Returns the last states [B, C, H], and the features [B, C, F].
    """
    positions = start[:, None] + chunk
    visible = state.backend.visible_before(slots, start, chunk.shape[0])
    x, features = target(
        state.tokens.gather(1, positions), positions, positions, visible, caches, drafter.aux_layers
    )
    drafter.read(state, features, positions, visible)
    return x, features


def begin(
    target: Transformer, state: State, start: Tensor, x: Tensor, features: Tensor | None, modes: Modes
) -> None:
    """Give prompts that end in a chunk at start [B] their first token. x, features: what `read` returned.

    Until then the prompt's last token counts as the root (`length` is the prompt's length - 1).
    """
    backend, last = state.backend, state.length - start
    ends = state.reading & (last < x.shape[1])
    row = last.clamp(0, x.shape[1] - 1)[:, None]
    noise = noise_ahead(state, 1, target.args.vocab_size) if modes.noisy else None
    raw = logits_of(target, own_logits(target, pick(x, row)), modes.rare)
    chosen = backend.draw(shape_logits(raw, state, modes, state.root), noise)
    state.reading.logical_and_(~ends)
    if modes.scored:
        state.score(raw, chosen)
    count = backend.commit(state, chosen, ends.long(), row, features, where=ends)
    if modes.adjusted:
        state.count(chosen, count)
