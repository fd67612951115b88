"""Logits moved by a request's penalties and biases, at every node of a tree as if it were the text's end; and
the restrictions of a request, as masks over logits: exact ties, the same on every device.
"""
from __future__ import annotations

import torch
from torch import Tensor


def adjust(logits: Tensor, state, tokens: Tensor, ancestors: Tensor) -> Tensor:
    """The logits [B, T, V] at the nodes of a tree, moved by penalties and biases.

    state: an `engine.state.State`, which holds these. tokens [B, T]: the tree's, root first; ancestors
    [B, T, T]: row i marks node j if j is i or an ancestor of i. At a node the output also holds the tokens on
    its path.
    """
    penalties = state.presence, state.frequency, state.repetition
    presence, frequency, repetition = (x[:, None, None] for x in penalties)

    def move(logits: Tensor, times: Tensor, prompted: Tensor, bias: Tensor) -> Tensor:
        """Move logits [B, T, N] of tokens that the output holds `times` times."""
        x, there = logits + bias, times > 0
        x = torch.where(there | prompted, torch.where(x > 0, x / repetition, x * repetition), x)
        return x - frequency * times - presence * there

    held = state.counts, state.prompted, state.bias
    moved, T = move(logits, *(x[:, None] for x in held)), tokens.shape[1]
    if T == 1:
        return moved
    # Count every token of the tree on the path to each node; the root is counted already.
    same = (tokens[:, :, None] == tokens[:, None]).float()
    path = torch.cat((torch.zeros_like(ancestors[..., :1]), ancestors[..., 1:]), -1).float()
    on_path = (path @ same).to(state.counts.dtype)  # [B, T, T]: at a node, the tree's token
    ids = tokens[:, None].expand(-1, T, -1)
    counts, prompted, bias = (x.gather(1, tokens)[:, None] for x in held)
    # Nodes that carry one token write the same number.
    return moved.scatter(-1, ids, move(logits.gather(-1, ids), counts + on_path, prompted, bias))


def allow(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits [B, T, V], -inf where the bit of a token in allowed [B, T, V/32] int32 is not set."""
    bits = allowed[..., None] >> torch.arange(32, dtype=torch.int32, device=allowed.device) & 1
    return torch.where(bits.flatten(2)[..., : logits.shape[-1]] != 0, logits, float("-inf"))


def floor(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Set logits [B, T, V] of tokens that are less than min_p [B] times as likely as the likeliest to -inf.

    Likely as in softmax(logits / temperature [B]). Sequences at temperature 0 or with min_p 0 are left alone.
    """
    on = ((min_p > 0) & (temperature > 0))[:, None, None]
    below = temperature * torch.where(min_p > 0, min_p, 1.0).log()  # at most 0
    lowest = logits.amax(-1, keepdim=True) + below[:, None, None]
    return torch.where((logits < lowest) & on, float("-inf"), logits)


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [B, W] of tokens [B, W] under logits [B, W, V]; of the `count` likeliest tokens, the
    log-probabilities and the ids, both [B, W, count].
    """
    every = logits.logsumexp(-1, keepdim=True)
    top, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return logits.gather(-1, tokens[..., None])[..., 0] - every[..., 0], top - every, ids


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
    below = torch.where(ordered >= by_rank, ordered, float("-inf")) - ordered[..., :1]  # at most 0
    # In whole 2^-32 of the top-1 token's weight: such sums do not depend on the order, nor the cut on who
    # computes it. Logits themselves, divided by a tiny temperature, would overflow.
    mass = ((below / warm).exp().double() * 2.0**32).long().cumsum(-1)
    need = (mass[..., -1:].double() * top_p.view(per_row).double()).ceil().long()
    by_mass = ordered.gather(-1, (mass < need).sum(-1, keepdim=True).clamp(max=V - 1))
    by_mass = torch.where(top_p.view(per_row) < 1, by_mass, float("-inf"))  # 1 keeps also what weighs nothing
    keep = (logits >= by_rank) & (logits >= by_mass) | (temperature == 0).view(per_row)
    return torch.where(keep, logits, float("-inf"))
