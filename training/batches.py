"""Batches of rows, and the tensors that the losses read."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tree import gather_tokens

ROWS_PER_BUCKET = 512  # rows are sorted by length within a bucket


def batches(rows: list[dict], budget: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """Group rows of similar length into batches of at most `budget` padded tokens, or of one row.

    Returns indices into `rows`. The order is random with a generator, else shortest first.
    """
    order, bucket = list(range(len(rows))), max(1, len(rows))
    if generator is not None:  # sort within buckets only, so that batches differ between epochs
        order, bucket = torch.randperm(len(rows), generator=generator).tolist(), ROWS_PER_BUCKET
    groups = []
    for i in range(0, len(order), bucket):
        group: list[int] = []
        for row in sorted(order[i : i + bucket], key=lambda row: len(rows[row]["ids"])):
            if group and (len(group) + 1) * len(rows[row]["ids"]) > budget:
                groups.append(group)
                group = []
            group.append(row)
        groups.append(group)
    if generator is not None:
        groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    return groups


class Batch:
    """Rows padded to one length, and indices of the predictions that have a loss.

    - tokens [B, T]
    - positions [B, R]: positions that the head drafts from. Position j pairs the feature of token j with
      token j+1; draft step i predicts token j+2+i. For an answer ids[b:e] they are b-1 ... e-3
    - starts [B, C]: positions that chains start from: `positions` or, with `seeds`, a sample of them
    - chains: number of chains that reach each draft step; they come first
    - index [M]: predictions with a loss, as indices into [steps, B, C] flattened
    - step [M]: draft step of each of them
    - scored, valid: number of predictions with a loss, and of all, by draft step
    - teacher_index [M]: the target's logits for each prediction, as indices into [B, R] flattened. Positions
      of an answer are consecutive, so step i of a chain from positions[p] uses those at positions[p + i]
    """

    def __init__(
        self, rows: list[dict], steps: int, in_draft: Tensor, device: torch.device, *, sampled: float = 1.0,
        retention: float = 1.0, seeds: list[int] | None = None,
    ):
        """in_draft [V]: True for ids of the draft vocabulary.

        sampled: fraction of the positions that chains start from. retention: fraction of the chains of a
        draft step that reach the next (COD sampling of P-EAGLE, arXiv 2602.01469). seeds: of this sampling,
        one per row; None: all chains run to their ends.
        """
        B, T = len(rows), max(len(row["ids"]) for row in rows)
        spans = [[torch.arange(b - 1, e - 2) for b, e in row["answers"]] for row in rows]
        counts = [sum(map(len, parts)) for parts in spans]
        starts = [torch.arange(count) for count in counts]
        if seeds is None:
            retention = 1.0
        elif sampled < 1:
            orders = [torch.randperm(count, generator=torch.Generator().manual_seed(seed))
                      for count, seed in zip(counts, seeds)]
            starts = [order[: math.ceil(len(order) * sampled)] for order in orders]
        R, C = max(counts), max(map(len, starts))
        tokens, positions, chosen = (torch.zeros(B, width, dtype=torch.int64) for width in (T, R, C))
        last = torch.full((B, R), -1)  # the last position of the answer that each position is in
        reach = torch.zeros(B, C)  # draft steps of a chain, if the answer is long enough
        for i, (row, parts) in enumerate(zip(rows, spans)):
            count, n = counts[i], len(starts[i])
            tokens[i, : len(row["ids"])] = torch.tensor(row["ids"])
            positions[i, :count] = torch.cat(parts)
            ends = [part.new_full(part.shape, e - 3) for part, (_, e) in zip(parts, row["answers"])]
            last[i, :count] = torch.cat(ends)
            chosen[i, :n] = starts[i]
            for step in range(steps):
                reach[i, : math.ceil(n * retention**step)] = step + 1
        ahead = torch.arange(steps)[:, None, None]
        at = positions.gather(1, chosen)
        valid = (at + ahead <= last.gather(1, chosen)) & (ahead < reach)  # [steps, B, C]
        predicted = torch.stack([tokens.gather(1, (at + 2 + i).clamp(max=T - 1)) for i in range(steps)])
        scored = valid & in_draft[predicted]
        index = scored.flatten().nonzero()[:, 0]
        step, chain = index // (B * C), index % (B * C)
        teacher_index = chain // C * R + chosen.flatten()[chain] + step
        self.valid, self.scored = valid.sum((1, 2)).tolist(), scored.sum((1, 2)).tolist()
        self.chains = [int((reach > i).sum(1).max()) for i in range(steps)]
        self.rows, self.tokens, self.positions, self.starts = (
            rows, tokens.to(device), positions.to(device), at.to(device)
        )
        self.index, self.step, self.teacher_index = (x.to(device) for x in (index, step, teacher_index))

    def following(self, step: int) -> Tensor:
        """Return the token [B, C] that a chain reads at a draft step: the root at step 0, then its drafts."""
        return self.tokens.gather(1, (self.starts + 1 + step).clamp(max=self.tokens.shape[1] - 1))

    def after(self, x: Tensor) -> Tensor:
        """Return rows of x [B, T, ...] one token after each of `positions` [B*R, ...].

        The row of a prediction is at `teacher_index`.
        """
        return gather_tokens(x, (self.positions + 1).clamp(max=self.tokens.shape[1] - 1)).flatten(0, 1)

    def before(self) -> Tensor:
        """Return the token that each scored prediction follows [M]."""
        return torch.stack([self.following(i) for i in range(len(self.scored))]).flatten()[self.index]
