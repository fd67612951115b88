"""GPTQ (Frantar et al., arXiv 2210.17323): int4 weights with least output error.

The columns of a weight are rounded one after the other, and later columns compensate for the errors of
earlier ones. Calibration data contribute x^T x of a layer's inputs x, GPTQ's Hessian H.

With H = F F^T, F upper triangular, the errors e of a row cost |F^T e|^2. Column k is rounded to the
value that makes its term zero, given the previous errors: w_k + sum over l < k of F[l, k] e_l / F[k, k]. GPTQ
computes the same with the factor of H's inverse; F needs no inverse (arXiv 2507.18553).

K inputs, N outputs of a layer, R tokens of the text.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized import int4_scales

DAMPING = 0.1  # relative to the mean of H's diagonal
PANEL_COLUMNS = 1024  # of a Hessian, computed together


def gptq(weight: Tensor, hessian: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize weight [N, K] with hessian x^T x [K, K] -> q [N, K] int8, scales [N, K/group] bf16.

    Both arguments are float32 and finite, and the group divides K.
    """
    N, K = weight.shape
    factor = _upper_factor(hessian)
    diagonal = factor.diagonal().clone()
    factor /= diagonal
    importance = diagonal.square()
    exact = weight.t().contiguous()  # [K, N]
    wanted = exact.clone()  # targets of rounding, given the errors so far
    q = torch.empty(K, N, dtype=torch.int8)
    scale = torch.empty(K // group, N, dtype=torch.bfloat16)
    errors = torch.empty(group, N)
    for start in range(0, K, group):
        end = start + group
        # Scales are chosen for the group's targets without the group's own rounding errors.
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
    """Return x^T x [K, K] of inputs x [R, K]; half of it is computed, as it is symmetric."""
    hessian = x.new_empty(x.shape[1], x.shape[1])
    for start in range(0, x.shape[1], PANEL_COLUMNS):
        panel = x[:, start : start + PANEL_COLUMNS].t() @ x[:, start:]
        hessian[start : start + PANEL_COLUMNS, start:] = panel
        hessian[start:, start : start + PANEL_COLUMNS] = panel.t()
    return hessian


def _upper_factor(hessian: Tensor) -> Tensor:
    """Return the upper factor F of the damped Hessian F F^T, by Cholesky in reverse order."""
    damped = hessian.flip(0, 1)
    mean = hessian.diagonal().mean()
    damped.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1))
    return torch.linalg.cholesky(damped).flip(0, 1)


def output_error(weight: Tensor, stored: Tensor, x: Tensor) -> float:
    """Return |x (stored - weight)^T| / |x weight^T| for inputs x [R, K]."""
    return float((x @ (stored - weight).t()).norm() / (x @ weight.t()).norm().clamp(min=1e-30))
