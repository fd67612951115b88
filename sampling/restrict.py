"""Top-k and top-p as masks over logits: no sort, exact ties, the same on every device."""
from __future__ import annotations

import torch
from torch import Tensor


def _ordered(x: Tensor) -> Tensor:
    """Map float32 to int64 in the same order.

    A threshold can then be found exactly, by bisection over its bits.
    """
    bits = x.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _highest_threshold(order: Tensor, weight: Tensor, need: Tensor) -> Tensor:
    """The largest t for which sum(weight where order >= t) is at least `need`.

    order, weight [..., V] and need [..., 1] give t [..., 1]; all are int64.
    Bisection over 32 bits: no sort of the vocabulary, a fixed number of reductions, exact. Ties at t are all
    kept.
    """
    low = torch.full_like(need, -(2**31))  # always enough weight above
    high = torch.full_like(need, 2**31 - 1)  # the first t that may have too little
    for _ in range(32):
        middle = (low + high) >> 1
        enough = torch.where(order >= middle, weight, 0).sum(-1, keepdim=True) >= need
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set logits [B, T, V] outside top-k, then outside top-p of what remains, to -inf.

    temperature, top_k (0: off), top_p (1: off) are [B]. Probabilities are softmax(logits / temperature); the
    token that crosses top_p is kept, as are all tokens tied with the last one kept. Sequences at temperature
    0 are left alone.
    """
    order = _ordered(logits)
    rows = (*logits.shape[:2], 1)
    wanted = torch.where(
        top_k > 0, top_k, logits.shape[-1]
    ).clamp(max=logits.shape[-1])[:, None, None].expand(rows)
    by_rank = order >= _highest_threshold(order, torch.ones_like(order), wanted)
    warm = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    scaled = torch.where(by_rank, logits, float("-inf")) / warm
    # In whole 2^-32 of the likeliest token's weight: such sums do not depend on the order, nor the cut on who
    # computes it.
    mass = ((scaled - scaled.amax(-1, keepdim=True)).exp().double() * 2.0**32).long()
    share = top_p[:, None, None].expand(rows)
    need = (mass.sum(-1, keepdim=True).double() * share.double()).ceil().long()
    # 1 keeps also what weighs nothing.
    by_mass = (order >= _highest_threshold(order, mass, need)) | (share >= 1)
    keep = (by_rank & by_mass) | (temperature == 0)[:, None, None]
    return torch.where(keep, logits, float("-inf"))
