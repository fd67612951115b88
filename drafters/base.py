"""The face of a drafter, and the one that drafts nothing (plain decoding)."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from errors import CheckpointError
from model import ModelArgs, Transformer
from tokenizer import Tokenizer
from tree import PathTree, Tree, TreeShape, chain


@dataclass(frozen=True)
class Request:
    """What a drafter is built from: the method's name, the checkpoint and its loaded target, and what the user asked for.

    draft: what --draft names, None if nothing. tree: None where none is asked for. flags: the method's own, all of them.
    max_seq_len: tokens there is room for. rule: how its nodes are accepted, one of `accepting.RULES`. prepare(*models): puts
    models on the kernels, where there are any; `choose_tree(head, folder)` is --tree auto.
    """

    method: str
    checkpoint: Path
    target: Transformer
    tokenizer: Tokenizer | None
    draft: Path | None
    tree: TreeShape | PathTree | str | None
    default_tree: TreeShape
    coupled: bool
    max_seq_len: int
    rule: str
    flags: dict
    prepare: Callable[..., None]
    choose_tree: Callable[[nn.Module, Path], TreeShape]

    def refuse(self, **given) -> None:
        """Raise CheckpointError if any of these, options that mean nothing to the method, was given."""
        for name, value in given.items():
            if value:
                raise CheckpointError(f"--speculate {self.method}: has no use for --{name}; leave it out")


class StaticTree(nn.Module):
    """A tree whose form is known beforehand, kept on the device: only its tokens change."""

    def __init__(self, shape: PathTree):
        super().__init__()
        for name, values in (("parent", shape.parent), ("depth", shape.depths), ("ancestors", shape.ancestors)):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def of(self, tokens: Tensor, scores: Tensor | None = None) -> Tree:
        """Tokens [B, T], root first, and maybe the log-probability of each node given its parent [B, T], as a `Tree`."""
        B = tokens.shape[0]
        ancestors = self.ancestors.expand(B, -1, -1)
        paths = None if scores is None else (self.ancestors * scores[:, None]).sum(-1)
        return Tree(tokens, self.parent.expand(B, -1), self.depth.expand(B, -1), ancestors, paths)


class Riders(NamedTuple):
    """Rows a drafter adds to the verify pass for its own ends; never accepted, gone after the step."""

    tokens: Tensor  # [B, E]
    depth: Tensor  # [B, E] how far behind the root each stands
    sees: Tensor  # [B, E, T+E] bool: which nodes of the tree and which riders each attends to, itself included


class Drafter(nn.Module):
    """Proposes a tree from the committed text. This base class proposes the bare root: plain decoding.

    `shape`: size of the trees, the same at every step. `aux_layers`: target layers whose inputs it wants as features
    (empty: none). `passes`: how often a step reads the drafter's weights, for the bandwidth figure. `cached`: shapes of
    the models whose keys and values it caches. `made_of`: tells drafters apart that have no weights. `riders`: rows it adds to
    the verify pass; `heard`: how many of them, the last ones, it wants the target's choice at.
    """

    riders = heard = 0
    rule = "equal"  # which of `accepting.RULES` its nodes are accepted by
    aux_layers: tuple[int, ...] = ()
    passes = 0
    made_of = ""
    cached: tuple[ModelArgs, ...] = ()

    def __init__(self, shape: TreeShape = TreeShape(1, 0, 0)):
        super().__init__()
        self.shape = shape

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocate caches for `batch` sequences of `slots` slots, once."""

    def memory(self, batch: int) -> int:
        """Bytes that `allocate` takes beside the caches."""
        return 0

    @property
    def room(self) -> int:
        """Cache slots a step may touch beyond the committed ones, in the target's cache and in its own."""
        return self.shape.room + self.riders

    def begin(self, prompts: list[list[int]]) -> None:
        """A new text is started for each of these prompts: forget the last ones. Not part of the step."""

    def ride(self, state) -> Riders:
        """The rows to add to the verify pass."""
        raise NotImplementedError

    def hear(self, state, chosen: Tensor) -> None:
        """The target's likeliest tokens [B, heard] at the last riders. `state` is still that of `propose`."""
        raise NotImplementedError

    def has_guess(self, state, slots: Tensor) -> Tensor | None:
        """Whether there is anything to propose [] bool; None: always. Where asking is cheap (on a CPU) the decoder asks, and
        decodes plainly if there is not."""
        return None

    def read(self, state, features: Tensor | None, positions: Tensor, visible: Tensor) -> None:
        """Take in a chunk of the prompt: its tokens are those of `state` at positions [B, C], their features [B, C, F]. The token
        after a prompt's last one is not known yet: a drafter that wants it reads that row again in its first `propose`."""

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        """Draft below the root. `state` is the decoder's `State`, `slots` [n] the live cache slots 0..n-1.

        noise [B, W, V] is temperature * Gumbel noise for positions length+1 ... length+W, or None when greedy.
        """
        return chain(state.root()[:, None])
