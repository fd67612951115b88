"""The parts of a step beside the networks.

Each is one operator if the target at work is on the CPU kernels, else its definition in `tree`, `sampling` or
here.

Both ways give the same, but for the last bits of noise and of the draft's log-probabilities.
"""
from __future__ import annotations

import torch
from torch import Tensor

import sampling.noise
import sampling.restrict
import tree
from kernels import cpu
from tree import Growth, Tree


def visible_slots(slots: Tensor, length: Tensor, local: Tensor) -> Tensor:
    """`tree.visible_slots`."""
    if cpu.is_alone():
        return cpu.see(length, local, slots.shape[0])
    return tree.visible_slots(slots, length, local)


def gumbel(key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int) -> Tensor:
    """temperature [B] times `sampling.noise.gumbel` [B, W, V]."""
    if cpu.is_alone():
        return cpu.gumbel(key, positions, temperature, vocabulary)
    return temperature[:, None, None] * sampling.noise.gumbel(key, positions, vocabulary)


def restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`sampling.restrict.restrict`."""
    function = cpu.restrict if cpu.is_alone() else sampling.restrict.restrict
    return function(logits, temperature, top_k, top_p)


def draw(logits: Tensor, noise: Tensor | None, depth: Tensor | None = None) -> Tensor:
    """The target's token at every row [B, T]: argmax of logits [B, T, V] plus noise [B, W, V].

    depth [B, T]: which row of the noise is whose, as nodes of one depth stand at one position and share its
    noise. None: the first is everyone's.
    """
    if cpu.is_alone():
        return cpu.draw(logits, noise, depth)
    if noise is not None:
        logits = logits + (noise[:, :1] if depth is None else tree.pick(noise, depth))
    return logits.argmax(-1)


def rank(
    logits: Tensor, noise: Tensor | None, k: int, names: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k best ids by logits [B, R, V], plus noise [B, R or 1, V] if there is any, best first.

    Returns their log-probabilities under the shifted logits and their ids, both [B, R, k]. names [V]: what
    stands for an id, if not it itself.
    """
    if cpu.is_alone():
        return cpu.rank(logits, noise, k, names)
    if noise is not None:
        logits = logits + noise
    top, ids = logits.topk(k, dim=-1)
    return top - logits.logsumexp(-1, keepdim=True), ids if names is None else names[ids]


def advance(growth: Growth) -> Tensor:
    """`tree.Growth.advance`."""
    if not cpu.is_alone():
        return growth.advance()
    beam = cpu.advance(growth.child_scores, growth.child_tokens, growth.beam_sees, growth.size)
    growth.beam_scores, growth.beam_tokens, growth.beam_flat, growth.beam_sees, row = beam
    growth.size += growth.child_tokens.shape[1]
    return row


def prune(growth: Growth, root: Tensor) -> Tree:
    """`tree.Growth.prune`."""
    if not cpu.is_alone():
        return growth.prune(root)
    candidates = (torch.cat(x, dim=1) for x in (growth.scores, growth.tokens, growth.parents))
    return Tree(*cpu.prune(*candidates, root, growth.shape.nodes))


def accept(drafted: Tree, chosen: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """`tree.accept`."""
    if cpu.is_alone():
        return cpu.accept(drafted.tokens, drafted.parent, drafted.depth, chosen, window)
    return tree.accept(drafted, chosen, window)
