"""Permutation of query and key channels for partial RoPE and for interleaved pairs."""
from __future__ import annotations

import torch
from torch import Tensor

from checkpoint.source import Entry


def rotary_first(head_dim: int, rotary: int, interleaved: bool = False) -> Tensor:
    """Return the order of a head's channels that puts rotary pairs at (j, j + hd/2), from j = 0.

    In files the first `rotary` channels are rotary, in pairs (j, j + rotary/2), or (2j, 2j + 1): interleaved.
    """
    channels, others = torch.arange(rotary), torch.arange(rotary, head_dim)
    first, second = channels.view(-1, 2).unbind(1) if interleaved else channels.chunk(2)
    middle = len(others) // 2
    return torch.cat((first, others[:middle], second, others[middle:]))


def each_head(heads: int, rows: int, order: Tensor) -> Tensor:
    """Repeat the row indices of one head for all heads. rows: number of rows of a head."""
    return (torch.arange(heads)[:, None] * rows + order).flatten()


def reordered(tensors: dict[str, Entry], fields: dict, interleaved: bool) -> dict[str, Entry]:
    """Return the tensors of a model with the channels of queries and keys in our order.

    fields: of ModelArgs. interleaved: see `rotary_first`.
    """
    size, heads, kv_heads = (fields[name] for name in ("head_dim", "num_heads", "num_kv_heads"))
    order = rotary_first(size, fields.get("rotary_dim", size), interleaved)
    q, k = (each_head(count, size, order) for count in (heads, kv_heads))
    v = torch.arange(kv_heads * size)
    qkv = torch.cat((q, len(q) + k, len(q) + len(k) + v))
    orders = {"q_proj": q, "k_proj": k, "qkv_proj": qkv, "q_norm": order, "k_norm": order}

    def reorder(name: str, entry: Entry) -> Entry:
        rows = orders.get(name.rpartition("self_attn.")[2].partition(".")[0])
        fits = rows is not None and entry.shape[0] == len(rows)  # other shapes are reported later
        return entry.rows(rows) if fits else entry

    return {name: reorder(name, tensor) for name, tensor in tensors.items()}
