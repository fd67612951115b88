"""The face of a drafter, and the one that drafts nothing (plain decoding)."""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from model import ModelArgs
from tree import PathTree, Tree, TreeShape, chain


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


class Drafter(nn.Module):
    """Proposes a tree from the committed text. This base class proposes the bare root: plain decoding.

    `shape`: size of the trees, the same at every step. `aux_layers`: target layers whose inputs it wants as features
    (empty: none). `passes`: how often a step reads the drafter's weights, for the bandwidth figure. `cached`: shapes of
    the models whose keys and values it caches.
    """

    aux_layers: tuple[int, ...] = ()
    passes = 0
    cached: tuple[ModelArgs, ...] = ()

    def __init__(self, shape: TreeShape = TreeShape(1, 0, 0)):
        super().__init__()
        self.shape = shape

    def allocate(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocate caches for `batch` sequences of `slots` slots, once."""

    def has_guess(self, state, slots: Tensor) -> Tensor | None:
        """Whether there is anything to propose [] bool; None: always. Where asking is cheap (on a CPU) the decoder asks, and
        decodes plainly if there is not."""
        return None

    def read(self, next_tokens: Tensor, features: Tensor | None, positions: Tensor, visible: Tensor) -> None:
        """Take in a chunk of the prompt: features [B, C, F] of the tokens at positions [B, C], and the tokens that follow
        them. The last row of a prompt has no follower yet and is read again by the first `propose`."""

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        """Draft below the root. `state` is the decoder's `State`, `slots` [n] the live cache slots 0..n-1.

        noise [B, W, V] is temperature * Gumbel noise for positions length+1 ... length+W, or None when greedy.
        """
        return chain(state.root()[:, None])
