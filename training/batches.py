"""Batches: which rows are computed together, and the tensors that the losses read."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tree import pick

SORTED_ROWS = 512  # rows that are sorted by length together


def batches(rows: list[dict], budget: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """Group rows of similar length into batches of at most `budget` padded tokens, or of one row.

    Returns places in `rows`. The order is random with a generator, else shortest first.
    """
    order, window = list(range(len(rows))), max(1, len(rows))
    if generator is not None:  # sorted within a window only, so that every epoch groups differently
        order, window = torch.randperm(len(rows), generator=generator).tolist(), SORTED_ROWS
    groups = []
    for i in range(0, len(order), window):
        group: list[int] = []
        for place in sorted(order[i : i + window], key=lambda place: len(rows[place]["ids"])):
            if group and (len(group) + 1) * len(rows[place]["ids"]) > budget:
                groups.append(group)
                group = []
            group.append(place)
        groups.append(group)
    if generator is not None:
        groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    return groups


class Batch:
    """Rows padded to one length, and the predictions in them that are scored.

    `tokens` [B, T]; `taught` [B, R] are the positions whose next token but one is learned. Position j pairs
    the feature of token j with token j+1, and its prediction of step i is token j+2+i. An answer ids[b:e] is
    drafted from b-1 (the next token, the first root, is the target's) to e-3.

    `at` [B, C] are the positions that chains start from: those of `taught` or, with `seeds`, some of them.
    `chains` counts them at each step, the first ones.

    `index` [M] lists the scored predictions as places in [steps, B, C] flattened, and `step` [M] is the step
    of each. `scored` counts them by step; `valid` counts all predictions that exist. Positions within an
    answer follow each other, so a chain from place p of `taught` is at step i where one from p + i begins:
    `shifted` [M] are those places in [B, R] flattened.
    """

    def __init__(
        self, rows: list[dict], steps: int, in_draft: Tensor, device: torch.device, *, share: float = 1.0,
        keep: float = 1.0, seeds: list[int] | None = None,
    ):
        """in_draft [V]: True for ids that the head drafts.

        share: of the positions, those that chains start from. keep: of the chains at a draft step, those that
        reach the next (the COD sampling of P-EAGLE, arXiv 2602.01469). seeds: of the choice in each row; None
        takes all chains to their ends.
        """
        B, T = len(rows), max(len(row["ids"]) for row in rows)
        spans = [[torch.arange(b - 1, e - 2) for b, e in row["answers"]] for row in rows]
        counts = [sum(map(len, parts)) for parts in spans]
        starts = [torch.arange(count) for count in counts]
        if seeds is None:
            keep = 1.0
        elif share < 1:
            orders = [torch.randperm(count, generator=torch.Generator().manual_seed(seed))
                      for count, seed in zip(counts, seeds)]
            starts = [order[: math.ceil(len(order) * share)] for order in orders]
        R, C = max(counts), max(map(len, starts))
        tokens, taught, places = (torch.zeros(B, width, dtype=torch.int64) for width in (T, R, C))
        last = torch.full((B, R), -1)  # the last position of the answer that each position is in
        reach = torch.zeros(B, C)  # draft steps of a chain, if the answer is long enough
        for i, (row, parts) in enumerate(zip(rows, spans)):
            count, n = counts[i], len(starts[i])
            tokens[i, : len(row["ids"])] = torch.tensor(row["ids"])
            taught[i, :count] = torch.cat(parts)
            ends = [part.new_full(part.shape, e - 3) for part, (_, e) in zip(parts, row["answers"])]
            last[i, :count] = torch.cat(ends)
            places[i, :n] = starts[i]
            for step in range(steps):
                reach[i, : math.ceil(n * keep**step)] = step + 1
        ahead = torch.arange(steps)[:, None, None]
        at = taught.gather(1, places)
        valid = (at + ahead <= last.gather(1, places)) & (ahead < reach)  # [steps, B, C]
        predicted = torch.stack([tokens.gather(1, (at + 2 + i).clamp(max=T - 1)) for i in range(steps)])
        scored = valid & in_draft[predicted]
        index = scored.flatten().nonzero()[:, 0]
        step, chain = index // (B * C), index % (B * C)
        shifted = chain // C * R + places.flatten()[chain] + step
        self.valid, self.scored = valid.sum((1, 2)).tolist(), scored.sum((1, 2)).tolist()
        self.chains = [int((reach > i).sum(1).max()) for i in range(steps)]
        self.rows, self.tokens, self.taught, self.at = (
            rows, tokens.to(device), taught.to(device), at.to(device)
        )
        self.index, self.step, self.shifted = (x.to(device) for x in (index, step, shifted))

    def following(self, step: int) -> Tensor:
        """Return the token [B, C] that a chain reads at a draft step: the root at step 0, then its drafts."""
        return self.tokens.gather(1, (self.at + 1 + step).clamp(max=self.tokens.shape[1] - 1))

    def after(self, x: Tensor) -> Tensor:
        """Return rows of x [B, T, ...] one token after each taught position [B*R, ...].

        The row of a prediction is at `shifted`.
        """
        return pick(x, (self.taught + 1).clamp(max=self.tokens.shape[1] - 1)).flatten(0, 1)

    def before(self) -> Tensor:
        """Return the token that each scored prediction follows [M]."""
        return torch.stack([self.following(i) for i in range(len(self.scored))]).flatten()[self.index]
