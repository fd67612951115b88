"""The two passes of decoding: the step (draft, verify, accept, commit), and reading a chunk of prompts."""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import Drafter
from engine.state import State
from kernels.tp import Part, agreed, logits_of
from model import KVCaches, Transformer
from sampling.acceptance import accept_residual
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
        logits = adjust(logits, state.adjustments, tokens, above)
    if modes.restricted:
        logits = state.backend.restrict(logits, state.temperature, state.top_k, state.top_p)
    return floor(logits, state.temperature, state.min_p) if modes.floored else logits


def needs_all(modes: Modes) -> bool:
    """Return whether a step needs the logits of all tokens, and not only the best with its noise."""
    return any(modes[1:])


def noise_ahead(state: State, count: int, vocab_size: int) -> Tensor:
    """temperature * Gumbel noise [B, count, V] of the next `count` positions after the root's."""
    positions = state.length[:, None] + 1 + torch.arange(count, device=state.length.device)
    return state.backend.gumbel(state.key, positions, state.temperature, vocab_size)


class Verified(NamedTuple):
    """A tree that the target has read."""

    tree: Tree
    distribution: Tensor | None  # see `drafters.base.Proposal`
    logits: Tensor | Part  # [B, T, V], the target's at each node
    features: Tensor | None  # [B, T, F]
    noise: Tensor | None  # [B, W, V]


def step(
    target: Transformer, caches: KVCaches, drafter: Drafter, state: State, slots: Tensor, *modes: bool,
) -> tuple[Tree, Tensor]:
    """Draft, verify, accept, commit: the whole of decoding, one graph.

    slots [n]: the live cache slots 0..n-1, n >= max(length) + the drafter's room. modes: those of
    `sampling.options.Modes`. Plain decoding is this step with a tree of one node. Emitted tokens are in
    `state.out`. Returns, for traces, the tree and the path [B, W] taken through it, root first.
    """
    verified = verify(target, caches, drafter, state, slots, *modes)
    return commit(target, caches, drafter, state, verified, *modes)


def verify(
    target: Transformer, caches: KVCaches, drafter: Drafter, state: State, slots: Tensor, *modes: bool,
) -> Verified:
    """Run the first half of `step`: draft a tree, and let the target read it."""
    modes, window = Modes(*modes), drafter.shape.window
    noise = noise_ahead(state, window, target.args.vocab_size) if modes.noisy else None
    tree, distribution, extra = drafter.propose(state, slots, noise)
    tree, distribution = agreed(target, tree, distribution)

    T, nodes = drafter.shape.nodes, (tree.tokens, tree.depth, tree.ancestors)
    if extra is not None:
        tokens, depth, sees = nodes
        nodes = (
            torch.cat((tokens, extra.tokens), 1), torch.cat((depth, extra.depth), 1),
            torch.cat((F.pad(sees, (0, extra.tokens.shape[1])), extra.sees), 1),
        )
    x, features = state.backend.verify(target, nodes, state, slots, caches, drafter.aux_layers)
    if extra is not None:
        extra.learn(target.logits(x[:, -extra.heard :]).argmax(-1))
        x, features = x[:, :T], None if features is None else features[:, :T]
    whole = needs_all(modes) or (modes.noisy and drafter.rule != "equal")
    return Verified(tree, distribution, logits_of(target, x, whole), features, noise)


def commit(
    target: Transformer, caches: KVCaches, drafter: Drafter, state: State, verified: Verified,
    *modes: bool,
) -> tuple[Tree, Tensor]:
    """Run the second half of `step`: draw tokens; accept, keep and emit a path.

    With a grammar, the host has filled `state.allowed` in between.
    """
    backend, modes, window = state.backend, Modes(*modes), drafter.shape.window
    tree, distribution, raw, features, noise = verified
    logits = shape_logits(raw, state, modes, tree.tokens, tree.ancestors)
    chosen = backend.draw(logits, noise, tree.depth)

    if modes.noisy and drafter.rule != "equal":
        noise = pick(noise, tree.depth)
        path, count, tokens = accept_residual(tree, distribution, logits, noise, chosen, state)
    else:
        path, count, tokens = backend.accept(tree, chosen, window)
    if modes.scored:
        state.score(pick(raw, path), tokens)
    # The root, the only node of plain decoding, is where it belongs already.
    moved = caches if tree.tokens.shape[1] > 1 else None
    count = backend.commit(state, tokens, count, path, features, moved, more=not drafter.reads)
    if modes.adjusted:
        state.count(tokens, count)
    return tree, path


def prefill(
    target: Transformer, caches: KVCaches, drafter: Drafter, state: State, slots: Tensor, start: Tensor,
    chunk: Tensor, *modes: bool,
) -> Tensor:
    """Read one chunk of every prompt: positions start [B] + chunk [C].

    A prompt that ends in it gets its first token. modes: those of `sampling.options.Modes`.
    Until then the prompt's last token counts as the root (`length` is the prompt's length - 1). Rows after a
    prompt's end compute nothing anyone sees: their slots are overwritten before they become visible. Returns
    the last states [B, C, H].
    """
    backend, modes, positions = state.backend, Modes(*modes), start[:, None] + chunk
    visible = backend.visible_before(slots, start, chunk.shape[0])
    x, features = target(
        state.tokens.gather(1, positions), positions, positions, visible, caches, drafter.aux_layers
    )
    drafter.read(state, features, positions, visible)

    last = state.length - start
    ends = state.reading & (last < chunk.shape[0])
    row = last.clamp(0, chunk.shape[0] - 1)[:, None]
    noise = noise_ahead(state, 1, target.args.vocab_size) if modes.noisy else None
    raw = logits_of(target, pick(x, row), needs_all(modes))
    chosen = backend.draw(shape_logits(raw, state, modes, state.root()[:, None]), noise)
    state.reading.logical_and_(~ends)
    if modes.scored:
        state.score(raw, chosen)
    count = backend.commit(state, chosen, ends.long(), row, features, where=ends)
    if modes.adjusted:
        state.count(chosen, count)
    return x
