"""Batches of rows, and the tensors that the losses read."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from tree import gather_tokens

ROWS_PER_BUCKET = 512  # rows are sorted by length within a bucket


def batches(rows: list[dict], max_tokens: int, rng: torch.Generator | None = None) -> list[list[int]]:
    """Group rows of similar length into batches of at most `max_tokens` padded tokens, or of one row.

    Returns indices into `rows`. The order is random with `rng`, else shortest first.
    """
    order, bucket = list(range(len(rows))), max(1, len(rows))
    if rng is not None:  # sort within buckets only, so that batches differ between epochs
        order, bucket = torch.randperm(len(rows), generator=rng).tolist(), ROWS_PER_BUCKET
    groups = []
    for i in range(0, len(order), bucket):
        group: list[int] = []
        for row in sorted(order[i : i + bucket], key=lambda row: len(rows[row]["ids"])):
            if group and (len(group) + 1) * len(rows[row]["ids"]) > max_tokens:
                groups.append(group)
                group = []
            group.append(row)
        groups.append(group)
    if rng is not None:
        groups = [groups[i] for i in torch.randperm(len(groups), generator=rng).tolist()]
    return groups


class Batch:
    """Rows padded to one length, and indices of the predictions that have a loss.

    - tokens [B, T]
    - positions [B, R]: positions that the head drafts from. Position j pairs the feature of token j with
      token j+1; draft step i predicts token j+2+i. For an answer ids[b:e] they are b-1 ... e-3
    - starts [B, C]: positions that chains start from: `positions` or, with `seeds`, a sample of them
    - chains: by draft step, the number of chains that reach it: the first ones of each row
    - index [M]: predictions with a loss, as indices into [steps, B, C] flattened
    - step [M]: draft step of each prediction
    - scored, valid: by draft step, the number of predictions with a loss, and of all predictions
    - teacher_index [M]: the target's logits for each prediction, as indices into [B, R] flattened. Positions
      of an answer are consecutive, so step i of a chain from positions[p] uses those at positions[p + i]
    """

    def __init__(
        self, rows: list[dict], steps: int, in_draft: Tensor, device: torch.device, *, sampled: float = 1.0,
        retention: float = 1.0, seeds: list[int] | None = None,
    ):
        """in_draft [V]: True for ids of the draft vocabulary.

        sampled: fraction of the positions that chains start from. retention: fraction of the chains of a
        draft step that reach the next step (COD sampling of P-EAGLE, arXiv 2602.01469). seeds: of this
        sampling, one per row; None: all chains, with all draft steps.
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
        tokens, positions, start_index = (torch.zeros(B, width, dtype=torch.int64) for width in (T, R, C))
        last = torch.full((B, R), -1)  # the last position of the answer that each position is in
        num_steps = torch.zeros(B, C)  # draft steps of each chain, if the answer is long enough
        for i, (row, parts) in enumerate(zip(rows, spans)):
            count, n = counts[i], len(starts[i])
            tokens[i, : len(row["ids"])] = torch.tensor(row["ids"])
            positions[i, :count] = torch.cat(parts)
            ends = [part.new_full(part.shape, e - 3) for part, (_, e) in zip(parts, row["answers"])]
            last[i, :count] = torch.cat(ends)
            start_index[i, :n] = starts[i]
            for step in range(steps):
                num_steps[i, : math.ceil(n * retention**step)] = step + 1
        offsets = torch.arange(steps)[:, None, None]
        start = positions.gather(1, start_index)
        valid = (start + offsets <= last.gather(1, start_index)) & (offsets < num_steps)  # [steps, B, C]
        predicted = torch.stack([tokens.gather(1, (start + 2 + i).clamp(max=T - 1)) for i in range(steps)])
        scored = valid & in_draft[predicted]
        index = scored.flatten().nonzero()[:, 0]
        step, chain = index // (B * C), index % (B * C)
        teacher_index = chain // C * R + start_index.flatten()[chain] + step
        self.valid, self.scored = valid.sum((1, 2)).tolist(), scored.sum((1, 2)).tolist()
        self.chains = [int((num_steps > i).sum(1).max()) for i in range(steps)]
        self.rows, self.tokens, self.positions, self.starts = (
            rows, tokens.to(device), positions.to(device), start.to(device)
        )
        self.index, self.step, self.teacher_index = (x.to(device) for x in (index, step, teacher_index))

    def input_tokens(self, step: int) -> Tensor:
        """Return the token [B, C] that each chain reads at a draft step: the root at step 0, then drafts."""
        return self.tokens.gather(1, (self.starts + 1 + step).clamp(max=self.tokens.shape[1] - 1))

    def after(self, x: Tensor) -> Tensor:
        """Return rows of x [B, T, ...] one token after each of `positions` [B*R, ...].

        The row of a prediction is at `teacher_index`.
        """
        return gather_tokens(x, (self.positions + 1).clamp(max=self.tokens.shape[1] - 1)).flatten(0, 1)

    def previous_tokens(self) -> Tensor:
        """Return the token that each scored prediction follows [M]."""
        return torch.stack([self.input_tokens(i) for i in range(len(self.scored))]).flatten()[self.index]
