"""Top-k and top-p as masks over logits: exact ties, the same on every device."""
from __future__ import annotations

import torch
from torch import Tensor


def restrict(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set logits [B, T, V] outside top-k, then outside top-p of what remains, to -inf.

    temperature, top_k (0: off), top_p (1: off) are [B]. Probabilities are softmax(logits / temperature); the
    token that crosses top_p is kept, as are all tokens tied with the last one kept. Sequences at temperature
    0 are left alone. Backends have kernels that do the same without sorting.
    """
    V = logits.shape[-1]
    per_row = (-1, 1, 1)
    ordered = logits.sort(dim=-1, descending=True).values
    wanted = torch.where(top_k > 0, top_k, V).clamp(max=V).view(per_row)
    by_rank = ordered.gather(-1, (wanted - 1).expand(*logits.shape[:2], 1))  # the last one kept
    warm = torch.where(temperature > 0, temperature, 1.0).view(per_row)
    scaled = torch.where(ordered >= by_rank, ordered, float("-inf")) / warm
    # In whole 2^-32 of the likeliest token's weight: such sums do not depend on the order, nor the cut on who
    # computes it.
    mass = ((scaled - scaled[..., :1]).exp().double() * 2.0**32).long().cumsum(-1)
    need = (mass[..., -1:].double() * top_p.view(per_row).double()).ceil().long()
    by_mass = ordered.gather(-1, (mass < need).sum(-1, keepdim=True).clamp(max=V - 1))
    by_mass = torch.where(top_p.view(per_row) < 1, by_mass, float("-inf"))  # 1 keeps also what weighs nothing
    keep = (logits >= by_rank) & (logits >= by_mass) | (temperature == 0).view(per_row)
    return torch.where(keep, logits, float("-inf"))
