"""Lookahead decoding (Fu et al., arXiv 2402.02057): the target guesses its own future while it verifies.

A window of columns stands after the root, row below row: row r holds guesses made r steps ago of what comes
after the row above. Each step the target reads the window along with the tree and predicts what follows its
newest row; a column is then an n-gram the target would write, and goes into a pool, by its first token. The
pool's n-grams for the root are the tree.

Window, pool and what moves between them are tensors of fixed size. Two things differ from what is published:
there the window's rows are filled one by one in as many steps, here all at once with random tokens of the
prompt; and there a step emits at most N-1 tokens, a slip of the code (an index taken for a count), here N, an
n-gram's N-1 that agree and the target's own.
"""
from __future__ import annotations

import torch
from torch import Tensor

from common.errors import InputError
from drafters.base import Drafter, ExtraRows, Proposal, Setup, constants
from tree import chains

MOST_ROWS = 1024  # of a pass, beside the tree: masks grow with their square

EMPTY = -1


class Lookahead(Drafter):
    """Proposes the n-grams that the target guessed before.

    window: columns W. level: tokens N of an n-gram. guesses: G, the latest n-grams kept for each first token.
    The pass reads 1 + G*(N-1) nodes and (N-1)*W - 1 extra rows.
    """

    per_sequence = ("window_rows", "pool")

    def __init__(self, vocab_size: int, window: int = 7, level: int = 5, guesses: int = 7):
        shape = chains((level - 1,) * guesses)
        super().__init__(shape)
        self.vocab_size, self.columns, self.level, self.guesses = vocab_size, window, level, guesses
        # Extra row (r, c) stands r + c after the root. It sees the columns up to its own in row 0, where the
        # root is the first, and its own column in the rows between.
        places = [(r, c) for r in range(level - 1) for c in range(window)][1:]
        self.extra_rows = len(places)
        root_only = [i == 0 for i in range(shape.nodes)]
        sees = [
            root_only + [(p == 0 and d <= c) or (0 < p <= r and d == c) for p, d in places] for r, c in places
        ]
        constants(self, depth=[r + c for r, c in places], sees=sees)
        # The n-gram of each node, and its place in it.
        constants(self, chain=[p[0] for p in shape.paths], ahead=[len(p) - 1 for p in shape.paths])

    def memory(self, batch: int, slots: int, dtype: torch.dtype) -> int:
        return batch * self.vocab_size * self.guesses * (self.level - 1) * torch.int32.itemsize

    def allocate(self, batch: int, *sizes) -> None:
        rows, G = self.level - 1, self.guesses
        pool = torch.full((batch, self.vocab_size, G, rows), EMPTY, dtype=torch.int32)  # latest last
        constants(self, window_rows=torch.zeros(batch, rows, self.columns, dtype=torch.int64), pool=pool)
        super().allocate(batch, *sizes)

    def begin(self, place: int, prompt: list[int]) -> None:
        self.pool[place] = EMPTY
        generator = torch.Generator().manual_seed(10)
        drawn = torch.randint(len(prompt), self.window_rows.shape[1:], generator=generator)
        self.window_rows[place] = torch.tensor(prompt)[drawn].to(self.window_rows.device)

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Proposal:
        root = state.root
        B = root.shape[0]
        # [B, T-1].
        guessed = self.pool[torch.arange(B, device=root.device), root[:, 0]].long()[:, self.chain, self.ahead]
        # An empty place repeats the root: a bad guess, never a wrong text.
        tree = self.static.of(torch.cat((root, torch.where(guessed == EMPTY, root, guessed)), 1))
        window = self.window_rows.flatten(1)[:, 1:]

        def learn(chosen: Tensor) -> None:
            self.learn(root[:, 0], chosen, ~state.done)

        depth, sees = self.depth.expand(B, -1), self.sees.expand(B, -1, -1)
        return Proposal(tree, extra=ExtraRows(window, depth, sees, self.columns, learn))

    def learn(self, root: Tensor, chosen: Tensor, where: Tensor) -> None:
        """Learn the target's likeliest tokens [B, W] after the window's newest row, below the root [B].

        The columns go into the pool one after the other, for two may begin alike; then the window moves up a
        row. where [B]: the sequences that learn; the others are held still.
        """
        firsts = torch.cat((root[:, None], self.window_rows[:, 0, 1:]), 1)
        batch = torch.arange(chosen.shape[0], device=chosen.device)
        rows = torch.cat((self.window_rows[:, 1:], chosen[:, None]), 1)  # [B, N-1, W]
        rest = rows.int()
        place = torch.arange(self.guesses, device=chosen.device)
        for c in range(self.columns):
            known, new = self.pool[batch, firsts[:, c]], rest[:, :, c]  # [B, G, N-1], [B, N-1]
            same = (known == new[:, None]).all(-1)
            leaves = torch.where(same.any(-1), same.long().argmax(-1), 0)[:, None]  # itself, else the oldest
            source = (place + (place >= leaves)).clamp(max=self.guesses - 1)
            moved = known.gather(1, source[..., None].expand_as(known))
            learnt = torch.where((place == self.guesses - 1)[:, None], new[:, None], moved)
            self.pool[batch, firsts[:, c]] = torch.where(where[:, None, None], learnt, known)
        self.window_rows.copy_(torch.where(where[:, None, None], rows, self.window_rows))


def build(setup: Setup) -> Lookahead:
    """Build the drafter of these flags."""
    sizes = window, level, guesses = [setup.drafting.flags[f] for f in ("window", "level", "guess-set")]
    if (rows := (level - 1) * (window + guesses)) > MOST_ROWS:
        raise InputError(f"--window {window} --level {level} --guess-set {guesses}: {rows:,} rows, at"
                         f" most {MOST_ROWS:,}; lower them")
    return Lookahead(setup.target.args.vocab_size, *sizes)
