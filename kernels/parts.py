"""The parts of a step beside the networks.

Each is one operator if the target at work is on the CPU kernels, one kernel where those for GPUs run, else
its definition in `tree`, `sampling` or here.

All ways give the same, but for the last bits of noise and of the draft's log-probabilities.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import sampling.noise
import sampling.restrict
import tree
from kernels import cpu
from kernels.gpu import here
from kernels.parallel import Part
from tree import Growth, Tree

if here.CAN:
    from kernels.gpu import growing, ranking
    from kernels.gpu import sampling as gpu_sampling


class Sight(NamedTuple):
    """Which cache slots each row of a pass attends to, in few words: the arguments of `tree.visible_slots`.

    The pass's own rows stand in the last T of the M slots that `local` [B, T, M] speaks of.
    """

    slots: Tensor
    length: Tensor
    local: Tensor

    def dense(self) -> Tensor:
        """[B, T, n] bool."""
        return tree.visible_slots(*self)


def once(x: Tensor) -> Tensor:
    """x, made once for all kernels of ours that read it. It begins where its memory does, as results do.

    torch.compile makes what is as simple as an angle or a mask anew for each of them, in every layer, unless
    as_strided looks at it.
    """
    return x.as_strided(x.shape, x.stride())


def visible_slots(slots: Tensor, length: Tensor, local: Tensor) -> Tensor | Sight:
    """`tree.visible_slots`; a `Sight` for the attention of GPU kernels, which reads it on the device."""
    if cpu.is_alone():
        return cpu.see(length, local, slots.shape[0])
    if here.runs_on(length):
        return Sight(slots, length, once(local.contiguous()))
    return tree.visible_slots(slots, length, local)


def visible_before(slots: Tensor, start: Tensor, count: int) -> Tensor | Sight:
    """`visible_slots` of `count` rows at slots start [B] ... of which each sees itself and all before it."""
    rows = torch.arange(count, device=slots.device)
    if here.runs_on(start) and not cpu.is_alone():
        return Sight(slots, start, once((rows <= rows[:, None]).repeat(len(start), 1, 1)))
    return slots <= (start[:, None] + rows)[..., None]


def gumbel(key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int) -> Tensor:
    """temperature [B] times `sampling.noise.gumbel` [B, W, V]."""
    if cpu.is_alone():
        return cpu.gumbel(key, positions, temperature, vocabulary)
    if here.runs_on(key):
        return gpu_sampling.gumbel(key, positions, temperature, vocabulary)
    return temperature[:, None, None] * sampling.noise.gumbel(key, positions, vocabulary)


def restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`sampling.restrict.restrict`."""
    if cpu.is_alone():
        return cpu.restrict(logits, temperature, top_k, top_p)
    if here.runs_on(logits):
        return gpu_sampling.restrict(logits, temperature, top_k, top_p)
    return sampling.restrict.restrict(logits, temperature, top_k, top_p)


def draw(logits: Tensor | Part, noise: Tensor | None, depth: Tensor | None = None) -> Tensor:
    """The target's token at every row [B, T]: argmax of logits [B, T, V] plus noise [B, W, V].

    depth [B, T]: which row of the noise is whose, as nodes of one depth stand at one position and share its
    noise. None: the first is everyone's. Of a `Part` each rank draws among its own tokens, and the best of
    these is taken: the logits stay where they are.
    """
    if isinstance(logits, Part):
        own, first, ranks = logits
        noise = None if noise is None else noise[..., first : first + own.shape[-1]].contiguous()
        drawn = draw(own, noise, depth)
        value = own.gather(-1, drawn[..., None])[..., 0]
        if noise is not None:
            rows = noise[:, :1].expand(-1, drawn.shape[1], -1) if depth is None else tree.pick(noise, depth)
            value = value + rows.gather(-1, drawn[..., None])[..., 0]
        return ranks.best(value, drawn + first)
    if cpu.is_alone():
        return cpu.draw(logits, noise, depth)
    if here.runs_on(logits):
        return ranking.draw(logits, noise, depth)
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
    if here.runs_on(logits):
        return ranking.rank(logits, noise, k, names)
    if noise is not None:
        logits = logits + noise
    top, ids = logits.topk(k, dim=-1)
    return top - logits.logsumexp(-1, keepdim=True), ids if names is None else names[ids]


def advance(growth: Growth) -> Tensor:
    """`tree.Growth.advance`."""
    newest = growth.child_scores, growth.child_tokens, growth.beam_sees, growth.size
    if cpu.is_alone():
        beam = cpu.advance(*newest)
    elif here.runs_on(growth.child_scores):
        beam = growing.advance(*newest)
    else:
        return growth.advance()
    growth.beam_scores, growth.beam_tokens, growth.beam_flat, growth.beam_sees, row = beam
    growth.size += growth.child_tokens.shape[1]
    return row


def prune(growth: Growth, root: Tensor) -> Tree:
    """`tree.Growth.prune`."""
    on_gpu = here.runs_on(root)
    if not (cpu.is_alone() or on_gpu):
        return growth.prune(root)
    candidates = (torch.cat(x, dim=1) for x in (growth.scores, growth.tokens, growth.parents))
    shape = growth.shape
    if on_gpu:
        return Tree(*growing.prune(*candidates, root, shape.nodes, shape.depth + 1))
    return Tree(*cpu.prune(*candidates, root, shape.nodes))


def join(one: Tree, other: Tree, nodes: int, levels: int) -> Tree:
    """`tree.join`."""
    if not cpu.is_alone():
        return tree.join(one, other, nodes, levels)
    return Tree(*cpu.join(*((t.tokens, t.parent, t.scores) for t in (one, other)), nodes))


def accept(drafted: Tree, chosen: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """`tree.accept`."""
    nodes = drafted.tokens, drafted.parent, drafted.depth
    if cpu.is_alone():
        return cpu.accept(*nodes, chosen, window)
    if here.runs_on(chosen):
        return growing.accept(*nodes, chosen, window)
    return tree.accept(drafted, chosen, window)


def emit(tokens: Tensor, count: Tensor, *buffers: Tensor) -> Tensor | None:
    """`engine.state.State.emit` on its buffers. None, and nothing is done, if there is no kernel for it."""
    if cpu.is_alone():
        return cpu.emit(tokens, count, *buffers)
    return growing.emit(tokens, count, *buffers) if here.runs_on(tokens) else None
