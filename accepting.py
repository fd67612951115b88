"""Which drafted nodes are accepted: the lossless rule every drafter has, and two others the papers compare with.

equal     A node is accepted if it carries the one token the target draws at its parent. The text is that of plain decoding.
typical   Medusa's (arXiv 2401.10774, section 2.3.1): accepted if the target finds it likely enough. Lossy: the text is not
          distributed as the target's.
residual  For one random proposal after the other (Leviathan et al. 2211.17192, Chen et al. 2302.01318): accepted with
          probability min(1, p/q), else drawn anew from what p has more than q. Distributed as the target's, but with random
          numbers of its own: another text than plain decoding's from the same seed.
At temperature 0 all are `equal`.
"""
from __future__ import annotations

import torch
from torch import Tensor

from sampling import uniform
from tree import Tree, pick

RULES = ("equal", "typical", "residual")
LOSSY = ("typical",)
THRESHOLD, ALPHA = 0.09, 0.3  # of typical acceptance (FasterDecoding/Medusa medusa_model.py)
# Streams of random numbers apart from the target's: for the proposals, for accepting them.
PROPOSING, ACCEPTING = 0x3C6EF372, 0x5BE0CD19


def stream(key: Tensor, which: int) -> Tensor:
    """A key [B, 2] of other random numbers."""
    return key ^ which


def typical(tree: Tree, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """([B, T] whether the target finds each node likely enough given its parent, [B, T] log-probability of its path).

    logits [B, T, V] of the target at every node. A token passes if its probability exceeds min(0.09, 0.3 exp(-entropy)).
    """
    log_p = (logits / temperature.clamp(min=1e-6)[:, None, None]).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * (p + 1e-5).log()).sum(-1)
    bar = torch.minimum(torch.full_like(entropy, THRESHOLD), ALPHA * (-entropy).exp())
    own = pick(log_p, tree.parent).gather(-1, tree.tokens[..., None])[..., 0]
    own = torch.where(tree.depth > 0, own, 0.0)
    path = (tree.ancestors * own.clamp(min=-1e9)[:, None]).sum(-1)
    return own.exp() > bar.gather(1, tree.parent), path


def residual(tree: Tree, logits: Tensor, noise: Tensor, temperature: Tensor, key: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(which nodes of a chain are accepted, the tokens drawn where it breaks off), both [B, T].

    noise [B, T, V]: temperature * Gumbel, for the draws. `tree.proposal` [B, T-1, V]: q, of the node after each but the last.
    """
    warm = temperature.clamp(min=1e-6)[:, None, None]
    p, q, ahead = (logits / warm).softmax(-1), tree.proposal, tree.tokens[:, 1:, None]
    ratio = p[:, :-1].gather(-1, ahead)[..., 0] / q.gather(-1, ahead)[..., 0].clamp(min=1e-30)
    positions = length[:, None] + tree.depth[:, 1:]
    u = uniform(stream(key, ACCEPTING), positions, 1)[..., 0]
    agrees = torch.cat((torch.ones_like(tree.tokens[:, :1], dtype=torch.bool), u < ratio), 1)
    left = torch.cat(((p[:, :-1] - q).clamp(min=0).log() * warm, logits[:, -1:]), 1)
    return agrees, (left + noise).argmax(-1)
