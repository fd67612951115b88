"""The rules of acceptance other than equality: Medusa's, and the one the papers compare draft models with.

equal     A node is accepted if it carries the one token that the target draws at its parent. The text is that
          of plain decoding. This rule is `tree.accept`.
typical   Medusa's (arXiv 2401.10774, section 2.3.1). A node is accepted if the target finds it likely enough.
          The rule is lossy: the text is not distributed as the target's.
residual  For one random proposal after the other (Leviathan et al. 2211.17192, Chen et al. 2302.01318). A
          node is accepted with probability min(1, p/q); else a token is drawn from what p has more than q.
          The text is distributed as the target's, but not with the random numbers of plain decoding.
At temperature 0 all rules are `equal`.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling.noise import ACCEPTING, stream, uniform
from tree import Tree, deepest, pick

THRESHOLD, ALPHA = 0.09, 0.3  # of typical acceptance (FasterDecoding/Medusa medusa_model.py)


def accept_by(
    rule: str, tree: Tree, distribution: Tensor | None, logits: Tensor, noise: Tensor, chosen: Tensor,
    temperature: Tensor, key: Tensor, length: Tensor, window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept by `rule` in the sequences with a temperature above 0, by equality in the others.

    logits, noise [B, T, V] and chosen [B, T]: the target's at every node, chosen with the noise. temperature,
    length [B] and key [B, 2] are those of the state. distribution: see `residual`. Returns path [B, W] and
    count [B] as `tree.accept` does, and the tokens to emit [B, W].
    """
    warm = (temperature > 0)[:, None]
    agrees, likely = tree.tokens == chosen.gather(1, tree.parent), None
    if rule == "typical":
        passed, likely = typical(tree, logits, temperature)
    else:
        passed, drawn = residual(tree, distribution, logits, noise, temperature, key, length)
        chosen = torch.where(warm, drawn, chosen)
    path, count = deepest(tree, torch.where(warm, passed, agrees), window, likely)
    # What was accepted is not what was drawn: the step emits the path's own tokens, then the one drawn at its
    # end.
    ahead = tree.tokens.gather(1, F.pad(path[:, 1:], (0, 1)))
    accepted = torch.arange(window, device=path.device) < count[:, None] - 1
    return path, count, torch.where(accepted, ahead, chosen.gather(1, path))


def typical(tree: Tree, logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Judge every node of a tree by the target's logits [B, T, V].

    A token passes if its probability given its parent exceeds min(0.09, 0.3 exp(-entropy)).
    Returns whether each node passes [B, T], and the log-probability of its path [B, T].
    """
    log_p = (logits / temperature.clamp(min=1e-6)[:, None, None]).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * (p + 1e-5).log()).sum(-1)
    bar = torch.minimum(torch.full_like(entropy, THRESHOLD), ALPHA * (-entropy).exp())
    own = pick(log_p, tree.parent).gather(-1, tree.tokens[..., None])[..., 0]
    own = torch.where(tree.depth > 0, own, 0.0)
    path = (tree.ancestors * own.clamp(min=-1e9)[:, None]).sum(-1)
    return own.exp() > bar.gather(1, tree.parent), path


def residual(
    chain: Tree, distribution: Tensor, logits: Tensor, noise: Tensor, temperature: Tensor, key: Tensor,
    length: Tensor,
) -> tuple[Tensor, Tensor]:
    """Judge the nodes of a chain that was drawn at random.

    distribution [B, T-1, V]: q, from which the node after each but the last was drawn. noise [B, T, V]:
    temperature * Gumbel noise, for the draws. Returns which nodes are accepted, and the token drawn where the
    chain breaks off at each node, both [B, T].
    """
    warm = temperature.clamp(min=1e-6)[:, None, None]
    p, q, ahead = (logits / warm).softmax(-1), distribution, chain.tokens[:, 1:, None]
    ratio = p[:, :-1].gather(-1, ahead)[..., 0] / q.gather(-1, ahead)[..., 0].clamp(min=1e-30)
    positions = length[:, None] + chain.depth[:, 1:]
    u = uniform(stream(key, ACCEPTING), positions, 1)[..., 0]
    agrees = torch.cat((torch.ones_like(chain.tokens[:, :1], dtype=torch.bool), u < ratio), 1)
    left = torch.cat(((p[:, :-1] - q).clamp(min=0).log() * warm, logits[:, -1:]), 1)
    return agrees, (left + noise).argmax(-1)
