"""GPTQ (Frantar et al., arXiv 2210.17323): 4-bit weights with minimal output error.

The columns of a weight are rounded one after another; later columns compensate for the errors of earlier
ones. GPTQ's Hessian H is x^T x for a layer's inputs x on the calibration text.

With H = F F^T, F upper triangular, the errors e of a row cost |F^T e|^2. Column k is rounded to the
value that makes its term zero, given the previous errors: w_k + sum over l < k of F[l, k] e_l / F[k, k]. GPTQ
computes the same with the factor of H's inverse; F needs no inverse (arXiv 2507.18553).

Shapes: K inputs, N outputs, R tokens.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kernels.stored import Kind, fit_groups, pack_values, quantize_scales

DAMPING = 0.1  # relative to the mean of H's diagonal
SPAN_COLUMNS = 2048  # inputs per Hessian; a multiple of all group sizes
UNIT_MARGIN = 1.25  # factor of super-scales: compensation for errors widens the ranges of later groups


def gptq(weight: Tensor, x: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize weight [N, K] for inputs x [R, K] -> the weight as it is stored, its scale and codes.

    Both arguments are float32 and finite. kind: one of `int4_kind`. Errors are compensated within spans of
    SPAN_COLUMNS: a Hessian's cost grows with the square of its size, that of its factor with the cube.
    """
    (N, K), group = weight.shape, kind.group
    exact = weight.t().contiguous()  # [K, N]
    q = torch.empty(K, N, dtype=torch.uint8)
    units = UNIT_MARGIN * kind.fit(weight)[0][..., None]  # [N, 2, 1]
    codes = torch.empty(N, 2, K // group, dtype=torch.int8)
    for span, to, of_span, found in zip(*(t.split(SPAN_COLUMNS) for t in (exact, q)),
                                        x.split(SPAN_COLUMNS, 1), codes.split(SPAN_COLUMNS // group, 2)):
        _round_span(span, of_span.t() @ of_span, units, group, to, found)
    return pack_values(kind, q.t()), units.flatten(-2), codes.flatten(-2)


def _round_span(exact: Tensor, hessian: Tensor, units: Tensor, group: int, q: Tensor, codes: Tensor) -> None:
    """Round a span of exact [k, N] (transposed) with hessian [k, k] -> q [k, N], codes [N, 2, k / group]."""
    K, N = exact.shape
    factor = _upper_factor(hessian)
    diagonal = factor.diagonal().clone()
    factor /= diagonal
    importance = diagonal.square()
    wanted = exact.clone()  # targets of rounding, given the errors so far
    rounded, errors = torch.empty(2, group, N)
    for start in range(0, K, group):
        end = start + group
        # Scales are chosen for the group's targets without the group's own rounding errors.
        square, missing = factor[start:end, start:end], wanted[start:end] - exact[start:end]
        missing = torch.linalg.solve_triangular(square.t(), missing, upper=False, unitriangular=True)
        parts = (exact[start:end] + missing).t().contiguous()
        of_group = quantize_scales(torch.stack(fit_groups(parts, importance[start:end]), 1), units)
        codes[..., start // group] = of_group[..., 0]
        scale, minimum = (of_group * units)[..., 0].unbind(1)
        inverse = torch.where(scale == 0, 1, scale).reciprocal_()
        for i, k in enumerate(range(start, end)):
            value = wanted[k] if i == 0 else wanted[k].addmv_(errors[:i].t(), factor[start:k, k])
            torch.mul(value + minimum, inverse, out=rounded[i]).round_().clamp_(0, 15)
            torch.addcmul(exact[k] + minimum, rounded[i], scale, value=-1, out=errors[i])
        q[start:end] = rounded
        wanted[end:].addmm_(factor[start:end, end:].t(), errors)


def _upper_factor(hessian: Tensor) -> Tensor:
    """Return the upper factor F of the damped Hessian F F^T, by Cholesky in reverse order."""
    damped = hessian.flip(0, 1)
    mean = hessian.diagonal().mean()
    damped.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1))
    return torch.linalg.cholesky(damped).flip(0, 1)

