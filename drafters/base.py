"""The interface of drafters: their setup, their proposals, and the drafter of plain decoding."""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from checkpoint.loading import load_head
from common.errors import InputError
from head import Head
from model import KVCaches, Transformer, buffer_bytes
from tokens.tokenizer import Tokenizer
from tree import PAPER_TREE, Level, PathTree, Tree, TreeShape, link


@dataclass(frozen=True)
class Setup:
    """A target, and the method that drafts for it."""

    method: str  # a name of `drafters.METHODS`
    drafting: Any  # its options, a `drafters.Drafting`
    kind: str | None  # of the checkpoint in `folder`
    folder: Path | None  # of its head or draft model
    default_tree: TreeShape
    target: Transformer
    tokenizer: Tokenizer | None
    max_seq_len: int  # tokens of the longest text
    prepare: Callable[..., None]  # prepare(*models) puts models on the kernels, where there are any

    @property
    def grown_tree(self) -> TreeShape | PathTree:
        """The tree of a drafter that grows trees: as --tree says, else the default."""
        tree = self.default_tree if self.drafting.tree in (None, "auto") else self.drafting.tree
        return PAPER_TREE if tree == "paper" else tree

    def load_head(self) -> Head:
        """Load the head and put it on the kernels.

        By default it attends to as long a text as it was made for: it guesses worse on longer ones. Raises
        InputError if it is damaged or does not fit, or if it has a window beside --draft-window.
        """
        head = load_head(self.folder, self.target, self.kind)
        args, window = head.args, self.drafting.window
        if any(args.windows):
            if window is not None:
                raise InputError(f"--draft-window {window}: the head in {self.folder} has windows of its own;"
                                 " leave the option out")
        else:
            if window is None:
                window = args.draft_window or args.max_seq_len
            head.attend_to(window if window < self.max_seq_len else 0)
        self.prepare(head)
        return head


def constants(module: nn.Module, **values) -> None:
    """Register lists or tensors as buffers of a module: they move to a device with it, and are not saved."""
    for name, value in values.items():
        module.register_buffer(name, torch.as_tensor(value), persistent=False)


class StaticLevel(nn.Module):
    """A level of a static tree (see `tree.Level`), its indices kept on the device."""

    def __init__(self, level: Level):
        super().__init__()
        constants(self, sees=torch.tensor(level.sees, dtype=torch.bool))
        for name in ("nodes", "rows", "came_from"):  # may be empty, and then have no dtype of their own
            constants(self, **{name: torch.tensor(getattr(level, name), dtype=torch.int64)})


class StaticTree(nn.Module):
    """A tree whose form is known beforehand, kept on the device: only its tokens change."""

    def __init__(self, shape: PathTree):
        super().__init__()
        parent = torch.tensor(shape.parent)
        depth, ancestors = link(parent[None], shape.window - 1)
        constants(self, parent=parent, depth=depth[0], ancestors=ancestors[0])
        self.levels = nn.ModuleList(StaticLevel(level) for level in shape.levels)

    def of(self, tokens: Tensor, scores: Tensor | None = None) -> Tree:
        """Return the tree with these tokens [B, T], root first.

        scores: the log-probability of each node given its parent [B, T], where the drafter has one.
        """
        B = tokens.shape[0]
        ancestors = self.ancestors.expand(B, -1, -1)
        # Chosen, not multiplied: a score may be -inf.
        paths = None if scores is None else torch.where(self.ancestors, scores[:, None], 0).sum(-1)
        return Tree(tokens, self.parent.expand(B, -1), self.depth.expand(B, -1), ancestors, paths)


