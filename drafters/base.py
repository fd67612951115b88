"""The face of a drafter, what it proposes, and the drafter that drafts nothing (plain decoding)."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from model import KVCaches, ModelArgs
from tree import Level, PathTree, Tree, TreeShape, chain


class ExtraRows(NamedTuple):
    """Rows that a drafter adds to the verify pass for its own ends.

    They are never accepted, and gone after the step.
    learn: called in the step with the target's likeliest tokens [B, heard] at the last `heard` of these rows.
    """

    tokens: Tensor  # [B, E]
    depth: Tensor  # [B, E] how far after the root each stands
    # [B, E, T+E] bool: which nodes of the tree and which extra rows each attends to, itself included.
    sees: Tensor
    heard: int
    learn: Callable[[Tensor], None]


@dataclass(frozen=True)
class Confidence:
    """How likely a node is accepted whose path has the score s: exp(slope * s + shift), at most 1.

    (slope, shift) at temperature 0 and at 1; between them they are interpolated.
    """

    of_greedy: tuple[float, float] = (1.0, 0.0)
    of_sampling: tuple[float, float] = (1.0, 0.0)


class Proposal(NamedTuple):
    """What a drafter proposes in one step."""

    tree: Tree
    # [B, T-1, V] of a chain drawn at random: the distribution that each node but the root was drawn from.
    distribution: Tensor | None = None
    extra: ExtraRows | None = None


def constants(module: nn.Module, **values) -> None:
    """Register lists or tensors as buffers of a module: they move to a device with it, and are not saved."""
    for name, value in values.items():
        module.register_buffer(name, torch.as_tensor(value), persistent=False)


class StaticTree(nn.Module):
    """A tree whose form is known beforehand, kept on the device: only its tokens change."""

    def __init__(self, shape: PathTree):
        super().__init__()
        constants(self, parent=shape.parent, depth=shape.depths, ancestors=shape.ancestors)

    def of(self, tokens: Tensor, scores: Tensor | None = None) -> Tree:
        """The tree with these tokens [B, T], root first.

        scores: the log-probability of each node given its parent [B, T], where the drafter has one.
        """
        B = tokens.shape[0]
        ancestors = self.ancestors.expand(B, -1, -1)
        # Chosen, not multiplied: a score may be -inf.
        paths = None if scores is None else torch.where(self.ancestors, scores[:, None], 0).sum(-1)
        return Tree(tokens, self.parent.expand(B, -1), self.depth.expand(B, -1), ancestors, paths)


class StaticLevel(nn.Module):
    """A level of a static tree (see `tree.Level`), its indices kept on the device."""

    def __init__(self, level: Level):
        super().__init__()
        constants(self, sees=torch.tensor(level.sees, dtype=torch.bool))
        for name in ("nodes", "rows", "came_from"):  # may be empty, and then have no dtype of their own
            constants(self, **{name: torch.tensor(getattr(level, name), dtype=torch.int64)})


def newest(state, rows: int) -> Tensor:
    """Which of the unread tokens' rows, so many at most, is the last one's [B, 1]."""
    # A sequence that is held still may have more unread tokens than that.
    return (state.n_new - 1).clamp(0, rows - 1)[:, None]


class Drafter(nn.Module):
    """Proposes a tree from the committed text. This base class proposes the bare root: plain decoding.

    A drafter declares what it is by the attributes below; `shape` is the size of its trees, the same at every
    step.
    """

    rule = "equal"  # which of `sampling.options.RULES` its nodes are accepted by
    aux_layers: tuple[int, ...] = ()  # target layers whose inputs it wants as features
    passes = 0  # how often a step reads the weights of its network, for the bandwidth figure
    made_of = ""  # tells drafters without weights apart, in evaluate.py's record of who answered
    cached: tuple[ModelArgs, ...] = ()  # shapes of the models whose keys and values it caches
    reads = True  # its step reads what was committed before; if not, unread tokens add up
    per_sequence: tuple[str, ...] = ()  # its buffers that have a row for each sequence, beside the caches
    folder: Path | None = None  # that its network was loaded from, if that has a calibration.json
    confidence = Confidence()  # how far the scores of its trees are to be believed
    may_pass = False  # it can have nothing to propose; `has_guess` then says whether it has

    def __init__(self, shape: TreeShape = TreeShape(1, 0, 0)):
        super().__init__()
        self.shape = shape
        self.caches: KVCaches | None = None  # of its network, see `allocate`

    @property
    def network(self) -> nn.Module | None:
        """The network that drafts, if there is one."""
        return None

    @property
    def headless(self) -> Drafter | None:
        """Of several drafters the one that is worth asking if the head is not to draft."""
        return None

    def allocate(
        self, batch: int, slots: int, room: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate caches for `batch` sequences of `slots` slots, and move to the device. Called once.

        room: slots that a pass may touch after the committed ones.
        """
        self.to(device)

    def memory(self, batch: int, slots: int, room: int, dtype: torch.dtype) -> int:
        """Bytes that `allocate` takes."""
        return sum(KVCaches.bytes(args, batch, slots, dtype) for args in self.cached)

    def reusable(self, same: int, held: int, length: int) -> int:
        """How many of the first `same` tokens of a prompt of so many it need not read again.

        They begin a text of which its caches hold `held` tokens.
        """
        return same

    @property
    def extra_slots(self) -> int:
        """Cache slots a step may touch beyond the committed ones, in the target's cache and in its own."""
        return self.shape.extra_slots

    def extra_slots_after(self, window: int) -> int:
        """The same where the catch-up has the rows of another tree's window, a wider one."""
        return self.extra_slots - self.shape.window + window

    def rows(self, first: int, count: int) -> Drafter:
        """This drafter for the sequences first ... first + count - 1: the same weights, views of the rest."""
        some = copy.copy(self)
        some._buffers, some._modules = dict(self._buffers), dict(self._modules)
        for name in self.per_sequence:
            some._buffers[name] = self._buffers[name].narrow(0, first, count)
        if self.caches is not None:
            some.caches = self.caches.rows(first, count)
        return some

    def take(self, place: int, slots: int) -> list[Tensor]:
        """Copies of all that it keeps of a sequence, in so many cache slots."""
        own = [self._buffers[name][place].clone() for name in self.per_sequence]
        return own if self.caches is None else own + self.caches.take(place, slots)

    def put(self, place: int, taken: list[Tensor]) -> None:
        """Write what was taken of one sequence where another is."""
        for name, kept in zip(self.per_sequence, taken):
            self._buffers[name][place] = kept
        if self.caches is not None:
            self.caches.put(place, taken[len(self.per_sequence) :])

    def begin(self, place: int, prompt: list[int]) -> None:
        """A new text is started in this place of the batch: forget the last one. Not part of the step."""

    def has_guess(self, state, slots: Tensor) -> Tensor:
        """Whether there is anything to propose [] bool.

        If asking is cheap (on a CPU) the decoder asks a drafter that `may_pass`, and decodes plainly if there
        is not.
        """
        raise NotImplementedError

    def read(self, state, features: Tensor | None, positions: Tensor, visible: Tensor) -> None:
        """Read a chunk of the prompt: the tokens of `state` at positions [B, C], their features [B, C, F].

        The token after a prompt's last one is not known yet: a drafter that wants it reads that row again in
        its first `propose`.
        """

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        """Draft a tree below the root.

        state: an `engine.state.State`. slots [n]: the live cache slots 0..n-1.
        noise [B, W, V] is temperature * Gumbel noise for positions length+1 ... length+W, or None when
        greedy.
        """
        return Proposal(chain(state.root()[:, None]))
