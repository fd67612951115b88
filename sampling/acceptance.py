"""The rule of acceptance for random proposals, which the papers compare draft models with.

At temperature 0, and for all other drafters, a node is accepted if it carries the one token that the target
draws at its parent (`tree.accept`): the text is that of plain decoding. Here one proposal after the other is
accepted with probability min(1, p/q); else a token is drawn from the part of p that exceeds q (Leviathan et
al. 2211.17192, Chen et al. 2302.01318). The text is distributed as the target's, but with other random
numbers than in plain decoding.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.noise import ACCEPTING, uniform
from tree import Tree, deepest


def accept_residual(
    chain: Tree, distribution: Tensor, logits: Tensor, noise: Tensor, chosen: Tensor, state
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept by residuals in the sequences with a temperature above 0, by equality in the others.

    chain, of T nodes, and distribution: see `residual`. logits, noise [B, T, V] and chosen [B, T]: the
    target's at every node, chosen with the noise. state: an `engine.state.State`. Returns path [B, T] and
    count [B] as `tree.accept`, and the tokens to emit [B, T].
    """
    warm, window = (state.temperature > 0)[:, None], chain.tokens.shape[1]
    agrees = chain.tokens == chosen.gather(1, chain.parent)
    passed, drawn = residual(chain, distribution, logits, noise, state)
    chosen = torch.where(warm, drawn, chosen)
    path, count = deepest(chain, torch.where(warm, passed, agrees), window)
    # An accepted token is not the drawn one: the step emits the path's own tokens, then the one drawn at its
    # end.
    ahead = chain.tokens.gather(1, F.pad(path[:, 1:], (0, 1)))
    accepted = torch.arange(window, device=path.device) < count[:, None] - 1
    return path, count, torch.where(accepted, ahead, chosen.gather(1, path))


def residual(
    chain: Tree, distribution: Tensor, logits: Tensor, noise: Tensor, state
) -> tuple[Tensor, Tensor]:
    """Judge the nodes of a chain that was drawn at random.

    distribution [B, T-1, V]: q, the distribution that nodes 1 to T-1 were drawn from. noise [B, T, V]:
    temperature * Gumbel noise, for the draws. Returns which nodes are accepted, and the token drawn where the
    chain breaks off at each node, both [B, T].
    """
    warm = state.temperature.clamp(min=1e-6)[:, None, None]
    p, q, ahead = (logits / warm).softmax(-1), distribution, chain.tokens[:, 1:, None]
    ratio = p[:, :-1].gather(-1, ahead)[..., 0] / q.gather(-1, ahead)[..., 0].clamp(min=1e-30)
    positions = state.length[:, None] + chain.depth[:, 1:]
    u = uniform(state.key ^ ACCEPTING, positions, 1)[..., 0]
    agrees = torch.cat((torch.ones_like(chain.tokens[:, :1], dtype=torch.bool), u < ratio), 1)
    left = torch.cat(((p[:, :-1] - q).clamp(min=0).log() * warm, logits[:, -1:]), 1)
    return agrees, (left + noise).argmax(-1)