def unread_rows(state, slots: Tensor, ahead: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positions [B, R] of a catch-up's rows, and which slots they see [B, R, n].

    The first n_new rows are those that the last step committed. ahead: rows that were read with the step
    before.
    """
    start, rows = state.length - state.n_new + ahead, state.backend.unread_rows(state)
    positions = start[:, None] + torch.arange(rows, device=slots.device)
    return positions, state.backend.visible_before(slots, start, rows)


def newest(state, rows: int) -> Tensor:
    """Return the row of the last unread token [B, 1], at most `rows` - 1."""
    # A sequence that is held still may have more unread tokens than that.
    return (state.n_new - 1).clamp(0, rows - 1)[:, None]


class Drafter(nn.Module):
    """Proposes a tree from the committed text. This base class proposes the bare root: plain decoding.

    A drafter declares its needs in the attributes below. `shape`: size of its trees, the largest one where
    prices cut them; `static`: the tree itself, if its form is known beforehand.
    """

    method = "none"  # of --speculate
    aux_layers: tuple[int, ...] = ()  # target layers whose inputs it needs as features
    made_of = ""  # identity of a drafter without weights, in evaluate.py's record
    all_layers: tuple[int, ...] = ()  # those of the features in the state, if it drafts beside another one
    reads = True  # its step reads the tokens committed before; if not, unread tokens add up
    per_sequence: tuple[str, ...] = ()  # its buffers with a row for each sequence, beside the caches
    sampled = 1.0  # factor of the scores of its trees at temperature 1
    grows = False  # it drafts trees of any size, see `HeadDrafter.with_tree`
    headless: Drafter | None = None  # the fallback drafter when the head is skipped
    may_pass = False  # it may have nothing to propose, see `has_guess`

    def __init__(self, shape: TreeShape = TreeShape(1, 0, 0), *parts: Drafter):
        """parts: drafters whose proposals it joins; they are allocated, viewed and reset with it."""
        super().__init__()
        self.shape, self.parts = shape, nn.ModuleList(parts)
        self.static = StaticTree(shape) if isinstance(shape, PathTree) else None
        self.caches: KVCaches | None = None  # of its network, see `new_caches`

    @property
    def network(self) -> nn.Module | None:
        """The network that drafts, if there is one."""
        return getattr(self, "head", None)

    @property
    def grown(self) -> Drafter | None:
        """The drafter that `grows`, this one or one of its parts, if there is one."""
        return next((one for one in (self, *self.parts) if one.grows), None)

    def new_caches(
        self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVCaches | None:
        """Allocate the caches of its network for `batch` sequences of `slots` slots, if it has any."""

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Move to the device, and allocate all that it keeps, see `new_caches`. Called once."""
        self.to(device)
        self.caches = self.new_caches(batch, slots, dtype, device)
        for part in self.parts:
            part.allocate(batch, slots, dtype, device)

    def memory(self, batch: int, slots: int, dtype: torch.dtype) -> int:
        """Bytes that `allocate` takes."""
        caches = self.new_caches(batch, slots, dtype, "meta")
        own = 0 if caches is None else buffer_bytes(caches)
        return own + sum(part.memory(batch, slots, dtype) for part in self.parts)

    def own_features(self, features: Tensor) -> Tensor:
        """Select the features of its own layers from those of all in the state [..., F]."""
        if not self.all_layers or self.all_layers == self.aux_layers:
            return features
        each = features.unflatten(-1, (len(self.all_layers), -1)).unbind(-2)
        return torch.cat([each[self.all_layers.index(layer)] for layer in self.aux_layers], -1)

    @property
    def extra_slots(self) -> int:
        """Cache slots a step may touch beyond the committed ones, in the target's cache and in its own."""
        return self.shape.extra_slots

    def extra_slots_after(self, window: int) -> int:
        """Return `extra_slots` for the catch-up of another tree, with a wider window."""
        return self.extra_slots - self.shape.window + window

    def rows(self, first: int, count: int) -> Drafter:
        """Return this drafter for sequences first ... first + count - 1: the same weights, views of the rest.
        """
        some = copy.copy(self)
        some._buffers, some._modules = dict(self._buffers), dict(self._modules)
        for name in self.per_sequence:
            some._buffers[name] = self._buffers[name].narrow(0, first, count)
        some._modules["parts"] = nn.ModuleList(part.rows(first, count) for part in self.parts)
        if self.caches is not None:
            some.caches = self.caches.rows(first, count)
        return some

    def sequence(self, place: int, slots: int) -> list[Tensor]:
        """Return views of all that it keeps of a sequence, in the first `slots` cache slots."""
        own = [self._buffers[name][place] for name in self.per_sequence]
        own += [tensor for part in self.parts for tensor in part.sequence(place, slots)]
        return own if self.caches is None else own + self.caches.sequence(place, slots)

    def begin(self, place: int, prompt: list[int]) -> None:
        """A new text is started in this place of the batch: forget the last one. Not part of the step."""
        for part in self.parts:
            part.begin(place, prompt)

    def finish(self, tokens: list[int]) -> None:
        """A request has finished: these are its prompt and output. Not part of the step."""
        for part in self.parts:
            part.finish(tokens)

    def has_guess(self, state, slots: Tensor) -> bool:
        """Return whether there is anything worth proposing.

        Called if the drafter `may_pass`, where that is cheap (on a CPU). Without a guess the step is plain.
        """
        return any(part.has_guess(state, slots) for part in self.parts)

    def read(self, state, features: Tensor | None, positions: Tensor, visible: Tensor) -> None:
        """Read a chunk of the prompt: the tokens of `state` at positions [B, C], features [B, C, F] of these.

        The token after a prompt's last one is not known yet: a drafter that wants it reads that row again in
        its first `propose`.
        """
        for part in self.parts:
            part.read(state, features, positions, visible)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        """Draft a tree below the root.

        state: an `engine.state.State`. slots [n]: the live cache slots 0..n-1.
        noise [B, W, V] is temperature * Gumbel noise for positions length+1 ... length+W, or None when
        greedy.
        """
        return Tree(state.root.clone(), state.zero, state.zero, state.one)

    def observe(self, state, logits) -> None:
        """Learn from the target's logits [B, T, V], or a `Part` of them, at the nodes that were proposed."""
