"""GPTQ (Frantar et al., arXiv 2210.17323): int4 weights that keep what a layer computes.

A layer's inputs are correlated, so other weights of its row can make up for an error in one. The columns of a
weight are rounded one after the other, and later columns make up for the errors of those before. A text
contributes only the matrix x^T x of its inputs x, GPTQ's Hessian H.

With H = F F^T, F upper triangular, errors e of a row cost |F^T e|^2. Column k is rounded to what makes its
term zero, given the errors before it: w_k + sum over l < k of F[l, k] e_l / F[k, k]. GPTQ computes the same
with the factor of H's inverse; F needs no inverse (arXiv 2507.18553).

K inputs, N outputs of a layer, R tokens of the text.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized import int4_scales

DAMPING = 0.1  # of the mean square of an input: the weights follow the text less where it says little
PANEL = 1024  # columns of a Hessian that are computed together


def gptq(weight: Tensor, hessian: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Weight [N, K] and x^T x [K, K] of its inputs -> values q [N, K] int8, scales [N, K/group] bf16.

    Both arguments are float32 and finite, and the group divides K.
    """
    N, K = weight.shape
    factor = _upper_factor(hessian)
    diagonal = factor.diagonal().clone()
    factor /= diagonal
    importance = diagonal.square()
    exact = weight.t().contiguous()  # [K, N]
    wanted = exact.clone()  # what columns are rounded to, as far as the errors before them are known
    q = torch.empty(K, N, dtype=torch.int8)
    scale = torch.empty(K // group, N, dtype=torch.bfloat16)
    errors = torch.empty(group, N)
    for start in range(0, K, group):
        end = start + group
        # A group's scales are chosen for what its columns would be if none of them were rounded.
        square, missing = factor[start:end, start:end], wanted[start:end] - exact[start:end]
        missing = torch.linalg.solve_triangular(square.t(), missing, upper=False, unitriangular=True)
        parts = (exact[start:end] + missing).t().contiguous()
        scale[start // group] = int4_scales(parts, importance[start:end])[:, 0]
        unit = scale[start // group].float()
        inverse = torch.where(unit == 0, 1, unit).reciprocal_()
        for i, k in enumerate(range(start, end)):
            value = wanted[k] if i == 0 else wanted[k].addmv_(errors[:i].t(), factor[start:k, k])
            rounded = value.mul_(inverse).round_().clamp_(-8, 7)
            q[k] = rounded
            torch.addcmul(exact[k], rounded, unit, value=-1, out=errors[i])
        wanted[end:].addmm_(factor[start:end, end:].t(), errors)
    return q.t().contiguous(), scale.t().contiguous()


def second_moments(x: Tensor) -> Tensor:
    """Inputs [R, K] -> x^T x [K, K]. It is symmetric, so half of it is computed."""
    hessian = x.new_empty(x.shape[1], x.shape[1])
    for start in range(0, x.shape[1], PANEL):
        panel = x[:, start : start + PANEL].t() @ x[:, start:]
        hessian[start : start + PANEL, start:] = panel
        hessian[start:, start : start + PANEL] = panel.t()
    return hessian


def _upper_factor(hessian: Tensor) -> Tensor:
    """The upper factor F of the damped Hessian F F^T: the lower factor of the columns in reverse order."""
    damped = hessian.flip(0, 1)
    mean = hessian.diagonal().mean()
    damped.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1))
    return torch.linalg.cholesky(damped).flip(0, 1)


def output_error(weight: Tensor, stored: Tensor, x: Tensor) -> float:
    """|x (stored - weight)^T| / |x weight^T| of inputs x [R, K]."""
    return float((x @ (stored - weight).t()).norm() / (x @ weight.t()).norm().clamp(min=1e-30))
