"""GPTQ (Frantar et al., arXiv 2210.17323): int4 weights that keep what a layer computes.

A layer's inputs are correlated, so an error in one weight can be made up for by others of its row. The
columns of a weight are rounded one after the other, and after each the columns that are left take over its
error, in the way that changes the outputs least. A text contributes only the matrix x^T x of its inputs x,
GPTQ's Hessian.

K inputs, N outputs of a layer.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantized import int4_scales

DAMPING = 0.1  # of the mean square of an input: the weights follow the text less where it says little
COLUMNS = 128  # whose errors reach the columns after them in one product; a multiple of every group


def gptq(weight: Tensor, hessian: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Weight [N, K] and x^T x [K, K] of its inputs -> values q [N, K] int8, scales [N, K/group] bf16.

    Both arguments are float32 and finite, and the group divides K.
    """
    N, K = weight.shape
    inverse = _inverse_factor(hessian)
    step = inverse.diagonal()
    left = weight.t().contiguous()  # [K, N]: the columns, those not rounded yet with what they took over
    q = torch.empty(K, N)
    scale = torch.empty(K // group, N, dtype=torch.bfloat16)
    for start in range(0, K, COLUMNS):
        end = min(start + COLUMNS, K)
        errors = torch.empty(end - start, N)
        for k in range(start, end):
            if k % group == 0:
                # An error in column k costs 1 / step[k]^2, once those after it have made up for it.
                parts = left[k : k + group].t().contiguous()
                scale[k // group] = int4_scales(parts, step[k : k + group].reciprocal().square())[:, 0]
            unit = scale[k // group].float()
            q[k] = (left[k] / torch.where(unit == 0, 1, unit)).round().clamp(-8, 7)
            errors[k - start] = (left[k] - q[k] * unit) / step[k]
            left[k + 1 : end] -= inverse[k, k + 1 : end, None] * errors[k - start]
        left[end:] -= inverse[start:end, end:].t() @ errors
    return q.t().to(torch.int8).contiguous(), scale.t().contiguous()


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper factor U of the inverse of the damped Hessian: U^T U = inverse."""
    damped = hessian.clone()
    mean = hessian.diagonal().mean()
    damped.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


def output_error(weight: Tensor, stored: Tensor, hessian: Tensor) -> float:
    """|x (stored - weight)^T| / |x weight^T| over the inputs x with this x^T x."""
    def energy(w: Tensor) -> float:
        return float(((w @ hessian) * w).sum())

    return (energy(stored - weight) / max(energy(weight), 1e-30)) ** 0.5
