"""Sampling by the Gumbel-max trick with counter-based noise, and top-k, top-p and min-p as masks over logits,
with exact ties on every device.

The token at absolute position t of a sequence is argmax(logits + temperature * g), g standard Gumbel noise
that depends on (seed of the request, t, token id) and on nothing else: not on call order, batch slot, tree
or drafter. Softmax sampling at that temperature is exactly this (the Gumbel-max trick), and because plain and
speculative decoding meet the same noise at the same position they emit the same text from the same seed.
Temperature 0 is greedy decoding.
"""
from __future__ import annotations

import hashlib

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
# Odd multipliers of a 32-bit finalizer found by search for low avalanche bias (hash-prospector). Both are
# below 2^31, so that 32-bit values can be multiplied exactly in int64: the same bits on every device, eager
# or compiled.
_MULTIPLIERS = 0x21F0AAAD, 0x735A2D97
_GOLDEN = 0x1E3779B9  # odd, below 2^31: spreads consecutive counters


def seed_of(*what) -> int:
    """A seed of 56 bits, from a hash of the arguments."""
    return number_of(repr(what))


def number_of(text: str) -> int:
    """A number of 56 bits, from a hash of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit values (held in int64) where every input bit moves every output bit."""
    x = ((x ^ (x >> 16)) * _MULTIPLIERS[0]) & MASK32
    x = ((x ^ (x >> 15)) * _MULTIPLIERS[1]) & MASK32
    return x ^ (x >> 15)


def seed_keys(seeds: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Integer seeds (any size, taken modulo 2^64) -> key [B, 2] int64 of 32-bit words."""
    words = [[seed & MASK32, (seed >> 32) & MASK32] for seed in seeds]
    return torch.tensor(words, dtype=torch.int64, device=device)


def random_bits(key: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Keyed 32-bit hashes [B, W, V] (int64, 0..2^32-1) for key [B, 2] and positions [B, W].

    Each (seed, position) gets two independent words; the token id is hashed under both, so that two positions
    never see shifted copies of one another's sequence.
    """
    low, high = key[:, :1], key[:, 1:]
    a = _mix(_mix(positions + low & MASK32) ^ high)  # [B, W]
    b = _mix(_mix(positions ^ high) + 0x5851F42D + low & MASK32)
    ids = torch.arange(vocab_size, device=key.device, dtype=torch.int64) * _GOLDEN & MASK32
    return _mix(_mix(ids + a[..., None] & MASK32) ^ b[..., None])


def uniform(key: Tensor, positions: Tensor, count: int) -> Tensor:
    """Uniform numbers in (0, 1), ends excluded, [B, W, count] float32 for key [B, 2] and positions [B, W]."""
    return ((random_bits(key, positions, count).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(key: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, W, V] float32 for key [B, 2] and absolute positions [B, W].

    Large values, the ones that win, come from small u = (bits + 1/2) * 2^-32, where float32 is dense: the
    tail is resolved to 2^-33. log1p keeps that resolution. The other end is clamped one step below u = 1.
    """
    return -torch.log(-torch.log1p(-uniform(key, positions, vocab_size)))


def apply_min_p(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Set logits [B, T, V] of tokens that are less than min_p [B] times as probable as the top-1 token to
    -inf.

    Probabilities are softmax(logits / temperature [B]). Sequences at temperature 0 or with min_p 0 are left
    alone.
    """
    on = ((min_p > 0) & (temperature > 0))[:, None, None]
    below = temperature * torch.where(min_p > 0, min_p, 1.0).log()  # at most 0
    lowest = logits.amax(-1, keepdim=True) + below[:, None, None]
    return torch.where((logits < lowest) & on, float("-inf"), logits)


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
    # Integer masses, in units of 2^-32 of the top-1 token's: integer sums do not depend on their order, so
    # all devices cut at the same token. Logits divided by a tiny temperature would overflow.
    mass = ((below / warm).exp().double() * 2.0**32).long().cumsum(-1)
    need = (mass[..., -1:].double() * top_p.view(per_row).double()).ceil().long()
    by_mass = ordered.gather(-1, (mass < need).sum(-1, keepdim=True).clamp(max=V - 1))
    by_mass = torch.where(top_p.view(per_row) < 1, by_mass, float("-inf"))  # top_p 1 keeps zero mass too
    keep = (logits >= by_rank) & (logits >= by_mass) | (temperature == 0).view(per_row)
    return torch.where(keep, logits, float("-inf"))
