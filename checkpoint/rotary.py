"""Permutation of query and key channels for partial RoPE and for interleaved pairs."""
from __future__ import annotations

import torch
from torch import Tensor

from checkpoint.source import Entry


def rotary_first(head_dim: int, rotary: int, neighbors: bool = False) -> Tensor:
    """Return the order of a head's channels that puts rotary pairs at (j, j + hd/2), from j = 0.

    In files the first `rotary` channels are rotary, in pairs (j, j + rotary/2), or (2j, 2j+1).
    """
    rest, turning = torch.arange(rotary, head_dim).chunk(2), torch.arange(rotary)
    pairs = turning.view(-1, 2).unbind(1) if neighbors else turning.chunk(2)
    return torch.cat([x for half in zip(pairs, rest or pairs) for x in half[: 1 + len(rest)]])


def each_head(heads: int, rows: int, order: Tensor) -> Tensor:
    """Repeat row indices of one head for all heads of this number of rows."""
    return (torch.arange(heads)[:, None] * rows + order).flatten()


def reordered(tensors: dict[str, Entry], fields: dict, neighbors: bool) -> dict[str, Entry]:
    """Return the tensors of a model with the channels of queries and keys in our order.

    fields: of ModelArgs. neighbors: see `rotary_first`.
    """
    size, heads, kv_heads = (fields[name] for name in ("head_dim", "num_heads", "num_kv_heads"))
    order = rotary_first(size, fields.get("rotary_dim", size), neighbors)
    q, k = (each_head(count, size, order) for count in (heads, kv_heads))
    v = torch.arange(kv_heads * size)
    both = torch.cat((q, len(q) + k, len(q) + len(k) + v))
    orders = {"q_proj": q, "k_proj": k, "qkv_proj": both, "q_norm": order, "k_norm": order}

    def entry(name: str, entry: Entry) -> Entry:
        rows = orders.get(name.rpartition("self_attn.")[2].partition(".")[0])
        fits = rows is not None and entry.shape[0] == len(rows)  # others are reported with all shapes
        return entry.rows(rows) if fits else entry

    return {name: entry(name, tensor) for name, tensor in tensors.items()}
