"""Rows put together: which go into one batch, and the batch as the losses want it."""
from __future__ import annotations

import torch
from torch import Tensor


def batches(rows: list[dict], budget: int, generator: torch.Generator | None = None) -> list[list[int]]:
    """Places of rows, grouped into batches of at most `budget` padded tokens (or one row), similar lengths
    together.

    With a generator in random order, else shortest first.
    """
    order = list(range(len(rows))) if generator is None else torch.randperm(
        len(rows), generator=generator
    ).tolist()
    # Sort within a window only, so that every epoch groups differently.
    window = 512 if generator else max(1, len(rows))
    result = []
    for i in range(0, len(order), window):
        batch: list[int] = []
        for j in sorted(order[i : i + window], key=lambda j: len(rows[j]["ids"])):
            if batch and (len(batch) + 1) * len(rows[j]["ids"]) > budget:
                result.append(batch)
                batch = []
            batch.append(j)
        result.append(batch)
    if generator:
        result = [result[i] for i in torch.randperm(len(result), generator=generator).tolist()]
    return result


class Batch:
    """Rows padded to one length: tokens [B, T], and the positions `at` [B, R] from which a chain is drafted
    and scored.

    Position j pairs the feature of token j with token j+1; its step-i prediction is token j+2+i. An answer
    ids[b:e] is drafted from b-1 (whose next token, the first root, is the target's) to e-3. `index` [M] lists
    the predictions that are scored, as places in [steps, B, R] flattened, and `step` [M] says of which step;
    `scored` counts them by step, `valid` those that exist. Within an answer the positions follow each other,
    so what belongs to place p at step i stands at place p + i of step 0: `shifted` [M] are those places, in
    [B, R] flattened.
    """

    def __init__(self, rows: list[dict], steps: int, in_draft: Tensor, device: torch.device):
        B, T = len(rows), max(len(r["ids"]) for r in rows)
        spans = [[torch.arange(b - 1, e - 2) for b, e in r["answers"]] for r in rows]
        R = max(sum(map(len, parts)) for parts in spans)
        tokens, at, last = torch.zeros(
            B, T, dtype=torch.int64
        ), torch.zeros(B, R, dtype=torch.int64), torch.full((B, R), -1)
        for i, (row, parts) in enumerate(zip(rows, spans)):
            tokens[i, : len(row["ids"])] = torch.tensor(row["ids"])
            at[i, : sum(map(len, parts))] = torch.cat(parts)
            last[i, : sum(map(len, parts))] = torch.cat(
                [part.new_full(part.shape, e - 3) for part, (_, e) in zip(parts, row["answers"])]
            )
        ahead = torch.arange(steps)[:, None, None]
        valid = at + ahead <= last  # [steps, B, R]
        predicted = torch.stack([tokens.gather(1, (at + 2 + i).clamp(max=T - 1)) for i in range(steps)])
        scored = valid & in_draft[predicted]
        index = scored.flatten().nonzero()[:, 0]
        step = index // (B * R)
        self.valid, self.scored = valid.sum((1, 2)).tolist(), scored.sum((1, 2)).tolist()
        self.rows, self.tokens, self.at = rows, tokens.to(device), at.to(device)
        self.index, self.step, self.shifted = (x.to(device) for x in (index, step, index % (B * R) + step))

    def by_step(self, values: Tensor) -> Tensor:
        """Sums of values [M] over the predictions of each step [steps]."""
        return values.new_zeros(len(self.scored)).index_add(0, self.step, values)
