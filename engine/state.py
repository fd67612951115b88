"""Where the sequences stand: the static buffers of a step."""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor


class State(nn.Module):
    """Where B sequences stand.

    tokens [B, S']     prompt and output; tokens[b, N] is the root, emitted but not committed
    length [B]         N, how many tokens are committed: the target's cache holds their keys and values
    n_new [B]          how many of the last committed tokens the drafter has not read yet
    features [B, W, F] the target's features of those
    limit [B]          the largest N
    done [B]           the sequence moves no more
    reading [B]        its prompt is not read to the end
    stop_ids [n]       any of them ends a text
    key [B, 2], temperature, top_k, top_p [B]   how each request samples
    out [B, W+3]       what the last step emitted, how many of the W are valid, how many of those were drafted
                       (all but the last, unless the text was cut), and whether the sequence is done
    """

    def __init__(self, batch: int, slots: int, window: int, feature_width: int, stop_ids, dtype, device):
        super().__init__()

        def buffer(name: str, *shape: int, dtype=torch.int64, fill: float = 0) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device), persistent=False)

        buffer("tokens", batch, slots)
        buffer("length", batch)
        buffer("limit", batch)
        buffer("done", batch, dtype=torch.bool, fill=True)
        buffer("reading", batch, dtype=torch.bool)
        buffer("features", batch, window, feature_width, dtype=dtype)
        buffer("n_new", batch)
        buffer("out", batch, window + 3)
        buffer("key", batch, 2)
        buffer("temperature", batch, dtype=torch.float32)
        buffer("top_p", batch, dtype=torch.float32, fill=1)
        buffer("top_k", batch)
        stop_ids = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self.register_buffer("stop_ids", stop_ids, persistent=False)

    def root(self) -> Tensor:
        """The root token of each sequence [B]."""
        return self.tokens.gather(1, self.length[:, None])[:, 0]

    def emit(self, tokens: Tensor, count: Tensor) -> Tensor:
        """Append the first `count` [B] of tokens [B, W], cut at the first stop id and at the limit.

        Moves `length` so that the last one appended is the new root; sets `done` and `out`. Returns how many
        were appended [B].
        """
        W, drafted = tokens.shape[1], count - 1
        at = torch.arange(W, device=tokens.device)
        count = torch.where(self.done, 0, torch.minimum(count, self.limit - self.length))
        stops = (tokens[..., None] == self.stop_ids).any(-1) & (at < count[:, None])
        first = torch.where(stops, at, W).amin(-1)
        count = torch.minimum(count, first + 1)
        where = self.length[:, None] + 1 + at
        appended = torch.where(at < count[:, None], tokens, self.tokens.gather(1, where))
        self.tokens.scatter_(1, where, appended)
        self.length.add_(count)
        self.done.logical_or_((first < W) | (self.length >= self.limit))
        counts = torch.stack((count, torch.minimum(drafted, count).clamp(min=0), self.done.long()), 1)
        self.out.copy_(torch.cat((tokens, torch.zeros_like(self.out[:, W + 3 :]), counts), 1))
        return count

    def hand_over(self, features: Tensor | None, count: Tensor, where: Tensor) -> None:
        """Leave the `count` [B] tokens just committed for the drafter to read.

        features [B, <=W, F]: the target's features of them.
        where [B]: in which sequences.
        """
        if features is not None:
            buffer = self.features[:, : features.shape[1]]
            buffer.copy_(torch.where(where[:, None, None], features, buffer))
        self.n_new.copy_(torch.where(where, count, self.n_new))
