"""How weights follow their gradients: AdamW for all of them, or Muon for the matrices between hidden states.

Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982) turns every matrix along the nearest one
with orthogonal rows or columns, so that no direction of it is left behind. Tables with a row for each token
(embeddings, lm_heads, Markov heads) and vectors stay with AdamW.
"""
from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

BETAS = (0.9, 0.95)
MOMENTUM = 0.95
# Of a polynomial that takes singular values between 0 and 1 near to 1 in few turns (first of the sources).
QUINTIC, TURNS = (3.4445, -4.7750, 2.0315), 5
# An entry of AdamW's update is about this large (second of the sources), so that one rate serves both.
UPDATE = 0.2
TABLES = ("embed", "lm_head", "markov")  # parts of the names of weights with a row for each token


def is_hidden(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix from hidden states to hidden states."""
    return p.ndim == 2 and not any(part in name for part in TABLES)


def make_optimizers(
    kind: str, parameters: dict[str, nn.Parameter], lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Optimizers that together train all `parameters`, with one learning rate.

    kind: a name of `training.choices.OPTIMIZERS`.
    """
    hidden = [p for name, p in parameters.items() if kind == "muon" and is_hidden(name, p)]
    others = [p for p in parameters.values() if not any(p is one for one in hidden)]
    fused = any(p.is_cuda for p in others)
    made: list[torch.optim.Optimizer] = []
    if others:
        made.append(torch.optim.AdamW(others, lr=lr, betas=BETAS, weight_decay=weight_decay, fused=fused))
    if hidden:
        made.append(Muon(hidden, lr, weight_decay))
    return made


def orthogonal(x: Tensor) -> Tensor:
    """About the nearest matrix to x [n, m] with orthogonal rows or columns: singular values near 1.

    On a GPU in bfloat16, which is exact enough for it.
    """
    a, b, c = QUINTIC
    wide = x.T if x.shape[0] > x.shape[1] else x
    y = wide.bfloat16() if x.is_cuda else wide.float()
    y = y / (y.norm() + 1e-7)
    for _ in range(TURNS):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    return (y.T if x.shape[0] > x.shape[1] else y).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Matrices that follow the orthogonal part of their gradients' Nesterov momentum, with weight decay."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                mean = state["mean"].lerp_(p.grad, 1 - MOMENTUM)
                update = orthogonal(p.grad.lerp(mean, MOMENTUM))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * UPDATE * max(p.shape) ** 0.5)
