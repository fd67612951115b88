"""Batches: which rows go together, and the tensors that the losses read."""
from __future__ import annotations

import torch
from torch import Tensor

from tree import pick

WINDOW = 512  # rows that are sorted by length together


def batches(rows: list[dict], budget: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """Group rows of similar length into batches of at most `budget` padded tokens, or of one row.

    Returns the places of the rows in `rows`. The order is random with a generator, else shortest first.
    """
    if generator is None:
        order, window = list(range(len(rows))), max(1, len(rows))
    else:
        # Sorted within a window only, so that every epoch groups differently.
        order, window = torch.randperm(len(rows), generator=generator).tolist(), WINDOW
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

    `tokens` [B, T]; `at` [B, R] are the positions from which a chain is drafted. Position j pairs the feature
    of token j with token j+1, and its prediction of step i is token j+2+i. An answer ids[b:e] is drafted from
    b-1 (the next token, the first root, is the target's) to e-3.

    `index` [M] lists the scored predictions as places in [steps, B, R] flattened, and `step` [M] is the step
    of each. `scored` counts them by step; `valid` counts all predictions that exist. Positions within an
    answer follow each other, so place p at step i corresponds to place p + i at step 0: `shifted` [M] are
    those places in [B, R] flattened.
    """

    def __init__(self, rows: list[dict], steps: int, in_draft: Tensor, device: torch.device):
        B, T = len(rows), max(len(row["ids"]) for row in rows)
        spans = [[torch.arange(b - 1, e - 2) for b, e in row["answers"]] for row in rows]
        R = max(sum(map(len, parts)) for parts in spans)
        tokens, at = (torch.zeros(B, width, dtype=torch.int64) for width in (T, R))
        last = torch.full((B, R), -1)  # the last position of the answer that each position is in
        for i, (row, parts) in enumerate(zip(rows, spans)):
            count = sum(map(len, parts))
            tokens[i, : len(row["ids"])] = torch.tensor(row["ids"])
            at[i, :count] = torch.cat(parts)
            last[i, :count] = torch.cat([part.new_full(part.shape, e - 3)
                                         for part, (_, e) in zip(parts, row["answers"])])
        ahead = torch.arange(steps)[:, None, None]
        valid = at + ahead <= last  # [steps, B, R]
        predicted = torch.stack([tokens.gather(1, (at + 2 + i).clamp(max=T - 1)) for i in range(steps)])
        scored = valid & in_draft[predicted]
        index = scored.flatten().nonzero()[:, 0]
        step = index // (B * R)
        self.valid, self.scored = valid.sum((1, 2)).tolist(), scored.sum((1, 2)).tolist()
        self.rows, self.tokens, self.at = rows, tokens.to(device), at.to(device)
        self.index, self.step, self.shifted = (x.to(device) for x in (index, step, index % (B * R) + step))

    def following(self, step: int) -> Tensor:
        """The token [B, R] that a chain reads at a draft step: the root at step 0, then what it drafted."""
        return self.tokens.gather(1, (self.at + 1 + step).clamp(max=self.tokens.shape[1] - 1))

    def after(self, x: Tensor) -> Tensor:
        """Rows of x [B, T, ...] one token after each position [B*R, ...]; a prediction's is at `shifted`."""
        return pick(x, (self.at + 1).clamp(max=self.tokens.shape[1] - 1)).flatten(0, 1)

    def sum_by_step(self, values: Tensor) -> Tensor:
        """Sums of values [M] over the predictions of each step [steps]."""
        return values.new_zeros(len(self.scored)).index_add(0, self.step, values)
