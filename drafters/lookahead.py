"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target drafts its own n-grams while it verifies.

A lookahead window has N-1 rows of W columns. The target predicts the successors of the newest row at each
step. Each column is then an n-gram of the target, which goes into a pool keyed by its first token. The pool's
n-grams of the root are drafted.

The window is part of the draft tree: the parent of cell (r, c) is (r-1, c), and row 0 is a path below the
root. So its tokens are verified like others. Two differences from the published algorithm: the window starts
with random tokens of the prompt instead of filling one row per step, and a step emits up to a whole n-gram
and a token of the target, instead of N-1 tokens.
"""
from __future__ import annotations

import torch
from torch import Tensor

from common.errors import InputError
from drafters.static import PathTree, StaticDrafter, register_constants
from engine.drafting import DrafterSetup
from engine.state import State
from engine.step import Step
from tree import Tree

MAX_NODES = 1024  # of a tree; masks grow quadratically
EMPTY = -1


class Lookahead(StaticDrafter):
    """Draft n-grams that the target predicted before.

    columns: W, of the window. level: N, tokens of an n-gram. guesses: G, n-grams in the pool per first token.
    The tree has G*(N-1) + (N-1)*W nodes.
    """

    prunable = False  # `observe` reads the target's predictions at all nodes
    buffers_by_slot = ("window", "pool")

    def __init__(self, vocab_size: int, columns: int = 7, level: int = 5, guesses: int = 7):
        rows = level - 1
        right, down = guesses, guesses + 1  # ranks of the children in the next column and in the next row
        ngrams = [(g,) + (0,) * i for g in range(guesses) for i in range(rows)]
        cells = [(right,) * c + (down,) * r for r in range(rows) for c in range(columns)]
        shape = PathTree((*ngrams, *cells[1:]))  # without the root
        super().__init__(shape)
        self.vocab_size, self.columns, self.ngram_rows, self.guesses = vocab_size, columns, rows, guesses
        # source: index of each drafted node's token in (n-grams, window). newest: nodes of the last row.
        source = {path: i for i, path in enumerate(ngrams + cells)}
        newest = [shape.paths.index(path) + 1 for path in cells[-columns:]]
        register_constants(self, source=[source[path] for path in shape.paths], newest=newest)

    def memory(self, batch: int, slots: int, dtype: torch.dtype) -> int:
        return batch * self.vocab_size * self.guesses * self.ngram_rows * torch.int32.itemsize

    def allocate(self, batch: int, *sizes) -> None:
        rows, G = self.ngram_rows, self.guesses
        pool = torch.full((batch, self.vocab_size, G, rows), EMPTY, dtype=torch.int32)  # latest last
        register_constants(self, window=torch.zeros(batch, rows, self.columns, dtype=torch.int64), pool=pool)
        super().allocate(batch, *sizes)

    def reset(self, slot: int, prompt: list[int]) -> None:
        self.pool[slot] = EMPTY
        rng = torch.Generator().manual_seed(10)
        index = torch.randint(len(prompt), self.window.shape[1:], generator=rng)
        self.window[slot] = torch.tensor(prompt)[index].to(self.window.device)

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        root = state.root
        ngrams = self.pool[torch.arange(len(root), device=root.device), root[:, 0]].long()  # [B, G, N-1]
        tokens = torch.cat((ngrams.flatten(1), self.window.flatten(1)), 1)[:, self.source]
        # An empty entry repeats the root, which is rejected.
        return self.static.with_tokens(torch.cat((root, torch.where(tokens == EMPTY, root, tokens)), 1))

    def observe(self, step: Step, state: State, logits: Tensor) -> None:
        """Add the window's columns to the pool and shift the window by a row.

        Columns may have the same first token, so they are added one by one.
        """
        predicted = step.draw(logits, None)[:, self.newest].clamp(min=0)
        first_ids = torch.cat((state.root, self.window[:, 0, 1:]), 1)
        batch = torch.arange(len(first_ids), device=first_ids.device)
        window = torch.cat((self.window[:, 1:], predicted[:, None]), 1)  # [B, N-1, W]
        ngrams, order, active = window.int(), torch.arange(self.guesses, device=first_ids.device), ~state.done
        for c in range(self.columns):
            known, new = self.pool[batch, first_ids[:, c]], ngrams[:, None, :, c]  # [B, G, N-1], [B, 1, N-1]
            same = (known == new).all(-1)
            # Remove the same n-gram, else the oldest.
            removed = torch.where(same.any(-1), same.long().argmax(-1), 0)[:, None]
            source = (order + (order >= removed)).clamp(max=self.guesses - 1)
            shifted = known.gather(1, source[..., None].expand_as(known))
            updated = torch.where((order == self.guesses - 1)[:, None], new, shifted)
            self.pool[batch, first_ids[:, c]] = torch.where(active[:, None, None], updated, known)
        self.window.copy_(torch.where(active[:, None, None], window, self.window))


def build(setup: DrafterSetup) -> Lookahead:
    """Build the drafter. Raises InputError if the tree is too large or another method is combined with it."""
    if setup.method != setup.options.method:
        raise InputError(f"--speculate {setup.options.method}: lookahead cannot be combined; use it alone")
    columns, level, guesses = sizes = [setup.options.flags[f] for f in ("window", "level", "guess-set")]
    if (nodes := (level - 1) * (columns + guesses)) > MAX_NODES:
        raise InputError(f"--window {columns} --level {level} --guess-set {guesses}: {nodes:,} nodes, at"
                         f" most {MAX_NODES:,}; lower them")
    return Lookahead(setup.target.args.vocab_size, *sizes)
